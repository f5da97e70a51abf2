"""Items: tables and figures of the papers as YAML files that state runs, quantities and claims.

The pydantic models below parse a file; `load_item` adds the runs of other items that it reads, and checks that every
name in it exists.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from fedloom.experiments.reproduce.counting import FACTS
from fedloom.experiments.reproduce.frames import CONVERSIONS, FRAMES, OF_VALIDATION, REDUCTIONS
from fedloom.experiments.runs.overrides import ENDINGS, override_text
from fedloom.experiments.runs.presets import CONF, PRESET, experiments
from fedloom.platform.plugins import nearest
from fedloom.platform.results.files import check_name
from fedloom.platform.settings import is_path
from fedloom.platform.words import shown

ITEMS = CONF / "paper"
"""One folder per paper, one file per table or figure."""
ENDING = ".yaml"

PAPER, SMALL = "paper", "small"
SCALES = (PAPER, SMALL)
"""What the paper ran, and what a laptop runs in minutes to a few hours."""
HOUR_S = 3600.0
EXPERIMENT = "experiment"
"""The key with which a setting chooses a preset of its own."""
START_FROM = "method.start_from"
RUN_OF = "run of "
"""Prefix of a setting's name in `method.start_from`: starts from that setting's run with the same seed."""
DATASET = "data.dataset="
DEFAULT_DATASET = "digits"
ONLY = ""
"""The place of a quantity that has one value per setting."""

Spot = tuple[str, str]
"""A setting and a place in it (a tier, a subnet, a model, ...): where a quantity has one value per seed."""


def read_yaml(text: str) -> Any:
    """The content of a YAML text; parsed by libyaml where it is installed, which is eight times as fast."""
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@cache
def read_counted(file: Path) -> Mapping[str, Mapping[str, Any]]:
    """The content of one of fedloom's files of counts, by item and scale; empty if there is no such file."""
    counts: Mapping[str, Mapping[str, Any]] = read_yaml(file.read_text()) if file.exists() else {}
    return counts


# -- the entries of a file ---------------------------------------------------------------------------------------------


def _one_of(words: Collection[str]) -> AfterValidator:
    def checked(word: str) -> str:
        if word not in words:
            advice = f"{nearest(word, [*words])}; there are {', '.join(words)}"
            raise PydanticCustomError("choice", "{advice}", {"advice": advice})
        return word

    return AfterValidator(checked)


