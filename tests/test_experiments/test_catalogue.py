"""`fedloom keys` and `fedloom plugins`: everything that a configuration may say, in one place."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from fedloom.experiments.catalogue import REGISTRIES, known_code, known_keys
from fedloom.experiments.cli import main
from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.methods.registry import METHODS
from fedloom.platform.settings import settings_of


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ending:
        main([*arguments])
    captured = capsys.readouterr()
    return int(str(ending.value.code)), captured.out, captured.err


def test_all_keys_of_a_configuration_are_listed_with_its_values() -> None:
    config = compose_config(["experiment=spider_digits", "data.alpha=7"])
    listed = known_keys(["experiment=spider_digits", "data.alpha=7"])
    of_attack = {"attack.options.scale"}  # an option of what is chosen, see below
    assert [s.key for s in listed if s.key not in of_attack] == [s.key for s in settings_of(config)]
    assert next(s.default for s in listed if s.key == "data.alpha") == 7.0


def test_a_prefix_is_a_key_or_a_whole_part_of_one() -> None:
    keys = [s.key for s in known_keys(["data", "method.train.lr"])]
    assert keys[-1] == "method.train.lr"
    assert all(key.startswith("data.") for key in keys[:-1])
    assert [s.key for s in known_keys(["executor.failures."])] == [s.key for s in known_keys(["executor.failures"])]
    with pytest.raises(ValueError, match=r"^ablation\.\* are keys of an ablation, not of a run"):
        known_keys(["ablation.seeds"])
    with pytest.raises(ValueError, match=r"no configuration key begins with .method.tran.*; did you mean"):
        known_keys(["method.tran"])


def test_options_of_what_is_chosen_are_keys_too() -> None:
    given = ["method=fedavg", "method.train.server=fedadam", "method.train.local_rule=fedprox"]
    options = {s.key.rpartition(".")[2]: s for s in known_keys(["method.train.options", *given])}
    assert set(options) == {"options", "server_lr", "beta_1", "beta_2", "tau", "mu"}
    assert options["mu"].help.startswith("local rule fedprox: strength of the pull")
    changed = compose_config([*given, *(f"{o.key}={o.default}" for n, o in options.items() if n != "options")])
    assert changed.method.train.options["tau"] == 0.001
    needed = known_keys(["data.options", "data.dataset=folder", "data.options.path=x"])
    assert [s.default for s in needed if s.key == "data.options.path"] == ["?"]


def test_every_place_where_code_is_chosen_by_name_is_listed() -> None:
    def brought() -> Iterator[Any]:
        yield from settings_of(RunConfig())
        for method in METHODS.values():
            yield from settings_of(method.config(), "method.")

    kinds = {s.component: s.key for s in brought() if s.component is not None}
    assert set(kinds) == {slot.kind for slot in REGISTRIES}
    places = {place.kind: place for place in known_code([])}
    assert set(places) == {"method", *kinds}
    for kind, key in kinds.items():
        assert key in places[kind].keys
    for place in places.values():
        for code in place.built_in:
            assert 8 < len(code.text) < 140, f"{place.kind} {code.name}: {code.text!r}"


def test_a_word_finds_a_place_by_its_kind_its_key_and_what_is_in_it() -> None:
    assert [p.kind for p in known_code(["server"])] == ["server rule"]
    assert [p.kind for p in known_code(["local_rule"])] == ["local rule"]
    assert [p.kind for p in known_code(["fedprox"])] == ["local rule"]
    assert {p.kind for p in known_code(["data"])} >= {"data set", "augmentation"}
    with pytest.raises(ValueError, match=r"no kind, key or name contains 'serverr'.*the kinds are method, data set"):
        known_code(["serverr"])


def test_both_print_text_or_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "keys", "data.alpha")
    assert (code, out.splitlines()[0]) == (0, "data.alpha=1  (float; greater than 0)")
    code, out, _ = run(capsys, "keys", "data.alpha", "--json")
    (found,) = json.loads(out)["keys"]
    assert (found["key"], found["type"], found["default"]) == ("data.alpha", "float", 1.0)
    code, out, _ = run(capsys, "keys", "executor.client_timeout_s", "executor.client_timeout_s=inf", "--json")
    assert json.loads(out, parse_constant=lambda name: f"no JSON: {name}")["keys"][0]["default"] == "inf"
    code, out, _ = run(capsys, "keys", "method.train.lr")
    assert "method.* are those of fedoras, the default method; for another: fedloom keys method.train.lr method=" in out
    assert "fedoras" not in run(capsys, "keys", "method.train.lr", "method=fedavg")[1]
    code, out, _ = run(capsys, "plugins", "server rule")
    assert code == 0
    assert "your own code (module:name): a function of (step) and of options by keyword" in out
    assert "  fedadam " in out
    assert "tau=0.001  (float; greater than 0)" in out
    assert all(line == line.rstrip() for line in out.splitlines())
    code, out, _ = run(capsys, "plugins", "--json")
    assert {place["kind"] for place in json.loads(out)["places"]} >= {"space", "data set", "method"}
    code, _, err = run(capsys, "keys", "nothing")
    assert (code, err.count("\n")) == (2, 1)
