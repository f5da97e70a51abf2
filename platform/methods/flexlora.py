"""FlexLoRA: the server averages the adapters' products and truncates the mean to each rank (Bai et al. 2024, Sec. 3).

    in every round: each client trains B (out, r) and A (r, in) of its tier's rank r, and sends them
                    W = sum_k p_k B_k A_k, p_k by the clients' samples (weighting=fedavg)
                    W = U S V^T; B <- U S, A <- V^T; a client of rank r gets B's first r columns and A's first r rows

The first r singular directions are W's best approximation of rank r, whichever factor the singular values go to. Here
they go to B: A's rows keep about the norm with which LoRA starts, and a direction that W lacks has B = 0 but can still
grow, because A is not zero; with a square root in both factors it would be a saddle point. The authors' factors s_k are
the space's factor here, the same for all ranks. All other trained tensors are averaged as usual.

Workers compute the products, so that chunks can be summed: this is the server's work, and adds no bytes to messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.trainer import Train, TrainedNetwork
from fedloom.platform.federation.algorithm import SUPERNET
from fedloom.platform.federation.method import Method
from fedloom.platform.methods.tier_models import WidthConfig, largest_of_tiers, refuse_what_stays, tier_stages
from fedloom.platform.spaces.capabilities import with_adapters
from fedloom.platform.spaces.slices import Slice

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.platform.averaging.average import Update
    from fedloom.platform.clients.assignments import Assignment, ClientResult
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.federation.algorithm import Plan, Round, RoundResult, RunState
    from fedloom.platform.federation.method import Stage
    from fedloom.platform.federation.training_config import TrainingConfig
    from fedloom.platform.federation.world import World
    from fedloom.platform.spaces.capabilities import Pair
    from fedloom.platform.spaces.slices import Weights


@dataclass
class FlexLoRAConfig(WidthConfig):
    """Training of adapters of each tier's rank, and the tiers' models."""

    name: str = "flexlora"


@dataclass(frozen=True)
class SendProducts(Train):
    """A client that sends adapters, whose products the server sums."""

    pairs: Sequence[Pair] = ()

    def finished(
        self, worker: Worker, assignment: Assignment, trained: TrainedNetwork, samples: int, weights: Weights
    ) -> ClientResult:
        """The result with the adapters' products in the update, and the bytes of the adapters."""
        result = super().finished(worker, assignment, trained, samples, weights)
        assert result.update is not None, "it has trained"
        return replace(result, update=with_products(result.update, self.pairs))


def product_of(pair: Pair) -> str:
    """The name of the tensor that sums a layer's products on the server."""
    return f"product/{pair.down}"


@torch.no_grad()
def with_products(update: Update, pairs: Sequence[Pair]) -> Update:
    """The update with the product B A (out, in), weighted as A is, in place of B and A."""
    tensors, slices, weights = dict(update.tensors), dict(update.slices), dict(update.weights)
    for pair in pairs:
        up, down, name = tensors.pop(pair.up), tensors.pop(pair.down), product_of(pair)
        tensors[name], slices[name], weights[name] = up @ down, Slice(name), weights[pair.down]
    return replace(update, tensors=tensors, slices=slices, weights=weights)


def empty_products(weights: Weights, pairs: Sequence[Pair]) -> dict[str, Tensor]:
    """The sums of products (out, in) before a round: zeros."""
    return {
        product_of(pair): weights[pair.up].new_zeros(weights[pair.up].shape[0], weights[pair.down].shape[1])
        for pair in pairs
        if pair.up in weights  # none in a dry run
    }


def factors_of(product: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """B (out, rank) and A (rank, in), whose first r columns and rows are the product's best approximation of rank r."""
    left, values, right = torch.linalg.svd(product.double(), full_matrices=False)
    up, down = left[:, :rank] * values[:rank], right[:rank]
    return up.to(product.dtype).contiguous(), down.to(product.dtype).contiguous()


def redistributed(weights: Weights, pairs: Sequence[Pair]) -> dict[str, Tensor]:
    """The weights with the factors of the mean products; a layer whose product no client sent keeps its adapter."""
    after = {**weights, **empty_products(weights, pairs)}
    for pair in pairs:
        product = weights.get(product_of(pair))
        if product is not None and bool(product.any()):
            after[pair.up], after[pair.down] = factors_of(product, weights[pair.down].shape[0])
    return after


def check_adapters(world: World, train: TrainingConfig, who: str, why: str) -> None:
    """Raises ValueError for settings that need the adapters as they are sent: the server replaces them by new ones."""
    refuse_what_stays(train, who, why)
    if train.options.get("direction", "up") != "up":
        raise ValueError(
            f"method.train.options.direction={train.options['direction']}: {who}'s clients receive the adapters of "
            "others, whose rounding errors would enter the model in every round; use up"
        )
    if world.attackers and world.attack.colludes:
        raise ValueError(
            f"attack.name={world.config.attack.name}: colluders change what is averaged, but {who} averages products "
            "of the adapters that they send; use an attack whose clients work alone"
        )
    if train.privacy.clip is not None or train.privacy.secure or train.privacy.noise:
        raise ValueError(
            f"method.train.privacy: {who}'s server multiplies the adapters of single clients, so privacy would neither "
            "hide nor bound them; leave it out"
        )


def stages(config: FlexLoRAConfig, world: World) -> list[Stage]:
    """Training, the tiers' models, evaluation."""
    space, largest = with_adapters(world.space, config.name), largest_of_tiers(world)
    check_adapters(world, config.train, config.name, "decomposes the adapters after every round")
    if config.train.aggregator == "norm_bound":  # a round's products begin as zeros, not as the current B A
        raise ValueError(
            "method.train.aggregator=norm_bound: flexlora's server averages products of adapters, and would bound the "
            "products instead of their changes; use another aggregator"
        )
    pairs = space.pairs

    def network(_round: Round, client_id: int) -> Subnet:
        return Subnet(largest[int(world.tier_of_client[client_id])])

    def client(_round: Round, _client_id: int, task: Train) -> SendProducts:
        return SendProducts(**vars(task), pairs=pairs)

    def after(state: RunState, _plan: Plan, _result: RoundResult) -> RunState:
        return state.with_group(SUPERNET, redistributed(state.weights(SUPERNET), pairs))

    return tier_stages(
        *(world, config.name, config.train, config.evaluation, network),
        client=client,
        more=lambda weights: empty_products(weights, pairs),
        after=after,
        statistics_clients=config.statistics_clients,
    )


METHOD = Method(FlexLoRAConfig, stages, kind="tiers", lacks=("candidates",), needs=with_adapters)
