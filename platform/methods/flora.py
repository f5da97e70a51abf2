"""FLoRA: the server stacks the clients' adapters, and every client merges the stack into its base (Wang et al. 2024).

    in every round: each client draws a new A (r, in) with its tier's rank r, sets B (out, r) to zero,
                    trains both on the current base, and sends them
                    server: A = [p_1 A_1; ...; p_K A_K], B = [B_1, ..., B_K], p_k by the samples (weighting=fedavg)
                    each client gets A and B, and merges them: W <- W + s B A = W + s sum_k p_k B_k A_k

Unlike a mean of the factors, the sum of the products is exact (Eq. 3 to 5). Every process holds the original base as a
constant. The current base differs from it by a sum of products per layer, which `space.lora.merged=true` adds to the
network; these sums are the state of the server and of the workers.

A client's bytes: it draws A and B itself, and sends them. It gets what it has missed since it last took part, or since
the first round: the stacks of these rounds, or the layers' sums as whole matrices, whichever is smaller. The paper
sends every stack to all clients; here a client that skips a round gets its stack when it next takes part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fedloom.platform.clients.assignments import places_of
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.trainer import Train, TrainedNetwork
from fedloom.platform.federation.method import Method
from fedloom.platform.methods.flexlora import check_adapters
from fedloom.platform.methods.tier_models import WidthConfig, largest_of_tiers, tier_stages
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.base import supernet_shapes
from fedloom.platform.spaces.capabilities import HasAdapters, with_adapters
from fedloom.platform.spaces.slices import FLOAT_BYTES, parse_architecture

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.platform.averaging.average import Update
    from fedloom.platform.clients.assignments import Assignment, ClientResult
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.federation.algorithm import Plan, Round, RoundResult, RunState
    from fedloom.platform.federation.method import Stage
    from fedloom.platform.federation.world import World
    from fedloom.platform.spaces.capabilities import Pair
    from fedloom.platform.spaces.slices import Weights

STACKS, SEEN = "flora_stacks", "flora_seen"
"""The run's JSON values: the bytes of every round's stack, and per client the last round in which it took part."""


@dataclass
class FLoRAConfig(WidthConfig):
    """Training of fresh adapters in every round, and the tiers' models, all of which are the merged base."""

    name: str = "flora"


@dataclass(frozen=True)
class Sizes:
    """Bytes over all layers: of the factors A and B, per rank, and of the merged sums of products."""

    per_rank: int
    merged: int

    @classmethod
    def of(cls, space: HasAdapters) -> Sizes:
        """The sizes in a space."""
        shapes = supernet_shapes(space)
        outs, ins = [shapes[pair.up][0] for pair in space.pairs], [shapes[pair.down][1] for pair in space.pairs]
        products = sum(o * i for o, i in zip(outs, ins, strict=True))
        return cls(FLOAT_BYTES * (sum(outs) + sum(ins)), FLOAT_BYTES * products)

    def missed(self, stacks: Sequence[int], since: int) -> int:
        """The bytes sent to a client whose base is that of before round `since`, given the bytes of all stacks."""
        return min(sum(stacks[since:]), self.merged)


