"""The items that there are, and the reading of their files."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from yaml import MarkedYAMLError, YAMLError

from fedloom.experiments.reproduce.checks import read_checks
from fedloom.experiments.reproduce.fields import Fields, as_number, check_known, read_yaml
from fedloom.experiments.reproduce.quantities import COMBINED, read_source
from fedloom.experiments.reproduce.schema import (
    EXPERIMENT,
    ONLY,
    PAPER,
    SCALES,
    Check,
    Claim,
    Counted,
    Item,
    Published,
    Quantity,
    Read,
    Scale,
    Spot,
)
from fedloom.experiments.reproduce.starts import check_starts
from fedloom.experiments.runs.presets import CONF, experiments
from fedloom.platform.plugins import nearest
from fedloom.platform.results.files import check_name
from fedloom.platform.settings import is_path
from fedloom.platform.words import shown

ITEMS = CONF / "paper"
"""One folder per paper, one file per table or figure."""
ENDING = ".yaml"


def item_names(folder: Path = ITEMS) -> list[str]:
    """The names of all items, such as fedoras/tab6, by paper and in the order of their files."""
    return sorted(f"{file.parent.name}/{file.stem}" for file in folder.glob(f"*/*{ENDING}"))


def load_given(given: str) -> Item:
    """An item by its name, or one of the user's own by the path of its file, which lies in the folder of its paper."""
    if not given.endswith(ENDING):
        return load_item(given)
    path = Path(given)
    if not is_path(given) or not path.is_file():
        raise ValueError(f"{shown(given)}: there is no such file")
    folder = path.absolute().parent
    check_name("item", f"{folder.name}-{path.stem}")
    return load_item(f"{folder.name}/{path.stem}", folder.parent)


def load_item(name: str, folder: Path = ITEMS) -> Item:
    """Reads and checks an item; ValueError in one line for an unknown one, and for a file that is not one."""
    if not (folder / f"{name}{ENDING}").is_file():
        known = item_names(folder)
        ends = {each.rpartition("/")[2]: each for each in known}
        close = nearest(name, known) or nearest(ends.get(name, name), known) or nearest(name, [*ends])
        raise ValueError(f"no such item: {shown(name)}{close}; fedloom reproduce --list shows all")
    fields = _fields(name, folder)
    fields.only("title", "source", "note", "missing", "runs", "runs_of", "quantities", "claims")
    missing = " ".join(fields.text("missing", "").split())
    by_item = {} if missing else {other: _scales(runs) for other, runs in _runs_of(fields, name, folder)}
    scales = _published_scale(fields) if missing else _together(by_item, fields.where)
    quantities = _quantities(fields, _settings(scales))
    item = Item(
        name=name,
        title=fields.text("title"),
        source=fields.text("source"),
        note=" ".join(fields.text("note", "").split()),
        runs_of=tuple(by_item) or (name,),
        scales=scales,
        quantities=quantities,
        claims=tuple(_claims(fields, scales, quantities)),
        missing=missing,
        file=folder / f"{name}{ENDING}",
    )
    _check_runs(item)
    return item


def _check_runs(item: Item) -> None:
    """Raises ValueError if the item reads or counts what it does not run."""
    if item.missing:
        for quantity in item.quantities.values():
            if isinstance(quantity.source, Read | Counted):
                raise ValueError(f"{item.name}: {quantity.name} is measured, but missing says that it cannot be run")
    elif item.needs_runs and set(item.scales) != set(SCALES):
        raise ValueError(f"{item.name}: it reads results of runs: say in runs what is run at {' and '.join(SCALES)}")


def _fields(name: str, folder: Path) -> Fields:
    path = folder / f"{name}{ENDING}"
    try:
        return Fields(read_yaml(path), f"paper/{name}{ENDING}")
    except MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise ValueError(f"{path}: cannot be read as YAML: {error.problem}{line}") from error
    except (OSError, ValueError, YAMLError) as error:
        raise ValueError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from error


# -- what is run ------------------------------------------------------------------------------------------------------


def _runs_of(fields: Fields, name: str, folder: Path) -> Iterator[tuple[str, Fields]]:
    """The parts `runs` of the other items whose runs it reads, then its own, with the items' names."""
    others = [other for other in fields.one_or_more("runs_of") if other != name]
    check_known(others, item_names(folder), "item", f"{fields.where}: runs_of")
    for other in others:
        found = _fields(other, folder)
        if not found.has("runs"):
            raise ValueError(f"{fields.where}: runs_of={other} has no runs of its own: name the item that has them")
        yield other, found.inner("runs")
    if fields.has("runs") or not others:
        yield name, fields.inner("runs")


def _published_scale(fields: Fields) -> dict[str, Scale]:
    """The scale of an item that cannot be run: the settings that were published."""
    for name in ("runs", "runs_of"):
        if fields.has(name):
            raise ValueError(f"{fields.where}: missing says that it cannot be run: leave out {name}")
    quantities = fields.inner("quantities")
    names = [name for quantity in quantities.names for name in quantities.inner(quantity).inner("published").names]
    return {PAPER: Scale(experiment="", settings={name: {} for name in names})}


def _scales(runs: Fields) -> dict[str, Scale]:
    runs.only(*SCALES)
    if not runs.names:
        raise ValueError(f"{runs.where}: say what is run, or counted, at paper or small")
    return {name: _scale(runs.inner(name)) for name in runs.names}


def _together(by_item: Mapping[str, Mapping[str, Scale]], where: str) -> dict[str, Scale]:
    """The runs of all items as one scale each; ValueError if they have a setting twice, or other seeds or overrides."""
    names = dict.fromkeys(name for scales in by_item.values() for name in scales)
    return {
        name: _one_scale({i: s[name] for i, s in by_item.items() if name in s}, f"{where}: {name}") for name in names
    }


