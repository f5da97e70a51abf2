"""A network of mixed operations: the options that a search keeps of a supernet, added up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor

from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.clients.networks import Account, Network
from fedloom.platform.clients.worker import Worker
from fedloom.platform.spaces.offers import summing_options
from fedloom.platform.spaces.slices import Subspace, subspace_id
from fedloom.tiers.costs import size_of


@dataclass(frozen=True)
class Kept:
    """The supernet's kept options (all if none are given), added up with weight 1, or with those of `mix`."""

    kept: Subspace | None = None
    mix: Callable[[], Tensor] | None = field(default=None, compare=False)

    def on(self, worker: Worker, assignment: Assignment | None = None) -> Network:
        """See `Described.on`; the same for every assignment."""
        del assignment
        space, module = summing_options(worker.space, "this network"), worker.supernet
        used, mix = space.largest_subspace if self.kept is None else self.kept, self.mix
        return Network(
            module,
            lambda x: cast(Tensor, module(x, used, None if mix is None else mix())),
            space.subspace_slices(used),
            size_of(worker.spec.macs_table, used),
            subspace=subspace_id(used),
            kept=used,
        )

    def account(self, worker: Worker, assignment: Assignment, batches: Sequence[int]) -> Account:
        """See `Countable.account`."""
        del assignment
        used = summing_options(worker.space, "this network").largest_subspace if self.kept is None else self.kept
        size, parameters = (size_of(worker.space.cost_table(m), used) for m in ("bytes", "parameters"))
        macs = size_of(worker.spec.macs_table, used) * sum(batches)
        return Account(macs, size, int(parameters), subspace=subspace_id(used))