def _as_number(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("needed", "a number")
    return value  # pydantic also parses strings: YAML reads 1e6 as one


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Paragraph = Annotated[Text, AfterValidator(lambda text: " ".join(text.split()))]
Number = Annotated[float, BeforeValidator(_as_number), Field(allow_inf_nan=False)]


class Entry(BaseModel):
    """A mapping in an item file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    @model_validator(mode="before")
    @classmethod
    def _has_known_keys(cls, values: Any) -> Any:
        known = [entry.alias or name for name, entry in cls.model_fields.items()]
        for key in values if isinstance(values, Mapping) else ():
            if key not in known:
                raise ValueError(f"unknown key {key!r}{nearest(str(key), known)}; there are {', '.join(known)}")
        return values


class ScaleEntry(Entry):
    """What is run at a scale, as in the file."""

    experiment: Text
    seeds: tuple[int, ...] = (1,)
    overrides: tuple[str, ...] = ()
    settings: dict[str, dict[str, Any]] = {}

    @model_validator(mode="after")
    def _can_be_run(self) -> "ScaleEntry":
        if not self.settings:
            raise ValueError("settings are missing: give at least one name with the keys that it changes")
        check_seeds(self.seeds)
        for preset in (self.experiment, *(str(s[EXPERIMENT]) for s in self.settings.values() if EXPERIMENT in s)):
            if not preset.endswith(ENDING):
                _check_known([preset], experiments(), "preset")
            elif not Path(preset).is_file():
                raise ValueError(f"experiment={shown(preset)}: there is no such file")
        return self


def check_seeds(seeds: Sequence[Any]) -> None:
    """Raises ValueError unless these are different whole numbers from 0."""
    if not seeds or any(type(seed) is not int or seed < 0 for seed in seeds) or len({*seeds}) < len(seeds):
        raise ValueError(f"seeds={[*seeds]}: give different whole numbers from 0, such as [1,2,3]")


class RunsEntry(Entry):
    """What is run, or counted, by scale."""

    paper: ScaleEntry | None = None
    small: ScaleEntry | None = None

    @model_validator(mode="after")
    def _has_a_scale(self) -> "RunsEntry":
        if self.paper is None and self.small is None:
            raise ValueError("give what to run or count: paper, small or both")
        return self


class Read(Entry):
    """How a quantity is read from the runs' tables. A record holds a hash of its `repr`.

    Attributes:
        frame: name of a frame (see `frames.FRAMES`).
        value: the column of the frame with the numbers.
        where: the rows that count, as the value, or values, that other columns must have.
        place: the column that holds the place; empty for a quantity with one value per setting.
        reduce: how the rows of a run and place become one number (see `frames.REDUCTIONS`).
        times: a factor, such as 100 for percent.
        convert: a function applied to the number before the factor (see `frames.CONVERSIONS`).
    """

    frame: Annotated[Text, _one_of(FRAMES), Field(alias="from")]
    value: Text
    where: dict[str, Annotated[tuple[Any, ...], BeforeValidator(_as_list)]] = {}
    place: str = ""
    reduce: Annotated[Text, _one_of(REDUCTIONS)] = "one"
    times: Number = 1.0
    convert: Annotated[str, _one_of(CONVERSIONS)] = ""

    @model_validator(mode="after")
    def _is_not_chosen_by_test_data(self) -> "Read":
        """Refuses to select the best of several values on test data: the choice must not depend on test data.

        The worst one, for example of all clients, is allowed: it flatters nobody.
        """
        if self.frame == "evaluations" and "split" not in self.where:
            raise ValueError("give the split in where: test or validation")
        is_tested = self.frame not in OF_VALIDATION and not any(word in self.value for word in ("validation", "search"))
        names = [self.value, TESTED.get(self.frame, {}).get(self.value, "")]
        if self.frame == "evaluations":
            is_tested = "test" in self.where["split"]
            names += map(str, self.where.get("metric", ("any metric, accuracy or loss",)))
        for name in names:
            if is_tested and any(kind in name for kind in BEST.get(self.reduce, ())):
                raise ValueError(
                    f"reduce={self.reduce} of {name} selects on test data: read the last value, or one per place"
                )
        return self


BEST = {"max": ("accuracy", "metric", "test"), "min": ("loss", "perplexity", "test_loss")}
"""Reductions that select the best of several rows, as early stopping does, if these words are in the value's name."""
TESTED: Mapping[str, Mapping[str, str]] = {
    "fairness": dict.fromkeys(("mean", "worst"), "accuracy"),
    "fairness_in_perplexity": dict.fromkeys(("mean", "worst"), "perplexity"),
    "gains": dict.fromkeys(("own", "others", "best_other", "gain"), "accuracy"),
    "tiers": {"gain": "test accuracy"},
}
"""What is measured on test data by columns whose names do not say it, by frame."""


class Counted(Entry):
    """How a quantity is counted without training, from a setting's configuration. A record holds a hash of its `repr`.

    Attributes:
        facts: name of a function that counts (see `counting.FACTS`).
        value: the dotted name of one of its facts; a list has the places tier1, tier2, ..., a mapping its keys.
        times: a factor, such as 1e-6 for millions.
    """

    facts: Annotated[Text, _one_of(FACTS), Field(alias="from")]
    value: Text
    times: Number = 1.0


class Operand(Entry):
    """A quantity in a check, at all of its spots or only at one setting or place; a file may give only its name."""

    quantity: Annotated[Text, Field(alias="of")]
    setting: Text | None = None
    place: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_named(cls, value: Any) -> Any:
        return {"of": value} if isinstance(value, str) else value


@dataclass(frozen=True)
class Combined:
    """The ratio, the difference or (over places) Kendall's tau of two other quantities, computed per seed."""

    kind: str
    first: Operand
    second: Operand


COMBINED = ("ratio", "difference", "tau")


@dataclass(frozen=True)
class Published:
    """A published number, with its standard deviation if that was published."""

    value: float
    std: float | None = None


def _published(value: Any) -> Published:
    numbers = value if isinstance(value, list) and len(value) == 2 else [value]
    try:
        return Published(*map(float, map(_as_number, numbers)))
    except (TypeError, ValueError):
        words = "a number, or [number, standard deviation]" if isinstance(value, list) else "a number"
        raise PydanticCustomError("needed", "{words}", {"words": words}) from None


def _two(value: Any) -> Any:
    if not isinstance(value, list) or len(value) != 2:
        raise PydanticCustomError("needed", "a list of two quantities")
    return value


Two = Annotated[tuple[Operand, Operand], BeforeValidator(_two)]


class Quantity(Entry):
    """A quantity that the paper publishes, that is measured, or both: values per setting and place.

    A quantity that is only published, such as a baseline that is not part of fedloom, has no source. Published settings
    may include some that are not run (another data set, for example).
    """

    unit: str = ""
    read: Read | None = None
    count: Counted | None = None
    ratio: Two | None = None
    difference: Two | None = None
    tau: Two | None = None
    by_setting: Annotated[
        dict[
            str,
            Annotated[
                dict[str, Annotated[Published, PlainValidator(_published)]],
                BeforeValidator(lambda value: value if isinstance(value, Mapping) else {ONLY: value}),
            ],
        ],
        Field(alias="published"),
    ] = {}

    @model_validator(mode="after")
    def _is_known_in_one_way(self) -> "Quantity":
        ways = [name for name in ("read", "count", *COMBINED) if getattr(self, name) is not None]
        if len(ways) > 1:
            raise ValueError(f"has {' and '.join(ways)}: give one of them")
        if not ways and not self.by_setting:
            raise ValueError("neither published nor measured: give published, read, count or ratio")
        return self

    @cached_property
    def source(self) -> Read | Counted | Combined | None:
        """How the quantity is measured; None if it is only published."""
        two = ((kind, getattr(self, kind)) for kind in COMBINED)
        return self.read or self.count or next((Combined(kind, *pair) for kind, pair in two if pair), None)

    @cached_property
    def published(self) -> dict[Spot, Published]:
        """The published numbers by spot."""
        return {(s, place): number for s, places in self.by_setting.items() for place, number in places.items()}


class Check(Entry):
    """One comparison, made at every spot of its operand, or only in these `settings` and `places` if given."""

    operand: Annotated[Operand, Field(alias="of")]
    settings: tuple[str, ...] = ()
    places: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _has_no_choice_without_effect(self) -> "Check":
        for name in ("setting", "place"):
            if getattr(self.operand, name) is not None and getattr(self, f"{name}s"):
                raise ValueError(f"{name}s have no effect, because `of` names a {name}: leave one of them out")
        return self


class Comparison(Check):
    """A check of the difference of two operands, paired by seed."""

    other: Annotated[Operand, Field(alias="than")]


class Greater(Comparison):
    """The first operand is greater by a margin."""

    by: Number = 0.0


class Less(Comparison):
    """The first operand is less by a margin."""

    by: Number = 0.0


class Close(Comparison):
    """The two operands differ by at most `within`."""

    other: Annotated[Operand, Field(alias="to")]
    within: Annotated[Number, Field(ge=0)]


class AtLeast(Check):
    """The operand is at least `value`."""

    value: Number


class AtMost(Check):
    """The operand is at most `value`."""

    value: Number


def _tolerance(value: Any) -> tuple[float, bool]:
    share = re.fullmatch(r"([0-9.]+) ?%", value) if isinstance(value, str) else None
    try:
        size = float(share[1]) / 100 if share else float(_as_number(value))
    except (TypeError, ValueError):
        size = math.nan
    if not 0 <= size < math.inf:
        raise PydanticCustomError("needed", "a number from 0, or a share such as 10 %")
    return size, share is not None


class Band(Check):
    """The operand lies within a tolerance of a target.

    Attributes:
        target: the target; None for the published number of each spot.
        tolerance: a number, and whether it is a share of the target (such as 10 %) or in the quantity's unit.
    """

    target: Annotated[Number | None, BeforeValidator(lambda value: None if value == "published" else value)]
    tolerance: Annotated[tuple[float, bool], PlainValidator(_tolerance)]


class Monotone(Check):
    """Every step from one setting or place to the next in `order` goes in the same direction."""

    along: Annotated[str, _one_of(("settings", "places"))] = "places"
    order: tuple[str, ...] = ()
    direction: Annotated[str, _one_of(("increasing", "decreasing"))] = "increasing"

    @model_validator(mode="after")
    def _has_a_step(self) -> "Monotone":
        if len(self.order) < 2:
            raise ValueError(f"order={[*self.order]}: give at least two settings or places")
        if getattr(self, self.along) or getattr(self.operand, self.along.removesuffix("s")) is not None:
            raise ValueError(f"order names the {self.along} that are compared: name none in `of` or in {self.along}")
        return self


class CheckEntry(Entry):
    """One check, given under its kind; a claim may have a list of checks instead."""

    greater: Greater | None = None
    less: Less | None = None
    at_least: AtLeast | None = None
    at_most: AtMost | None = None
    band: Band | None = None
    close: Close | None = None
    monotone: Monotone | None = None

    @cached_property
    def checks(self) -> tuple[Check, ...]:
        """The check, as a tuple; empty for a claim that has a list."""
        return tuple(check for kind in CheckEntry.model_fields if (check := getattr(self, kind)) is not None)

    @model_validator(mode="after")
    def _has_a_check(self) -> "CheckEntry":
        number = sum(getattr(self, kind) is not None for kind in CheckEntry.model_fields)
        if number + bool(getattr(self, "all", ())) != 1:
            kinds = ", ".join(CheckEntry.model_fields)
            raise ValueError(f"has {number} checks: give one of {kinds}, or a list `all`")
        return self


class Claim(CheckEntry):
    """What the paper says: it holds if all of its checks do, at every spot, at these scales.

    Attributes:
        scales: the scales at which it is made; empty for all scales of the item.
        needs: the names of the regimes that must be reached for it to be judged.
        counted_in: the item that makes the same comparison and in which it counts; empty if it counts here.
        is_check: whether it only checks the runs (that a loss falls, for example); such claims do not count.
        despite: why the published numbers do not show it or cannot decide it; empty if they show it.
    """

    text: Text
    scales: tuple[str, ...] = ()
    needs: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ()
    counted_in: str = ""
    is_check: Annotated[bool, Field(alias="check")] = False
    despite: Annotated[str, StringConstraints(strip_whitespace=True)] = ""
    all: tuple[CheckEntry, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether it counts as a claim of the paper: neither a check of the runs nor counted in another item."""
        return not self.is_check and not self.counted_in

    @cached_property
    def checks(self) -> tuple[Check, ...]:
        """The checks of its list, or its own check."""
        return tuple(check for entry in self.all for check in entry.checks) or super().checks


class ItemEntry(Entry):
    """A whole item file."""

    title: Text
    source: Text
    note: Paragraph = ""
    missing: Paragraph = ""
    runs: RunsEntry | None = None
    runs_of: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ()
    quantities: Annotated[dict[str, Quantity], Field(min_length=1)]
    regimes: dict[str, Claim] = {}
    claims: tuple[Claim, ...] = ()


def _refusal(error: ValidationError) -> str:
    """The first mistake in one line: where it is, what was given, and what is allowed."""
    first: ErrorDetails = error.errors()[0]
    kind, value, words = first["type"], first["input"], first["msg"]
    parts = [f" {part + 1}" if isinstance(part, int) else f": {part}" for part in first["loc"]]
    where = "".join(parts).removeprefix(": ")
    if kind == "missing":
        return f"{where} is missing"
    if kind == "value_error":
        return f"{where}: {first['ctx']['error']}" if where else str(first["ctx"]["error"])
    if kind == "choice":
        return f"{where}={shown(value)}{words}"
    needed = next((needed for begin, needed in NEEDED.items() if kind.startswith(begin)), words)
    return f"{where} is {shown(value)}: give {needed}"


NEEDED = {
    "string": "a text",
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "greater": "a number from 0",
    "tuple": "a list",
    "dict": "names with values",
    "model": "names with values",
    "too": "at least one",
}
"""What is allowed, by the prefix of pydantic's error type."""


# -- an item with the runs that it reads -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """What is run at a scale: an ablation whose axis `setting` has these settings, each with every seed.

    Attributes:
        settings: configuration keys with values, by the setting's name.
        overrides: overrides that all settings share, as `key=value`.
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

    def overrides_of(self, setting: str) -> list[str]:
        """The overrides of one setting, as `key=value`; a preset of its own replaces that of the scale."""
        changes = [f"{key}={override_text(value)}" for key, value in self.settings[setting].items()]
        presets = [override for override in changes if override.startswith(PRESET)]
        others = [override for override in changes if override not in presets]
        return [*(presets or [f"{PRESET}{self.experiment}"]), *self.overrides, *others]

    def dataset_of(self, setting: str) -> str:
        """The data set of a setting, without composing its configuration, which takes a tenth of a second."""
        overrides = self.overrides_of(setting)
        datasets = [override.removeprefix(DATASET) for override in overrides if override.startswith(DATASET)]
        return datasets[-1] if datasets else _dataset_in(overrides[0].removeprefix(PRESET))

    def part_of(self, setting: str) -> tuple[str, str, str]:
        """The item, the preset and the data set of a setting; settings with the same three form one ablation."""
        preset = str(self.settings[setting].get(EXPERIMENT, self.experiment))
        return self.run_by[setting], preset, self.dataset_of(setting)

    @property
    def starts(self) -> dict[str, str]:
        """The settings whose runs start from runs of another setting, each with the name of that setting."""
        values = {name: str(changes.get(START_FROM, "")) for name, changes in self.settings.items()}
        return {name: text.removeprefix(RUN_OF) for name, text in values.items() if text.startswith(RUN_OF)}


@cache
def _dataset_in(preset: str) -> str:
    """The data set that a preset chooses, itself or through the preset that it builds on."""
    file = Path(preset) if preset.endswith(ENDINGS) else CONF / "experiment" / f"{preset}.yaml"
    values = read_yaml(file.read_text())
    dataset = values.get("data", {}).get("dataset")
    if dataset is not None:
        return str(dataset)
    before = [each for each in values.get("defaults", []) if isinstance(each, str) and each != "_self_"]
    return _dataset_in(before[-1]) if before else DEFAULT_DATASET


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper.

    Attributes:
        name: paper and item, such as fedoras/tab6.
        source: where it is published.
        runs_of: the items whose runs it reads, itself among them if it has runs of its own.
        regimes: conditions, by name, that must hold for the claims that need them to be judged.
        missing: what fedloom lacks to run it, such as a data set; empty if it can be run. An item that cannot be run
            has only published numbers and claims, and one scale with the published settings.
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
    regimes: Mapping[str, Claim] = field(default_factory=dict)

    @property
    def needs_runs(self) -> bool:
        """Whether any of its quantities is read from runs; otherwise all are counted, in seconds."""
        return any(isinstance(quantity.source, Read) for quantity in self.quantities.values())


def item_names(folder: Path = ITEMS) -> list[str]:
    """The names of all items, such as fedoras/tab6, by paper and in the order of their files."""
    return sorted(f"{file.parent.name}/{file.stem}" for file in folder.glob(f"*/*{ENDING}"))


def all_items() -> list[Item]:
    """The items of all papers."""
    return [load_item(name) for name in item_names()]


def load_given(text: str) -> Item:
    """An item by its name, or a user's own item by the path of its file, whose folder is named after the paper."""
    if not text.endswith(ENDING):
        return load_item(text)
    path = Path(text)
    if not is_path(text) or not path.is_file():
        raise ValueError(f"{shown(text)}: there is no such file")
    folder = path.absolute().parent
    check_name("item", f"{folder.name}-{path.stem}")
    return load_item(f"{folder.name}/{path.stem}", folder.parent)


def load_item(name: str, folder: Path = ITEMS) -> Item:
    """Reads and checks an item; ValueError, in one line, for an unknown name and for an invalid file."""
    file = folder / f"{name}{ENDING}"
    if not file.is_file():
        known = item_names(folder)
        ends = {each.rpartition("/")[2]: each for each in known}
        close = nearest(name, known) or nearest(ends.get(name, name), known) or nearest(name, [*ends])
        raise ValueError(f"no such item: {shown(name)}{close}; fedloom reproduce --list shows all")
    entry, where = _entry(file), f"paper/{name}{ENDING}"
    if entry.missing:
        for key in ("runs", "runs_of"):
            if getattr(entry, key):
                raise ValueError(f"{where}: missing says that it cannot be run: leave out {key}")
        names: dict[str, dict[str, Any]] = {
            setting: {} for quantity in entry.quantities.values() for setting in quantity.by_setting
        }
        runs_of: tuple[str, ...] = (name,)
        scales = {PAPER: Scale(experiment="", settings=names)}
    else:
        by_item = dict(_runs(entry, name, folder, where))
        runs_of, scales = tuple(by_item), _scales(by_item, where)
        if entry.runs is not None:  # only the scales at which it adds runs; others belong to the other items
            scales = {scale: runs for scale, runs in scales.items() if getattr(entry.runs, scale) is not None}
    item = Item(
        name=name,
        title=entry.title,
        source=entry.source,
        note=entry.note,
        runs_of=runs_of,
        scales=scales,
        quantities=entry.quantities,
        claims=entry.claims,
        missing=entry.missing,
        file=file,
        regimes=entry.regimes,
    )
    _check_quantities(item, where)
    _check_claims(item, where)
    return item


def _entry(file: Path) -> ItemEntry:
    try:
        return _parsed(file.read_text(), f"paper/{file.parent.name}/{file.name}")
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise ValueError(f"{file}: cannot be read as YAML: {error.problem}{line}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{file}: cannot be read as YAML: {' '.join(str(error).split())}") from error


@lru_cache
def _parsed(text: str, where: str) -> ItemEntry:
    """The content of a file; cached, because other items may read it too."""
    try:
        return ItemEntry.model_validate(read_yaml(text))
    except ValidationError as error:
        raise ValueError(f"{where}: {_refusal(error)}") from error


def _runs(entry: ItemEntry, name: str, folder: Path, where: str) -> Iterator[tuple[str, RunsEntry]]:
    """The runs of the other items that it reads, then its own runs, each with the item's name."""
    others = [other for other in entry.runs_of if other != name]
    _check_known(others, item_names(folder), "item", f"{where}: runs_of: ")
    for other in others:
        runs = _runs_of_item(other, folder, (name,))
        if runs is None:
            raise ValueError(f"{where}: runs_of={other} has no runs of its own: name the item that has them")
        yield other, runs
    added = _runs_of_item(name, folder)
    if added is not None:
        yield name, added
    elif not others:
        raise ValueError(f"{where}: runs: give what to run or count: paper, small or both")


def _runs_of_item(name: str, folder: Path, before: tuple[str, ...] = ()) -> RunsEntry | None:
    """The item's own runs; seeds and overrides that it leaves out are those of the first item in `runs_of`."""
    if name in before:
        raise ValueError(f"paper/{name}{ENDING}: runs_of goes in a circle: {' to '.join((*before, name))}")
    entry = _entry(folder / f"{name}{ENDING}")
    first = next((other for other in entry.runs_of if other != name), None)
    shared = None if entry.runs is None or first is None else _runs_of_item(first, folder, (*before, name))
    if entry.runs is None or shared is None:
        return entry.runs
    scales: dict[str, ScaleEntry] = {}
    for scale in SCALES:
        added, others = getattr(entry.runs, scale), getattr(shared, scale)
        if added is not None and others is not None:
            left_out = {"seeds", "overrides"} - added.model_fields_set
            scales[scale] = added.model_copy(update={key: getattr(others, key) for key in left_out})
    return entry.runs.model_copy(update=scales)


def _scales(by_item: Mapping[str, RunsEntry], where: str) -> dict[str, Scale]:
    """The runs of all items, merged by scale; ValueError for a duplicate setting, and for other seeds or overrides."""
    scales: dict[str, Scale] = {}
    for scale_name in SCALES:
        at_scale = f"{where}: {scale_name}"
        for name, runs in by_item.items():
            entry: ScaleEntry | None = getattr(runs, scale_name)
            if entry is None:
                continue
            run_by = dict.fromkeys(entry.settings, name)
            scale = Scale(entry.experiment, entry.settings, entry.seeds, entry.overrides, run_by)
            before = scales.get(scale_name)
            scales[scale_name] = scale if before is None else _together(before, scale, name, at_scale)
        if scale_name in scales:
            _check_starts(scales[scale_name], at_scale)
    return scales


def _together(first: Scale, second: Scale, name: str, where: str) -> Scale:
    """The runs of the first scale together with those of the second, which the item of this name adds."""
    if twice := [setting for setting in second.settings if setting in first.settings]:
        raise ValueError(f"{where}: {first.run_by[twice[0]]} and {name} both have the setting {twice[0]!r}: rename one")
    if (second.seeds, second.overrides) != (first.seeds, first.overrides):
        names = f"{next(iter(first.run_by.values()))} and {name}"
        raise ValueError(f"{where}: {names} differ in seeds or overrides: leave them out in the latter")
    settings = {setting: {EXPERIMENT: second.experiment, **keys} for setting, keys in second.settings.items()}
    return replace(first, settings={**first.settings, **settings}, run_by={**first.run_by, **second.run_by})


def _check_starts(scale: Scale, where: str) -> None:
    """Raises ValueError for runs that start from an unknown setting, or from one that is not run before them."""
    if any(override.startswith(f"{START_FROM}={RUN_OF}") for override in scale.overrides):
        raise ValueError(f"{where}: {START_FROM}={RUN_OF}NAME stands in settings, not in overrides")
    parts = [scale.part_of(name) for name in scale.settings] if scale.starts else []
    positions = {name: parts.index(part) for name, part in zip(scale.settings, parts, strict=False)}
    for name, other in scale.starts.items():
        start = f"{where}: {name}: {START_FROM}={RUN_OF}{other}"
        if other not in positions:
            known = ", ".join(scale.settings)
            raise ValueError(f"{start}: there is no such setting; there are {known}, and those of items in runs_of")
        if positions[other] >= positions[name]:
            raise ValueError(
                f"{start}: that setting does not run first: write it above with another preset, or use one of an item "
                "in runs_of"
            )


def _check_quantities(item: Item, where: str) -> None:
    """Raises ValueError for a combination of unknown quantities or settings, and for measuring an item without runs."""
    settings = [*dict.fromkeys(setting for scale in item.scales.values() for setting in scale.settings)]
    above: list[str] = []
    for name, quantity in item.quantities.items():
        if isinstance(quantity.source, Combined):
            for operand in (quantity.source.first, quantity.source.second):
                entry = f"{where}: quantities: {name}: "
                _check_known([operand.quantity], above, "quantity above it", entry)
                _check_known(filter(None, [operand.setting]), settings, "setting", entry)
            _check_sides(item, quantity.source.first, quantity.source.second, entry)
        elif quantity.source is not None and item.missing:
            raise ValueError(f"{item.name}: {name} is measured, but missing says that it cannot be run")
        above.append(name)


def _check_claims(item: Item, where: str) -> None:
    """Raises ValueError for claims with unknown scales, regimes, quantities or settings, or unmeasured quantities."""
    regimes = {f"{where}: regimes: {name}": regime for name, regime in item.regimes.items()}
    claims = {f"{where}: claims {number}": claim for number, claim in enumerate(item.claims, 1)}
    for entry, claim in {**regimes, **claims}.items():
        _check_known(claim.scales, [*item.scales], "scale", f"{entry}: ")
        _check_known(claim.needs, [*item.regimes] if entry in claims else [], "regime", f"{entry}: needs: ")
        for check in claim.checks:
            operands = [check.operand, *([check.other] if isinstance(check, Comparison) else [])]
            _check_known([operand.quantity for operand in operands], [*item.quantities], "quantity", f"{entry}: ")
            settings = [*filter(None, (operand.setting for operand in operands)), *check.settings]
            if isinstance(check, Monotone) and check.along == "settings":
                settings += check.order
            for scale in claim.scales or item.scales:
                _check_known(settings, [*item.scales[scale].settings], "setting", f"{entry}, at scale {scale}: ")
            for operand in operands:
                if item.quantities[operand.quantity].source is None and not item.missing:
                    raise ValueError(
                        f"{entry}: {operand.quantity} is only published: a claim compares what is measured"
                    )
            if isinstance(check, Comparison):
                _check_sides(item, check.operand, check.other, f"{entry}: ")


def _check_sides(item: Item, first: Operand, second: Operand, where: str) -> None:
    """Raises ValueError if only the second operand has a value per setting, or place: it is read where the first is."""
    for what in ("setting", "place"):
        if _is_by(what, first, item) is False and _is_by(what, second, item):
            raise ValueError(
                f"{where}{first.quantity} in one {what} is compared with {second.quantity} in every one: turn them "
                f"round, or name the {what} of {second.quantity}"
            )


def _is_by(what: str, operand: Operand, item: Item) -> bool | None:
    """Whether an operand has a value per setting, or per place; None for places of what is yet to be counted."""
    quantity = item.quantities[operand.quantity]
    if getattr(operand, what) is not None:
        return False
    match quantity.source:
        case Combined(kind="tau") if what == "place":
            return False
        case Combined(first=first):
            return _is_by(what, first, item)
        case Read(place=place):
            return what == "setting" or place != ""
        case Counted():
            return True if what == "setting" else None
    return any(setting if what == "setting" else place for setting, place in quantity.published)


def _check_known(names: Iterable[str], known: Sequence[str], what: str, where: str = "") -> None:
    """Raises ValueError for a name that is not known."""
    for name in names:
        if name not in known:
            raise ValueError(
                f"{where}there is no {what} {name!r}{nearest(name, [*known])}; there are {', '.join(known)}"
            )
