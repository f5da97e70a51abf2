"""Networks of mixed operations: each layer sums the outputs of the operators of a subspace."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor

from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.clients.networks import Account, Network
from fedloom.platform.clients.worker import Worker
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.capabilities import summing_options
from fedloom.platform.spaces.slices import SliceMap, Subspace, subspace_id
from fedloom.tiers.costs import size_of


@dataclass(frozen=True)
class MixedNetwork:
    """The operators of a subspace (None: all), summed with weight 1 or with the weights that `mix` returns."""

    subspace: Subspace | None = None
    mix: Callable[[], Tensor] | None = field(default=None, compare=False)

    def on(self, worker: Worker, assignment: Assignment | None = None) -> Network:
        """The network; it does not depend on the assignment."""
        del assignment
        space, module = summing_options(worker.space, "this network"), worker.supernet
        used, mix = space.largest_subspace if self.subspace is None else self.subspace, self.mix
        return Network(
            module,
            lambda x: cast(Tensor, module(x, used, None if mix is None else mix())),
            space.subspace_slices(used),
            size_of(worker.spec.macs_table, used),
            subspace=subspace_id(used),
            kept=used,
        )

    def account(self, worker: Worker, assignment: Assignment, batches: Sequence[int]) -> Account:
        del assignment
        space = summing_options(worker.space, "this network")
        used = space.largest_subspace if self.subspace is None else self.subspace
        size, parameters = (size_of(worker.space.cost_table(m), used) for m in ("bytes", "parameters"))
        macs = size_of(worker.spec.macs_table, used) * sum(batches)
        return Account(macs, size, int(parameters), subspace=subspace_id(used))

    def held(self, space: SearchSpace) -> SliceMap:
        """The tensors of the fixed part and of the operators."""
        options = summing_options(space, "this network")
        return options.subspace_slices(options.largest_subspace if self.subspace is None else self.subspace)
