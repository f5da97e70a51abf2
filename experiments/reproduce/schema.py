"""The parts of an item: one table or figure of a paper, what is run for it, what is measured, and what is claimed."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

PAPER, SMALL = "paper", "small"
SCALES = (PAPER, SMALL)
"""What the paper ran, and what a laptop runs in less than an hour."""
HOUR_S = 3600.0
EXPERIMENT = "experiment"
"""The key of a setting that has a preset of its own."""
ONLY = ""
"""The place of a quantity that has one value per setting."""

Spot = tuple[str, str]
"""A setting and a place in it (a tier, a subnet, a model, ...): where a quantity has one value per seed."""


@dataclass(frozen=True)
class Published:
    """A published number, with its standard deviation if that was published."""

    value: float
    std: float | None = None


@dataclass(frozen=True)
class Scale:
    """What is run at a scale: an ablation whose axis `setting` has these settings, each with every seed.

    Attributes:
        settings: configuration keys with values, by the setting's name.
        overrides: of all settings, as `key=value`.
        run_by: by setting, the name of the item that runs it.
    """

    experiment: str
    settings: Mapping[str, Mapping[str, Any]]
    seeds: tuple[int, ...] = (1,)
    overrides: tuple[str, ...] = ()
    run_by: Mapping[str, str] = field(default_factory=dict)

    def only(self, settings: Collection[str]) -> "Scale":
        """The scale with these settings alone."""
        return replace(self, settings={name: keys for name, keys in self.settings.items() if name in settings})


@dataclass(frozen=True)
class Read:
    """How a quantity is read from the runs' tables.

    Attributes:
        frame: name of a frame (see `measure.FRAMES`).
        value: its column.
        where: the value, or the values, of other columns in the rows that count.
        place: the column that holds the place; empty for a quantity with one value per setting.
        reduce: how the rows of a run and place become one number (see `measure.REDUCTIONS`).
        times: a factor, such as 100 for percent.
        convert: a function of the number, before the factor (see `measure.CONVERSIONS`).
    """

    frame: str
    value: str
    where: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    place: str = ""
    reduce: str = "one"
    times: float = 1.0
    convert: str = ""


@dataclass(frozen=True)
class Counted:
    """How a quantity is counted without training, from the configuration of a setting.

    Attributes:
        facts: name of a function that counts (see `counted.FACTS`).
        value: the dotted name of one of its facts; a list has the places tier1, tier2, ..., a mapping its keys.
        times: a factor, such as 1e-6 for millions.
    """

    facts: str
    value: str
    times: float = 1.0


@dataclass(frozen=True)
class Operand:
    """A quantity in a check, at all of its spots or only in one setting or at one place."""

    quantity: str
    setting: str | None = None
    place: str | None = None


@dataclass(frozen=True)
class Combined:
    """A quantity that is the ratio, the difference or, over places, Kendall's tau of two others, seed by seed."""

    kind: str
    first: Operand
    second: Operand


Source = Read | Counted | Combined


@dataclass(frozen=True)
class Quantity:
    """Something that the paper publishes and that is measured: values per setting and place.

    Attributes:
        source: how it is measured; None for what is only published, such as a baseline that is not part of fedloom.
    """

    name: str
    unit: str
    source: Source | None
    published: Mapping[Spot, Published]


@dataclass(frozen=True)
class Check:
    """One comparison, made at every spot of its operand.

    Attributes:
        kind: one of `KINDS`.
        other: the second operand of `greater`, `less` and `close`.
        number: the margin of `greater` and `less`, the limit of `at_least` and `at_most`, the target of `band` (None:
            the published number of each spot), the greatest difference of `close`.
        tolerance: of `band`, in the quantity's unit; a share of the target if `relative`.
        order: settings or places in the order in which a `monotone` quantity changes.
        settings, places: the only ones that count, if given.
    """

    kind: str
    operand: Operand
    other: Operand | None = None
    number: float | None = 0.0
    tolerance: float = 0.0
    relative: bool = False
    along: str = "places"
    order: tuple[str, ...] = ()
    direction: str = "increasing"
    settings: tuple[str, ...] = ()
    places: tuple[str, ...] = ()


KINDS = ("greater", "less", "at_least", "at_most", "band", "close", "monotone")


@dataclass(frozen=True)
class Claim:
    """What the paper says: it holds if all of its checks do, at every spot, at these scales.

    Attributes:
        despite: why the published numbers do not show it, or do not tell; empty if they show it.
    """

    text: str
    checks: tuple[Check, ...]
    scales: tuple[str, ...]
    despite: str = ""


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper.

    Attributes:
        name: paper and item, such as fedoras/tab6.
        source: where it is published.
        runs_of: the items whose runs it reads, itself among them if it has runs of its own.
        missing: what fedloom lacks to run it, such as a data set; empty if it can be run. Such an item has published
            numbers and claims alone, and one scale, whose settings are those that were published.
        file: where it was read from.
    """

    name: str
    title: str
    source: str
    note: str
    runs_of: tuple[str, ...]
    scales: Mapping[str, Scale]
    quantities: Mapping[str, Quantity]
    claims: tuple[Claim, ...]
    missing: str = ""
    file: Path = Path()

    @property
    def needs_runs(self) -> bool:
        """Whether anything of it is read from runs; otherwise it is counted in seconds."""
        return any(isinstance(quantity.source, Read) for quantity in self.quantities.values())

    def scale_for(self, wanted: str) -> str:
        """The scale that counts for the wanted one: what needs no training is counted at the paper's scale alone."""
        return wanted if wanted in self.scales else next(iter(self.scales))
