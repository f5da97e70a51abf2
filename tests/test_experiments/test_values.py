"""Nonsense as a value: of every key, either its declared range allows it, or one line that names the key refuses it."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import make_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedloom.experiments.catalogue import REGISTRIES
from fedloom.experiments.cli import main
from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.methods.registry import METHODS
from fedloom.platform.settings import (
    Setting,
    check_settings,
    component_specs,
    options_of,
    settings_of,
    validated,
)

NAN, INFINITY, WORD = math.nan, math.inf, 2**63
NUMBERS = (NAN, INFINITY, -INFINITY, -1, -1.5, 0, 1, 0.5, 4097, WORD, -WORD - 1, 10**400, 1e30, -1e30)
BOUNDS: dict[str, Callable[[float, float], bool]] = {
    r"(?:at least|between) ([^\s,]+)": lambda value, bound: value >= bound,
    r"([^\s,]+) or more": lambda value, bound: value >= bound,
    r"(?:above|greater than) ([^\s,]+)": lambda value, bound: value > bound,
    r"(?:at most|between \S+ and) ([^\s,]+)": lambda value, bound: value <= bound,
    r"below ([^\s,]+)": lambda value, bound: value < bound,
}
"""What a range says to whoever reads it."""


def every_setting() -> Iterator[Setting]:
    """Every key of a run and of every method, and every option of all code that can be chosen by name."""
    yield from settings_of(RunConfig())
    for name, method in METHODS.items():
        yield from settings_of(method.config(), f"method({name}).")
    for registry in REGISTRIES:
        for name in registry.known:
            yield from options_of(registry, name, f"{registry.kind}({name})")


SETTINGS = {setting.key: setting for setting in every_setting()}


def is_number(setting: Setting) -> bool:
    return re.search(r"\b(int|float)\b", setting.kind) is not None


@cache
def bounds_in(allowed: str) -> list[tuple[Callable[[float, float], bool], str]]:
    """The bounds that a range shows."""
    return [(holds, bound) for text, holds in BOUNDS.items() for bound in re.findall(text, allowed)]


def inside(setting: Setting, value: float) -> bool:
    """Whether a number is inside the range that the setting shows."""
    if value != value or (isinstance(value, float) and math.isinf(value) and "infinity" not in setting.allowed):
        return False
    if re.search(r"\bint\b", setting.kind) and value != int(value):
        return False
    shown = bounds_in(setting.allowed)
    assert shown, f"{setting.key}: {setting.allowed}"
    largest = WORD if re.search(r"\bint\b", setting.kind) else 3e38
    return all(holds(value, float(bound)) for holds, bound in shown) and (abs(value) < largest or value == INFINITY)


@cache
def section_of(key: str) -> type:
    """A configuration that has this setting alone."""
    return make_dataclass("Section", [(key.rpartition(".")[2], SETTINGS[key].type)])


def refusal(setting: Setting, value: Any) -> str:
    """How a value is refused; empty if it is accepted."""
    name = setting.key.rpartition(".")[2]
    try:
        validated(section_of(setting.key), {name: value}, setting.key.removesuffix(name))
    except ValueError as error:
        return str(error)
    return ""


def test_every_number_has_a_range_and_every_text_says_what_it_may_be() -> None:
    numbers = [s for s in SETTINGS.values() if is_number(s)]
    assert len(numbers) > 200
    assert [s.key for s in numbers if not s.allowed] == []
    texts = [s for s in SETTINGS.values() if re.search(r"\btext\b", s.kind) and not s.kind.startswith("dict")]
    assert [s.key for s in texts if not s.allowed and not s.key.endswith(".name")] == []


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: f"{value}"[:12])
def test_a_number_is_accepted_if_and_only_if_the_shown_range_allows_it(value: float) -> None:
    for setting in filter(is_number, SETTINGS.values()):
        kind = setting.kind
        given = [value] if kind.startswith("list") else {"a": value} if kind.startswith("dict") else value
        line = refusal(setting, given)
        assert (not line) == inside(setting, value), f"{setting.key}={given}: {line}"
        assert not line or (line.startswith(setting.key) and "must be" in line and len(line) < 300), line


@pytest.mark.parametrize("value", ["", "  ", "a\0b", "x" * 256, "x/" * 2000])
def test_a_text_is_accepted_if_and_only_if_it_can_be_one(value: str) -> None:
    for setting in SETTINGS.values():
        if setting.component is not None or not (setting.choices or setting.kind.startswith("text")):
            continue
        line = refusal(setting, value)
        is_path, is_word = setting.allowed.startswith("a path"), bool(setting.choices) or "auto" in setting.allowed
        expected = (bool(value.strip()) or not setting.allowed) and not is_word and not is_path
        assert (not line) == expected, f"{setting.key}: {line}"
        assert not line or (line.startswith(f"{setting.key}=") and len(line) < 400), line


def test_all_settings_are_checked_wherever_they_stand() -> None:
    """A value that nothing allows, in every place of every configuration."""
    for name, method in METHODS.items():
        keys = [s for s in settings_of(RunConfig(method=method.config())) if is_number(s) and "list" not in s.kind]
        assert len(keys) > 50, name
        for setting in keys:
            config = RunConfig(method=method.config())
            *sections, last = setting.key.split(".")
            section: Any = config
            for part in sections:
                section = getattr(section, part)
            nothing_allows = {"a": NAN} if setting.kind.startswith("dict") else NAN
            setattr(section, last, nothing_allows)
            with pytest.raises(ValueError, match=rf"^{re.escape(setting.key)}(\.a|\[\d\])*=nan: must be "):
                check_settings(config)


@pytest.mark.parametrize("value", [NAN, INFINITY, -WORD, 10**400, [NAN], {"a": 1}, "text"], ids=str)
def test_an_option_of_what_is_chosen_is_checked_alike(value: Any) -> None:
    refused = 0
    for registry in REGISTRIES:
        for name in registry.known:
            options = options_of(registry, name, "x")
            needed = {s.key.removeprefix("x."): "x" for s in options if s.default == "?"}
            for setting in filter(is_number, options):
                given = {**needed, setting.key.removeprefix("x."): value}
                with pytest.raises(ValueError, match=rf"^{re.escape(setting.key)}(\[0\])?=.*: must be ") as caught:
                    component_specs([(registry, name)], given, "x")
                assert len(str(caught.value)) < 300
                refused += 1
    assert refused > 15


# -- as it is typed ----------------------------------------------------------------------------------------------------

TYPED = {
    "method.train.final_lr_share=nan": "must be between 0 and 1",
    "method.train.final_lr_share=-1": "must be between 0 and 1",
    "method.search.parents=nan": "must be above 0 and at most 1",
    "method.search.parents=-1": "must be above 0 and at most 1",
    "method.evaluation.clients_per_tier=-1": "must be 0 or more, or null",
    "method.train.evaluate_paths=-1": "must be between 0 and 1000000",
    "method.train.lr=inf": "must be greater than 0 and finite and at most",
    "method.train.lr=-inf": "must be greater than 0 and finite",
    "tags=abc": r"tags=abc: must be a list\[text\]",
    f"name={'x' * 300}": "name 'xxx[x.]*' cannot be a file name here: use 1 to 100",
    "no.such.key=3": "unknown configuration key 'no.such.key'; fedloom keys lists all$",
    "data.cache=/proc/x": "the cache of prepared data cannot be written ./proc/x: .*by data.cache",
    "method.train.lr=1e300": "must be greater than 0 and finite and at most 3e.38$",
    "method.train.momentum=2": "must be 0 or more and below 1",
    "method.train.weight_decay=inf": "must be 0 or more",
    "devices.availability=0": "must be above 0 and at most 1",
    "devices.availability_share=1": "must be above 0 and below 1",
    "devices.availability_period_s=0": "must be greater than 0, or null",
    "devices.jitter=-0.1": "must be between 0 and 2",
    "devices.server_bytes_per_s=0": "must be greater than 0, or null",
    "devices.deadline_s=nan": "must be greater than 0, or null",
    "executor.threads=1000000000": "must be between 1 and 4096",
    f"executor.threads={WORD}": "must be between 1 and 4096",
    f"method.train.rounds={WORD}": "must be 0 or more and a whole number of at most 64 bits",
    f"seeds.training={10**300}": "seeds.training=a number of 997 bits: must be 0 or more and a whole number",
    f"seeds.training={10**400}": "seeds.training=1000.*: a number of too many digits",
    "executor.actors=0": "must be between 1 and 65536, or null",
    "seed=-1": "must be 0 or more",
    "seeds.partition=-1": "must be 0 or more, or null",
    "tiers.upper_bounds=[1e6,nan]": "upper_bounds.1.=nan: must be greater than 0",
    "tiers.budget.states=[[idle,1.0,nan]]": "tiers.budget.states=nan: must be",
    "tiers.budget.kind=trace tiers.budget.states=[3]": "tiers.budget: state 3 must have three values",
    "tiers.cost_weights.macs=-1": "must be 0 or more",
    "method.train.options.mu=nan": "method.train.options.mu",
    f"data.alpha={10**390}": "data.alpha=a number of 1296 bits: must be a float$",
    "executor.threads=two": "executor.threads=two: must be an int$",
    "executor.threads=": "executor.threads=: must be an int$",
    "results=": "must be a path of at most 3000 bytes",
    f"results={'x' * 300}": "each name in it of at most 255",
    f"data.cache={'x/' * 3000}": "must be a path of at most 3000 bytes",
    f"tiers.device_table={'x' * 300}.csv": "each name in it of at most 255",
    f"experiment=./{'x' * 300}.yaml": "each name in it of at most 255",
    "method.name=abc": "a method is chosen by method=NAME",
    "method.name=fedavg": "a method is chosen by method=NAME",
    "space.stage_strides=${seed}": "space.stage_strides=1: must be a list",
    "tiers.num_cpus=${seed}": "tiers.num_cpus=1: must be a list",
    "experiment=[1]": "no such preset; there are ",
    f"experiment={'x' * 300}:y": "no such preset; there are ",
    "method=null": "no such method; there are ",
    "experiment=null": "no such preset; there are ",
    "~space": "is not of the form key=value",
    "=1": "is not of the form key=value",
    "hydra.run.dir=x": "unknown configuration key .hydra.run.dir",
    "space=cnn_digit": "space is a group of keys; give space.name=NAME",
    "space=cnn_digits": "space is a group of keys; give space.name=NAME",
    "objective=top": "give objective.name=NAME",
    "executor=rai": "give executor.kind=NAME",
    "executor=null": "give executor.kind=NAME",
    "tiers=3": "tiers is a group of keys; give one of them, such as tiers.count",
    "method.train=fast": "method.train is a group of keys; give one of them, such as method.train.rounds",
    "method.train.communication.value=nan": "must be greater than 0",
    f"tiers.paths={'[' * 3000}1{']' * 3000}": "too large or nested too deeply|cannot be read",
}


@pytest.mark.parametrize("given", TYPED, ids=lambda given: given[:40])
def test_nonsense_is_refused_before_anything_is_written(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    preset = [] if given.startswith("experiment=") else ["experiment=fedoras_digits"]
    small = [*preset, "executor.kind=serial", "tiers.paths=100", "space.stem_channels=4"]
    taken = [o for o in small if o.partition("=")[0] != given.partition("=")[0]]
    with pytest.raises(SystemExit) as ending:
        main(("run", *taken, "dry_run=true", *given.split(" ")))
    out, err = capfd.readouterr()
    assert (ending.value.code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("fedloom: ")
    assert len(err) < 600
    key = given.partition("=")[0]
    assert re.search(TYPED[given], err), err
    assert key in err or "tiers.budget" in err, err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["spider", "fednas", "fedpnas", "global_nas", "fedmn", "fedoras"])
def test_a_space_that_the_method_cannot_use_is_refused_before_data_is_prepared(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SystemExit) as ending:
        main(("run", f"method={method}", "data.dataset=digits", "space.name=resnet_elastic", "executor.kind=serial"))
    assert ending.value.code == 2
    assert f"{method} cannot use space resnet_elastic" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_a_range_allows_is_accepted() -> None:
    config = compose_config(["executor.threads=4096", f"seed={WORD - 1}", "executor.client_timeout_s=inf"])
    assert (config.executor.threads, config.seed, config.executor.client_timeout_s) == (4096, WORD - 1, INFINITY)
