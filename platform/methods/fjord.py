"""FjORD: ordered dropout, a width per batch, distilled from the widest (Horváth et al. 2021, Alg. 1, Eq. 3).

    client of maximum p_max:
        for every batch draw a width p up to p_max, train the leading share p of the channels;
        with self-distillation minimise the loss of p_max plus that of p,
        (1 - a) cross entropy + a T^2 KL(p_max's outputs || p's), softened by T; p_max's are fixed targets here
    server:
        a parameter becomes the mean over the clients that hold it, weighted by their samples

Without distillation a batch is one pass of width p. A single width without distillation is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

from fedloom.platform.clients.assignments import Assignment, places_of
from fedloom.platform.clients.local_rules import refuse_extra_passes
from fedloom.platform.clients.networks import Account, DrawingNetwork, Network, Subnet
from fedloom.platform.clients.objectives import DistilledLoss, check_divergence
from fedloom.platform.data.trees import rows_of
from fedloom.platform.federation.method import Method
from fedloom.platform.federation.training_config import rules_of
from fedloom.platform.methods.tier_models import WidthConfig, largest_of_tiers, of_widths, tier_stages
from fedloom.platform.seeding import stream
from fedloom.platform.settings import PART, POSITIVE
from fedloom.platform.spaces.base import once
from fedloom.platform.spaces.initialisation import on_meta
from fedloom.platform.spaces.slices import Architecture, SliceMap, architecture_id, extract

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.federation.method import Stage
    from fedloom.platform.federation.world import World
    from fedloom.platform.spaces.base import SearchSpace


@dataclass
class FjordConfig(WidthConfig):
    """Training with ordered dropout, and the tiers' models."""

    name: str = "fjord"
    distillation: Annotated[float, PART, "a, weight of the distillation from the widest network; 0: none"] = 1.0
    temperature: Annotated[float, POSITIVE, "T, by which logits are divided in distillation"] = 1.0


@dataclass(frozen=True)
class Ordered:
    """The leading channels up to the client's widest, trained at another width for every batch."""

    widest: Architecture
    distillation: float = 0.0
    temperature: float = 1.0

    def on(self, worker: Worker, assignment: Assignment) -> Network:
        """The widest network's module; narrower networks use views of its tensors."""
        whole, draws, spent_macs = Subnet(self.widest).on(worker), self._draws(worker, assignment), [0.0]
        taught = DistilledLoss(self.distillation, self.temperature) if self.distillation else None

        def forward(x_B: Tensor) -> Tensor:
            # With distillation the passes of a batch are the widest's and a drawn width's, in turn.
            width = self.widest if taught is not None and taught.is_first else next(draws)
            spent_macs[0] += worker.spec.macs_table.cost(width) * rows_of(x_B)
            outputs: Tensor = whole.module(x_B) if width == self.widest else _narrow(worker, self.widest, width, x_B)
            if taught is not None:
                taught.passed(outputs)
            return outputs

        return DrawingNetwork(
            whole.module,
            forward,
            whole.slices,
            macs=0.0,
            subspace=architecture_id(self.widest),
            passes=1 if taught is None else taught.passes,
            loss=None if taught is None else taught.loss,
            spent_macs=spent_macs,
        )

    def account(self, worker: Worker, assignment: Assignment, batches: Sequence[int]) -> Account:
        """The cost of the widths that training draws for these batches."""
        draws, macs_of = self._draws(worker, assignment), worker.spec.macs_table.cost
        teacher = macs_of(self.widest) if self.distillation else 0.0
        macs = sum((teacher + macs_of(next(draws))) * size for size in batches)
        size_bytes, parameters = (worker.space.cost_table(m).cost(self.widest) for m in ("bytes", "parameters"))
        return Account(macs, size_bytes, int(parameters), subspace=architecture_id(self.widest))

    def held(self, space: SearchSpace) -> SliceMap:
        """The widest network's slices."""
        return space.slices(self.widest)

    def _draws(self, worker: Worker, assignment: Assignment) -> Iterator[Architecture]:
        rng = stream(worker.spec.training_seed, "widths", *places_of(assignment))
        while True:
            yield (int(rng.integers(self.widest[0] + 1)),)


def _narrow(worker: Worker, widest: Architecture, width: Architecture, x_B: Tensor) -> Tensor:
    """The logits of a narrower network on views of the widest's tensors."""
    space = worker.space
    skeleton = once(space, f"narrow {width}", lambda s: on_meta(partial(s.build_subnet, width)))
    whole = worker.subnet(widest)
    views = extract(worker.tensors_of(whole), once(space, f"slices {width}", lambda s: s.slices(width)))
    views |= worker.constants_of(whole)
    return worker.kernels.functional(skeleton.train(), worker.device)(views, worker.kernels.laid_out(x_B))


def stages(config: FjordConfig, world: World) -> list[Stage]:
    """Training, the tiers' models and their statistics, evaluation."""
    widest = largest_of_tiers(world)
    check_divergence(world.data.dataset, "method.distillation", config.distillation)
    refuse_extra_passes(rules_of(config.train, "method.train").local, "method.train")

    def network(_round: object, client_id: int) -> Ordered:
        return Ordered(widest[int(world.tier_of_client[client_id])], config.distillation, config.temperature)

    clients = config.statistics_clients
    return tier_stages(world, config.name, config.train, config.evaluation, network, statistics_clients=clients)


METHOD = Method(FjordConfig, stages, kind="tiers", lacks=("candidates",), needs=of_widths)
