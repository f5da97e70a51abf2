"""Spaces in which any subset of a decision's operators can be kept, including none.

The outputs of a decision's kept operators are summed. Supernet, subspace and stand-alone subnet share a module class.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from fedloom.platform.spaces.initialisation import on_meta
from fedloom.platform.spaces.measuring import Measure, cost_of
from fedloom.platform.spaces.named_operators import NamedOperatorSpace
from fedloom.tiers.costs import CostTable, size_of
from fedloom.tiers.measure import MEASURES


@dataclass(frozen=True)
class Part:
    """A module of an operator, and its input shape for one sample.

    Parts with the same `kind` and shape have the same cost and are measured once.
    """

    kind: tuple[object, ...]
    input_shape: tuple[int, ...]
    build: Callable[[], nn.Module] = field(compare=False)


class KeptSpace(NamedOperatorSpace):
    """A space whose networks are called as `forward(x, kept=None, mix=None)`.

    `kept` is a subspace or an architecture, by default all operators of the network; `mix` (decisions, options) are
    weights of the operators, by default 1. Subclasses define the modules of each operator.
    """

    sums_options = True
    channels_last = True

    @abstractmethod
    def _parts(self, decision: int, option: int) -> Sequence[Part]:
        """The modules of an operator anywhere in the network."""

    def figures(self) -> Mapping[str, Any]:
        """The figures of named operators, and the cost of the whole supernet with all options."""
        tables = (self.cost_table(measure) for measure in ("macs", "bytes"))
        macs, state_bytes = (int(size_of(table, self.largest_subspace)) for table in tables)
        return {**super().figures(), "macs": {"supernet": macs}, "state_bytes": state_bytes}

    def _check_row(self, decision: int, row: tuple[int, ...]) -> None:
        if not isinstance(row, tuple):
            where = f"{self.decision_name(decision)} of {self.name}"
            raise ValueError(f"{where} keeps a tuple of operators, given {row!r}")
        super()._check_row(decision, row)

    def _table_of(self, measure: str, of: Measure, device: str) -> CostTable:
        join = sum if MEASURES.get(measure, "sum") == "sum" else max
        cost = PartCosts(of, device)
        rows = tuple(
            tuple(float(join(map(cost, self._parts(decision, option)))) for option in range(n))
            for decision, n in enumerate(self.options)
        )
        fixed = cost_of(partial(self._network, ((),) * len(self.options)), (1, *self.input_shape), of, device)
        return CostTable(measure, fixed, rows, MEASURES.get(measure, "sum"))


class PartCosts:
    """The cost of parts by one measure; equal parts are measured once."""

    def __init__(self, of: Measure, device: str) -> None:
        self.of, self.device = of, device
        self._known: dict[Part, float] = {}

    def __call__(self, part: Part) -> float:
        if part not in self._known:
            # An identity costs nothing, because its input is already in memory.
            idle = isinstance(on_meta(part.build), nn.Identity)
            self._known[part] = 0.0 if idle else cost_of(part.build, part.input_shape, self.of, self.device)
        return self._known[part]
