"""Clients that train the whole elastic supernet, several subnets per batch, whose gradients are summed.

Progressive shrinking (once-for-all, Cai et al. 2020; SuperFedNAS' multi-stage baseline) draws all subnets; the sandwich
of FedSup (Kim and Yun 2022, after slimmable networks) trains the largest and the smallest in every batch, and random
ones between them, which learn from the largest's outputs (in-place distillation). Where clients receive a subnet each
(E-FedSup), see `travels=slices` and the heuristics of distribution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import Tensor

from fedloom.platform.clients.assignments import Assignment, places_of
from fedloom.platform.clients.networks import Account, DrawingNetwork, Network
from fedloom.platform.clients.objectives import DistilledLoss
from fedloom.platform.seeding import stream
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.capabilities import with_depths
from fedloom.platform.spaces.slices import Architecture, Slice, SliceMap

if TYPE_CHECKING:
    from fedloom.platform.clients.worker import Worker

FEWEST_OF_SANDWICH = 2


@dataclass(frozen=True)
class Shrinking:
    """The whole supernet, trained along random subnets; with `widest`, these have full width and random depth.

    With `sandwich` the first subnet of a batch is the largest and the last the smallest, and with `distillation` the
    others learn from the first with this weight.
    """

    subnets_per_batch: int = 4
    widest: bool = False
    sandwich: bool = False
    distillation: float = 0.0

    def on(self, worker: Worker, assignment: Assignment) -> Network:
        """The supernet module, called with another subnet in every pass."""
        module, draws, spent_macs = worker.supernet, self._draws(worker, assignment), [0.0]
        taught = DistilledLoss(self.distillation, passes=self.subnets_per_batch) if self.distillation else None

        def forward(x_B: Tensor) -> Tensor:
            architecture = next(draws)
            spent_macs[0] += worker.spec.macs_table.cost(architecture) * len(x_B)
            outputs = cast(Tensor, module(x_B, architecture))
            if taught is not None:
                taught.passed(outputs)
            return outputs

        whole = {name: Slice(name) for name in worker.tensors_of(module)}
        loss, passes = None if taught is None else taught.loss, self.subnets_per_batch
        return DrawingNetwork(module, forward, whole, 0.0, passes=passes, loss=loss, spent_macs=spent_macs)

    def account(self, worker: Worker, assignment: Assignment, batches: Sequence[int]) -> Account:
        """The cost of the subnets that training draws for these batches."""
        draws, macs_of = self._draws(worker, assignment), worker.spec.macs_table.cost
        macs = 0.0
        for size in batches:
            for _ in range(self.subnets_per_batch):
                macs += macs_of(next(draws)) * size
        tables = (worker.space.cost_table(measure) for measure in ("bytes", "parameters"))
        size_bytes, parameters = (table.cost(worker.space.largest) for table in tables)
        return Account(macs, size_bytes, int(parameters))

    def held(self, space: SearchSpace) -> SliceMap:
        """Everything."""
        return space.slices(space.largest)

    def _draws(self, worker: Worker, assignment: Assignment) -> Iterator[Architecture]:
        rng, space = stream(worker.spec.training_seed, "subnets", *places_of(assignment)), worker.space
        sample = with_depths(space, "travels=supernet").sample_depth if self.widest else space.sample
        ends = {0: space.largest, self.subnets_per_batch - 1: space.smallest} if self.sandwich else {}
        while True:
            for place in range(self.subnets_per_batch):
                yield ends[place] if place in ends else sample(rng)
