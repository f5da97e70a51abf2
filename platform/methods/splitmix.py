"""SplitMix: a wide network is split into narrow base nets, mixed to any width (Hong et al. 2022, Alg. 1 to 3).

    in every round: each client trains as many base nets as its tier affords, each by its own loss on the same batches:
                    first the next one of a shuffled cycle through all, which continues across clients and rounds, then
                    others at random;
                    a base net becomes the mean over the clients that trained it
    at the end:     a tier's model is the mix of the first base nets, as many as it affords, by their mean logits

Batch norms keep no statistics in training; clients measure them at the end (norm=static), as in HeteroFL. The authors'
code also initialises base nets with the variance of the wide network's layers; here they are initialised as stand-alone
networks. One base net is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fedloom.platform.clients.networks import Network, OfSubnet, Subnet
from fedloom.platform.federation.method import Method
from fedloom.platform.federation.training_config import TrainingConfig, cohort_size
from fedloom.platform.methods.depthfl import loss_of_exits
from fedloom.platform.methods.tier_models import WidthConfig, largest_of_tiers, refuse_masked_rows, tier_stages
from fedloom.platform.seeding import stream
from fedloom.platform.spaces.capabilities import with_bases
from fedloom.platform.spaces.slices import Slice, SliceMap

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.platform.clients.assignments import Assignment
    from fedloom.platform.clients.objectives import Objective
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.federation.algorithm import Round
    from fedloom.platform.federation.method import Stage
    from fedloom.platform.federation.world import World
    from fedloom.platform.spaces.base import SearchSpace


@dataclass
class SplitMixConfig(WidthConfig):
    """Training of base nets, and the tiers' mixes."""

    name: str = "splitmix"
    train: TrainingConfig = field(default_factory=TrainingConfig)


@dataclass(frozen=True)
class BaseNets(OfSubnet):
    """The base nets with the numbers `bases`, each trained by its own loss; `subnet` is the mix of as many nets."""

    bases: tuple[int, ...]

    def on(self, worker: Worker, assignment: Assignment) -> Network:
        """The network: its outputs are the mean of the base nets' logits; its loss uses the logits of each net."""
        network, last = self.subnet.on(worker, assignment), list["Tensor"]()

        def forward(x_B: Tensor) -> Tensor:
            last.clear()
            outputs: Tensor = network.module(x_B, last)
            return outputs

        def loss(objective: Objective, outputs: Tensor, targets: Tensor) -> Tensor:
            return loss_of_exits(objective, [each.to(outputs.dtype) for each in last], targets, 0.0)

        return replace(network, forward=forward, slices=self._of_bases(network.slices), loss=loss)

    def held(self, space: SearchSpace) -> SliceMap:
        """These base nets' tensors."""
        return self._of_bases(self.subnet.held(space))

    def _of_bases(self, slices: SliceMap) -> SliceMap:
        """The tensors `bases.NUMBER.NAME` of the first base nets, taken from these base nets instead."""
        parts = {name: name.split(".", 2) for name in slices}
        return {name: Slice(f"{top}.{self.bases[int(number)]}.{rest}") for name, (top, number, rest) in parts.items()}


def sampled_bases(seed: int, round_: Round, client_id: int, cohort: int, count: int, total: int) -> tuple[int, ...]:
    """The base nets that a client trains, ascending: the next one of the cycle, and others at random (Alg. 2).

    A round advances the cycle by `cohort` clients, even if fewer are available, so that it depends on no history.
    """
    turn = round_.index * cohort + round_.client_ids.index(client_id)
    cycle, position = divmod(turn, total)
    first = int(stream(seed, "base_cycle", cycle).permutation(total)[position])
    others = [base for base in range(total) if base != first]
    more = stream(seed, "bases", round_.index, client_id).choice(others, count - 1, replace=False) if count > 1 else ()
    return tuple(sorted((first, *map(int, more))))


def stages(config: SplitMixConfig, world: World) -> list[Stage]:
    """Training, the tiers' mixes and their statistics, evaluation."""
    space, affordable = with_bases(world.space, config.name), largest_of_tiers(world)
    refuse_masked_rows(world, config.name)
    if config.train.privacy.noise:
        raise ValueError(
            "method.train.privacy.noise: the base nets that a client trains depend on who else takes part, so that its "
            "influence is larger than its own update, and epsilon would promise too much; leave it out (0)"
        )
    cohort, total = cohort_size(config.train, world.num_clients), space.num_bases(space.largest)

    def network(round_: Round, client_id: int) -> BaseNets:
        mix = affordable[int(world.tier_of_client[client_id])]
        seed = world.config.seed_for("training")
        return BaseNets(Subnet(mix), sampled_bases(seed, round_, client_id, cohort, space.num_bases(mix), total))

    clients = config.statistics_clients
    return tier_stages(world, config.name, config.train, config.evaluation, network, statistics_clients=clients)


METHOD = Method(SplitMixConfig, stages, kind="tiers", lacks=("candidates",), needs=with_bases)