def _one_scale(by_item: Mapping[str, Scale], where: str) -> Scale:
    (first_name, first), *others = by_item.items()
    settings, run_by = dict(first.settings), dict.fromkeys(first.settings, first_name)
    for name, scale in others:
        if twice := [setting for setting in scale.settings if setting in settings]:
            raise ValueError(f"{where}: {run_by[twice[0]]} and {name} both have the setting {twice[0]!r}: rename one")
        if (scale.seeds, scale.overrides) != (first.seeds, first.overrides):
            raise ValueError(f"{where}: {first_name} and {name} differ in seeds or overrides: give both the same")
        settings |= {setting: {EXPERIMENT: scale.experiment, **keys} for setting, keys in scale.settings.items()}
        run_by |= dict.fromkeys(scale.settings, name)
    found = replace(first, settings=settings, run_by=run_by)
    check_starts(found, where)
    return found


def _scale(fields: Fields) -> Scale:
    fields.only("experiment", "seeds", "overrides", "settings")
    settings = fields.inner("settings")
    if not settings.names:
        raise ValueError(f"{fields.where}: settings are missing: give at least one name with the keys that it changes")
    seeds = tuple(fields.list("seeds")) or (1,)
    if any(type(seed) is not int or seed < 0 for seed in seeds) or len({*seeds}) < len(seeds):
        raise ValueError(f"{fields.where}: seeds={list(seeds)}: give different whole numbers from 0")
    experiment = fields.text("experiment")
    changes = {name: _changes(settings, name) for name in settings.names}
    for preset in (experiment, *(str(own[EXPERIMENT]) for own in changes.values() if EXPERIMENT in own)):
        if not preset.endswith(ENDING):
            check_known([preset], experiments(), "preset", fields.where)
        elif not Path(preset).is_file():
            raise ValueError(f"{fields.where}: experiment={shown(preset)}: there is no such file")
    return Scale(
        experiment=experiment,
        settings=changes,
        seeds=seeds,
        overrides=fields.texts("overrides"),
    )


def _changes(settings: Fields, name: str) -> dict[str, Any]:
    changes = settings.inner(name)
    return {key: changes.value(key) for key in changes.names}


def _settings(scales: Mapping[str, Scale]) -> list[str]:
    return list(dict.fromkeys(name for scale in scales.values() for name in scale.settings))


# -- what is measured -------------------------------------------------------------------------------------------------


def _quantities(fields: Fields, settings: list[str]) -> dict[str, Quantity]:
    found = fields.inner("quantities")
    if not found.names:
        raise ValueError(f"{fields.where}: quantities are missing: name what is published or measured")
    quantities: dict[str, Quantity] = {}
    for name in found.names:
        own = found.inner(name)
        own.only("unit", "read", "count", *COMBINED, "published")
        published = dict(_published(own.inner("published")))
        source = read_source(own, [*quantities], settings)
        if source is None and not published:
            raise ValueError(f"{own.where}: neither published nor measured: give published, read, count or ratio")
        quantities[name] = Quantity(name, own.text("unit", ""), source, published)
    return quantities


def _published(fields: Fields) -> Iterator[tuple[Spot, Published]]:
    """The published numbers: per setting one number, or one per place; [number, standard deviation] is a number, too.

    Settings that are not run (another data set, say) may be among them.
    """
    for setting in fields.names:
        given = fields.value(setting)
        if not isinstance(given, Mapping):
            yield (setting, ONLY), _number(given, f"{fields.where}: {setting}")
            continue
        for place, number in given.items():
            yield (setting, str(place)), _number(number, f"{fields.where}: {setting}: {place}")


def _number(given: Any, where: str) -> Published:
    if isinstance(given, list):
        if len(given) != 2:
            raise ValueError(f"{where} is {shown(given)}: give a number, or [number, standard deviation]")
        return Published(as_number(given[0], where), as_number(given[1], where))
    return Published(as_number(given, where))


# -- what is claimed --------------------------------------------------------------------------------------------------


def _claims(fields: Fields, scales: Mapping[str, Scale], quantities: Mapping[str, Quantity]) -> Iterator[Claim]:
    for number, given in enumerate(fields.list("claims"), 1):
        own = Fields(given, f"{fields.where}: claim {number}")
        at = own.texts("scales") or tuple(scales)
        check_known(at, [*scales], "scale", own.where)
        claim = Claim(own.text("text"), read_checks(own), at, own.text("despite", ""))
        for check in claim.checks:
            for scale in at:
                _check_names(check, scales[scale], quantities, f"{own.where}, at scale {scale}")
                if not fields.has("missing"):
                    _check_measured(check, quantities, own.where)
        yield claim


def _check_names(check: Check, scale: Scale, quantities: Mapping[str, Quantity], where: str) -> None:
    """Raises ValueError for quantities and settings that are not there."""
    for operand in (check.operand, check.other):
        if operand is not None:
            check_known([operand.quantity], [*quantities], "quantity", where)
            check_known([operand.setting] if operand.setting else [], [*scale.settings], "setting", where)
    check_known(check.settings, [*scale.settings], "setting", where)
    if check.along == "settings":
        check_known(check.order, [*scale.settings], "setting", where)


def _check_measured(check: Check, quantities: Mapping[str, Quantity], where: str) -> None:
    for operand in (check.operand, check.other):
        if operand is not None and quantities[operand.quantity].source is None:
            raise ValueError(f"{where}: {operand.quantity} is only published: a claim compares what is measured")
