"""HetLoRA: clients of unequal ranks, which they prune themselves, weighted by their adapters' norms (Cho et al. 2024).

    in every round: client of rank r gets the first r columns of B and rows of A (truncation), and minimises
                    its loss + penalty ||B[:, g r:]|| ||A[g r:, :]||, summed over all layers (rank self-pruning)
                    if that product of norms is smaller than before training, r <- g r, and the rest is cut off
                    server: B and A padded by zeros to the largest rank (zero-padding),
                    their mean weighted by ||B A||, layer by layer (sparsity-weighted aggregation)

The norms are Frobenius norms; g is `decay`. Only the space's ranks are used: g r is rounded down to one of them,
and a client keeps its rank if there is none. All other trained tensors are averaged as usual. With decay=1,
norm_weights=false and one rank this is FedAvg of the adapters. Unlike in HeteroFL, where a row is averaged over the
clients that hold it, the padded zeros count in the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.platform.averaging.weighting import weighting_traits
from fedloom.platform.clients.local_rules import COUNTERS, STATE, local_rule
from fedloom.platform.clients.networks import Network, OfSubnet, Subnet
from fedloom.platform.clients.trainer import Train, TrainedNetwork
from fedloom.platform.federation.method import Method
from fedloom.platform.federation.training_config import rules_of
from fedloom.platform.methods.tier_models import WidthConfig, largest_of_tiers, tier_stages
from fedloom.platform.settings import SHARE, ZERO_OR_MORE
from fedloom.platform.spaces.capabilities import with_adapters
from fedloom.platform.spaces.slices import Architecture, Slice, bytes_of

if TYPE_CHECKING:
    from fedloom.platform.averaging.average import Update
    from fedloom.platform.clients.assignments import Assignment, ClientResult
    from fedloom.platform.clients.objectives import Objective
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.federation.algorithm import Round
    from fedloom.platform.federation.method import Stage
    from fedloom.platform.federation.world import World
    from fedloom.platform.spaces.capabilities import Pair
    from fedloom.platform.spaces.slices import Weights

OPTION = f"{STATE}{COUNTERS}rank"
"""The name, in a client's state, of the option (index of a rank) to which it has pruned itself."""


@dataclass
class HetLoRAConfig(WidthConfig):
    """Training of adapters of each client's rank, and the tiers' models."""

    name: str = "hetlora"
    decay: Annotated[float, SHARE, "g, the share of its rank to which a client prunes itself; 1: no pruning"] = 0.5
    penalty: Annotated[float, ZERO_OR_MORE, "weight, in the loss, of the norms of what would be pruned"] = 0.005
    norm_weights: Annotated[bool, "whether adapters are weighted by the norm of B A; false: by train.weighting"] = True


def pruned(ranks: Sequence[int], option: int, decay: float) -> int | None:
    """The option with the largest smaller rank that is at most `decay` times the given option's; None without any.

    A decay of 1 prunes nothing.
    """
    below = [i for i in range(option) if ranks[i] <= decay * ranks[option]]
    return below[-1] if below and decay < 1 else None


def tail_norms(tensors: Mapping[str, Tensor], pairs: Sequence[Pair], rank: int) -> Tensor:
    """The sum over layers of ||B[:, rank:]|| ||A[rank:]||."""
    norm = torch.linalg.vector_norm
    return torch.stack([norm(tensors[p.up][:, rank:]) * norm(tensors[p.down][rank:]) for p in pairs]).sum()


@torch.no_grad()
def weighed_by_norms(update: Update, pairs: Sequence[Pair], share: float) -> Update:
    """The update in which `share` times the norm of B A is the weight of both B and A."""
    weights = dict(update.weights)
    for pair in pairs:
        up, down = update.tensors[pair.up].double(), update.tensors[pair.down].double()
        # ||B A||^2 is the trace of (B^T B) (A A^T), which are r by r.
        norm = ((up.t() @ up) * (down @ down.t())).sum().clamp(min=0).sqrt().item()
        weights[pair.up] = weights[pair.down] = share * norm
    return replace(update, weights=weights)


def cut(update: Update, pairs: Sequence[Pair], rank: int) -> Update:
    """The update with only the first `rank` columns of B and rows of A."""
    tensors, slices = dict(update.tensors), dict(update.slices)
    for pair in pairs:
        tensors[pair.up], tensors[pair.down] = tensors[pair.up][:, :rank], tensors[pair.down][:rank]
        for name in (pair.up, pair.down):
            slices[name] = Slice(name, tuple((0, n) for n in tensors[name].shape))
    return replace(update, tensors=tensors, slices=slices)


def padded(update: Update, pairs: Sequence[Pair], rank: int) -> Update:
    """The update with the adapters padded with zeros to `rank`, the largest."""
    tensors, slices = dict(update.tensors), dict(update.slices)
    for pair in pairs:
        missing = rank - len(tensors[pair.down])
        tensors[pair.up] = F.pad(tensors[pair.up].detach(), (0, missing))
        tensors[pair.down] = F.pad(tensors[pair.down].detach(), (0, 0, 0, missing))
        slices[pair.up], slices[pair.down] = Slice(pair.up), Slice(pair.down)
    return replace(update, tensors=tensors, slices=slices)