@dataclass(frozen=True)
class SendStack(Train):
    """A client that trains fresh adapters and sends them to be merged; it first gets the `missed_bytes`."""

    pairs: Sequence[Pair] = ()
    scale: float = 1.0
    missed_bytes: int = 0

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Trains the network with A drawn anew and B zero."""
        generator = torch_stream(worker.spec.training_seed, "adapters", *places_of(assignment))
        return super().run(worker, assignment, with_fresh_adapters(weights, self.pairs, generator))

    def finished(
        self, worker: Worker, assignment: Assignment, trained: TrainedNetwork, samples: int, weights: Weights
    ) -> ClientResult:
        """The result whose update has the sums merged with this client's adapters alone, in place of the adapters."""
        result = super().finished(worker, assignment, trained, samples, weights)
        assert result.update is not None, "it has trained"
        return replace(self._with_traffic(worker, result), update=merged(result.update, self.pairs, self.scale))

    def account(self, worker: Worker, assignment: Assignment) -> ClientResult:
        return self._with_traffic(worker, super().account(worker, assignment))

    def _with_traffic(self, worker: Worker, result: ClientResult) -> ClientResult:
        """The result with bytes for what is sent: not the sums or the client's own new A and B, but what it missed."""
        space = with_adapters(worker.space, "flora")
        sizes, (option,) = Sizes.of(space), parse_architecture(result.architecture or "")
        adapters = space.ranks[option] * sizes.per_rank
        down_bytes = result.bytes_down - sizes.merged - adapters + self.missed_bytes
        return replace(result, bytes_up=result.bytes_up - sizes.merged, bytes_down=down_bytes)


def with_fresh_adapters(weights: Weights, pairs: Sequence[Pair], generator: torch.Generator) -> dict[str, Tensor]:
    """The weights with LoRA's initial adapters: A uniform in +-1/sqrt(in), B zero."""
    fresh = dict(weights)
    for pair in pairs:
        old, bound = weights[pair.down], 1 / math.sqrt(weights[pair.down].shape[1])
        fresh[pair.down] = torch.empty(old.shape).uniform_(-bound, bound, generator=generator).to(old.device)
        fresh[pair.up] = torch.zeros_like(weights[pair.up])
    return fresh


@torch.no_grad()
def merged(update: Update, pairs: Sequence[Pair], scale: float) -> Update:
    """The update with the sum of merged products, including this client's, in place of A and B."""
    tensors, weights = dict(update.tensors), dict(update.weights)
    for pair in pairs:
        up, down = tensors.pop(pair.up), tensors.pop(pair.down)
        tensors[pair.merged] = tensors[pair.merged] + scale * (up @ down)
        weights[pair.merged] = weights[pair.down]
    return replace(update, tensors=tensors, weights=weights)


def stages(config: FLoRAConfig, world: World) -> list[Stage]:
    """Training, the tiers' models, evaluation."""
    space, largest = with_adapters(world.space, config.name), largest_of_tiers(world)
    check_adapters(world, config.train, config.name, "merges the adapters after every round")
    pairs, sizes = space.pairs, Sizes.of(space)
    if pairs[0].merged not in space.slices(space.largest):
        raise ValueError(
            "flora merges adapters into a sum per layer, which the network must hold: set space.lora.merged=true"
        )

    def network(_round: Round, client_id: int) -> Subnet:
        return Subnet(largest[int(world.tier_of_client[client_id])])

    def client(round_: Round, client_id: int, task: Train) -> SendStack:
        data = round_.state.data
        missed_bytes = sizes.missed(data.get(STACKS, []), data.get(SEEN, {}).get(str(client_id), 0))
        return SendStack(**vars(task), pairs=pairs, scale=space.adapter_scale, missed_bytes=missed_bytes)

    def after(state: RunState, plan: Plan, result: RoundResult) -> RunState:
        answered = [r for r in result.client_results if r.client_id is not None and r.status == "ok"]
        ranks = sum(space.ranks[parse_architecture(r.architecture or "")[0]] for r in answered)
        stack = ranks * sizes.per_rank if len(answered) >= config.train.min_contributors else 0
        begun = {a.client_id: a.round for a in plan.assignments}
        seen = {**state.data.get(SEEN, {}), **{str(r.client_id): begun[r.client_id] for r in answered}}
        return state.with_data(STACKS, [*state.data.get(STACKS, []), stack]).with_data(SEEN, seen)

    return tier_stages(
        *(world, config.name, config.train, config.evaluation, network),
        client=client,
        after=after,
        statistics_clients=config.statistics_clients,
    )


METHOD = Method(FLoRAConfig, stages, kind="tiers", lacks=("candidates",), needs=with_adapters)