@dataclass(frozen=True)
class Pruning(OfSubnet):
    """A subnet whose loss includes `penalty` times the norms of what would be pruned."""

    pairs: Sequence[Pair]
    rank: int
    penalty: float

    def on(self, worker: Worker, assignment: Assignment) -> Network:
        """The network in the subnet's own module."""
        network = self.subnet.on(worker, assignment)
        tensors = worker.tensors_of(network.module)

        def loss(objective: Objective, outputs: Tensor, targets: Tensor) -> Tensor:
            return objective.loss(outputs, targets) + self.penalty * tail_norms(tensors, self.pairs, self.rank)

        return replace(network, loss=loss, compilable=False)


@dataclass(frozen=True)
class SendPadded(Train):
    """A client that prunes its rank, and whose adapters are padded with zeros to the largest rank.

    `ranks` are the space's ranks, `option` is the index of the client's own, `smaller` of the one it may prune to.
    """

    pairs: Sequence[Pair] = ()
    ranks: Sequence[int] = ()
    option: int = 0
    smaller: int | None = None
    norm_weights: bool = True

    def outcome(self, trained: TrainedNetwork, samples: int) -> ClientResult:
        """The result with a pruned update, weighted by norms."""
        result, client = super().outcome(trained, samples), trained.client
        assert result.update is not None, "it has trained"
        option, update = self.option, result.update
        if self.smaller is not None:
            rank = self.ranks[self.smaller]
            before, after = (tail_norms(t, self.pairs, rank) for t in (client.received, trained.tensors))
            if bool(after < before):
                option, update = self.smaller, cut(update, self.pairs, rank)
        saved_bytes = bytes_of(result.update.tensors) - bytes_of(update.tensors)
        if self.norm_weights:
            update = weighed_by_norms(update, self.pairs, self.share)
        state = {**trained.state, OPTION: torch.tensor(float(option))}
        return replace(result, update=update, bytes_up=result.bytes_up - saved_bytes, state=state)

    def finished(
        self, worker: Worker, assignment: Assignment, trained: TrainedNetwork, samples: int, weights: Weights
    ) -> ClientResult:
        """The result with the padded update that is summed."""
        result = super().finished(worker, assignment, trained, samples, weights)
        assert result.update is not None, "it has trained"
        return replace(result, update=padded(result.update, self.pairs, self.ranks[-1]))


def option_of(round_: Round, client_id: int, widest: Architecture) -> int:
    """A client's option: that of its tier, unless it has pruned its rank."""
    state = round_.state.client_state(client_id) or {}
    return int(state[OPTION].item()) if OPTION in state else widest[0]


def check(config: HetLoRAConfig) -> None:
    """Raises ValueError for settings that cannot handle pruned, padded or norm-weighted updates."""
    train, privacy = config.train, config.train.privacy
    if train.processors and config.decay < 1:
        raise ValueError(
            f"method.train.processors={train.processors}: hetlora's clients cut off ranks from what they send: set "
            "method.decay=1, or leave processors out"
        )
    if train.arrivals is not None and config.decay < 1:
        raise ValueError(
            f"method.train.arrivals={train.arrivals}: how many ranks hetlora's clients send is known only after their "
            "training, and so is the order of the answers: set method.decay=1, or leave arrivals and asynchronous out"
        )
    if privacy.clip is not None or privacy.secure or privacy.noise:
        raise ValueError(
            "method.train.privacy: the zeros and the norms of hetlora's adapters reveal the ranks and weights of "
            "single clients; leave it out"
        )
    if train.aggregator != "mean":
        raise ValueError(
            f"method.train.aggregator={train.aggregator}: it would take the zeros that hetlora adds to adapters "
            "for values of their clients; use mean"
        )
    if local_rule(rules_of(train, "method.train").local).server is not None:
        raise ValueError(
            f"method.train.local_rule={train.local_rule}: its server rule would take the zeros that hetlora adds to "
            "smaller adapters for changes made by their clients; use sgd, fedprox or scaffold"
        )
    if config.norm_weights and weighting_traits(train.weighting).weighs_unheld:
        raise ValueError(
            f"method.train.weighting={train.weighting}: old values would count with samples, adapters with the norms "
            "of B A: set method.norm_weights=false, or use another weighting"
        )


def stages(config: HetLoRAConfig, world: World) -> list[Stage]:
    """Training, the tiers' models, evaluation."""
    space, largest = with_adapters(world.space, config.name), largest_of_tiers(world)
    check(config)
    pairs, ranks = space.pairs, space.ranks

    def option(round_: Round, client_id: int) -> int:
        return option_of(round_, client_id, largest[int(world.tier_of_client[client_id])])

    def network(round_: Round, client_id: int) -> Subnet | Pruning:
        subnet = Subnet((option(round_, client_id),))
        smaller = pruned(ranks, option(round_, client_id), config.decay)
        return subnet if smaller is None else Pruning(subnet, pairs, ranks[smaller], config.penalty)

    def client(round_: Round, client_id: int, task: Train) -> SendPadded:
        rank_option = option(round_, client_id)
        smaller = pruned(ranks, rank_option, config.decay)
        return SendPadded(
            **vars(task),
            pairs=pairs,
            ranks=ranks,
            option=rank_option,
            smaller=smaller,
            norm_weights=config.norm_weights,
        )

    return tier_stages(
        *(world, config.name, config.train, config.evaluation, network),
        client=client,
        countable=config.decay == 1,
        statistics_clients=config.statistics_clients,
    )


METHOD = Method(HetLoRAConfig, stages, kind="tiers", lacks=("candidates",), needs=with_adapters)
