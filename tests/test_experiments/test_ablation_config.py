"""What an ablation varies: presets, a user's YAML, overrides of it, and what of it is refused in one line."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.experiments.ablation.config import AblationConfig, AxisConfig, check_ablation, load_ablation_config
from fedloom.experiments.runs.presets import CONF, ablations

Written = Callable[[str | bytes], str]

PLAIN = "axes: {lr: {key: method.train.lr, values: [0.1, 0.2]}}\nseeds: [1]\n"


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Writes an ablation of one's own; gives its path."""

    def write(content: str | bytes) -> str:
        file = tmp_path / "mine.yaml"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(file)

    return write


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ablations())
def test_every_ready_made_ablation_is_read_under_its_own_name(name: str) -> None:
    found, config = load_ablation_config(name)
    assert found == name
    assert config.title.endswith("?"), "the question that it answers"
    assert config.figures
    assert (config.search.kind, config.scheduler.kind, config.attempts, config.concurrent) == ("grid", "none", 2, None)
    assert (CONF / "ablation" / f"{name}.yaml").read_text().startswith("# "), "says what it is"


def test_an_ablation_of_ones_own_is_named_after_its_file(written: Written) -> None:
    name, config = load_ablation_config(written(PLAIN))
    assert name == "mine"
    assert config == AblationConfig(axes={"lr": AxisConfig(key="method.train.lr", values=[0.1, 0.2])}, seeds=[1])


def test_values_keep_their_kinds(written: Written) -> None:
    _, config = load_ablation_config(
        written("axes: {any: {key: space.options.x, values: [1, 1.5, -2e-3, a b, null, false, [1, [2]], {a: {b: 1}}]}}")
    )
    assert config.axes["any"].values == [1, 1.5, -0.002, "a b", None, False, [1, [2]], {"a": {"b": 1}}]


def test_axes_and_settings_keep_their_order(written: Written) -> None:
    text = "axes:\n  z: {settings: {second: {a.b: 1}, first: {a.b: 2, c: 3}}}\n  a: {key: k, values: [2, 1]}\n"
    _, config = load_ablation_config(written(text))
    assert list(config.axes) == ["z", "a"]
    assert list(config.axes["z"].settings.items()) == [("second", {"a.b": 1}), ("first", {"a.b": 2, "c": 3})]
    assert config.axes["a"].values == [2, 1]


def test_names_may_be_numbers(written: Written) -> None:
    text = "axes: {1: {settings: {2: {a: {3: 4}}, 0.5: {5: 6}}}, b: {key: c, values: [{7: 8}]}}"
    _, config = load_ablation_config(written(text))
    assert config.axes["1"].settings == {"2": {"a": {3: 4}}, "0.5": {"5": 6}}
    assert config.axes["b"].values == [{7: 8}]


def test_overrides_change_the_ablation_itself() -> None:
    overrides = [
        "ablation.seeds=[1,2,3]",
        "ablation.axes.beta_0.values=[.9]",
        "ablation.concurrent=2",
        "ablation.search.kind=random",
        "ablation.search.samples=4",
        "ablation.scheduler.kind=asha",
        "ablation.figures=[]",
    ]
    plain = load_ablation_config("beta_schedule")[1]
    _, config = load_ablation_config("beta_schedule", overrides)
    assert config.seeds == [1, 2, 3]
    assert config.axes["beta_0"] == AxisConfig(key="method.train.shares.beta_0", values=[0.9])
    assert {n: a for n, a in config.axes.items() if n != "beta_0"} == {
        n: a for n, a in plain.axes.items() if n != "beta_0"
    }
    assert (config.search.kind, config.search.samples, config.search.seed) == ("random", 4, 1)
    assert (config.concurrent, config.scheduler.kind, config.figures) == (2, "asha", [])
    assert config.overrides == plain.overrides


def test_keys_of_a_search_and_a_scheduler_that_are_off_are_said_to_have_no_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    load_ablation_config("alpha", ["ablation.search.samples=3", "ablation.scheduler.grace_rounds=2"])
    load_ablation_config("alpha", ["ablation.search.kind=random", "ablation.search.samples=3"])
    assert caplog.messages == [
        "ablation.search.samples=3 has no effect with ablation.search.kind=grid",
        "ablation.scheduler.grace_rounds=2 has no effect with ablation.scheduler.kind=none",
    ]


def test_an_override_may_add_an_axis() -> None:
    overrides = ["ablation.axes.lr.key=method.train.lr", "ablation.axes.lr.values=[.1,.2]"]
    assert list(load_ablation_config("alpha", overrides)[1].axes) == ["alpha", "lr"]


# -- what is refused ---------------------------------------------------------------------------------------------------

FILES = {
    "list": ("- a\n- b\n", "Cannot merge DictConfig with ListConfig"),
    "text": ("hello\n", "unknown configuration key 'ablation.hello'"),
    "number": ("3\n", "mine.yaml cannot be read as YAML"),
    "empty": ("", "ablation.axes is empty: name at least one axis"),
    "no axes": ("seeds: [1]\n", "ablation.axes is empty"),
    "open bracket": ("title: x\naxes: [1, 2\n", r"mine.yaml cannot be read as YAML: expected ',' or '\]'.* in line 3"),
    "axis twice": ("axes: {a: {key: x, values: [1]}, a: {key: y, values: [1]}}", "duplicate key a"),
    "no text": (b"\xff\xfe\x00", "mine.yaml cannot be read as YAML"),
    "unknown key": (PLAIN + "axis: {}\n", "key 'ablation.axis'; did you mean 'ablation.axes'?"),
    "unknown key of an axis": (
        "axes: {a: {key: x, value: [1]}}",
        "key 'ablation.axes.a.value'; did you mean 'ablation.axes.a.values'?",
    ),
    "seed of another kind": (PLAIN.replace("[1]", "[one]"), r"seeds.0.=one: must be an int"),
    "no seed": (PLAIN.replace("[1]", "[]"), r"ablation.seeds=\[\]: give one or more different seeds"),
    "seed twice": (PLAIN.replace("[1]", "[1, 1]"), r"ablation.seeds=\[1, 1\]: give one or more different seeds"),
    "axis without values": ("axes: {a: {key: x}}", "ablation.axes.a has 0 of values, settings.*: give one of them"),
    "empty values": ("axes: {a: {key: x, values: []}}", "ablation.axes.a has 0 of values"),
    "values and a range": ("axes: {a: {key: x, values: [1], uniform: [0, 1]}}", "ablation.axes.a has 2 of values"),
    "values without a key": ("axes: {a: {values: [1]}}", "ablation.axes.a: give a key with its values, or settings"),
    "settings with a key": ("axes: {a: {key: x, settings: {b: {x: 1}}}}", "ablation.axes.a: give a key with its val"),
    "setting of nothing": ("axes: {a: {settings: {b: }}}", "axes.a.settings.b=null: must be a dict"),
    "name that is a truth value": (
        "axes: {a: {settings: {yes: {x: 1}, no: {x: 2}}}}",
        "ablation.axes.a.settings.true: a name that is yes, on or true must be in quotes",
    ),
    "a number and its text": (
        "axes: {a: {settings: {1: {x: 1}, '1': {x: 2}}}}",
        "ablation.axes.a.settings.1: two have this name, one in quotes and one without: rename one",
    ),
    "value twice": ("axes: {a: {key: x, values: [0.5, [1], 0.5]}}", "ablation.axes.a.values: 0.5 is there twice"),
    "whole and real": ("axes: {a: {key: x, values: [1, 1.0]}}", "ablation.axes.a.values: 1.0 is there twice"),
    "zero and false": ("axes: {a: {key: x, values: [0, false]}}", "ablation.axes.a.values: false is there twice"),
    "null and its text": ("axes: {a: {key: x, values: [null, 'null']}}", "ablation.axes.a.values: null is there twice"),
    "list and its text": ("axes: {a: {key: x, values: [[1], '[1]']}}", r"axes.a.values: \[1\] is there twice"),
    "range in a grid": ("axes: {a: {key: x, uniform: [0, 1]}}", "ablation.axes.a: a range is for ablation.search.kind"),
    "axis of seeds": ("axes: {a: {key: seed, values: [1, 2]}}", r"ablation.axes.a sets seed: .*ablation.seeds=\[1,2\]"),
    "setting of a seed": ("axes: {a: {settings: {b: {+seed: 3}}}}", r"ablation.axes.a sets \+seed: .*ablation.seeds"),
    "axis of results": ("axes: {a: {key: results, values: [x]}}", "ablation.axes.a sets results: .*one results folder"),
    "a seed for all": (PLAIN + "overrides: [seed=3]\n", "ablation.overrides has seed=3: .*give ablation.seeds"),
    "unknown search": (PLAIN + "search: {kind: tpe}\n", "ablation.search.kind=tpe: must be one of grid, random"),
    "unknown scheduler": (PLAIN + "scheduler: {kind: pbt}\n", "scheduler.kind=pbt: must be one of none, asha"),
    "unknown metric": (
        PLAIN + "scheduler: {metric: f1}\n",
        "ablation.scheduler.metric=f1: must be one of metric, loss",
    ),
    "factor of 1": (PLAIN + "scheduler: {reduction_factor: 1}\n", "reduction_factor=1: must be above 1"),
    "factor of nan": (PLAIN + "scheduler: {reduction_factor: .nan}\n", "reduction_factor=nan: must be above 1"),
    "no grace": (PLAIN + "scheduler: {grace_rounds: 0}\n", "ablation.scheduler.grace_rounds=0: must be at least 1"),
    "no sample": (PLAIN + "search: {samples: 0}\n", "ablation.search.samples=0: must be between 1 and 1000000"),
    "no attempt": (PLAIN + "attempts: 0\n", "ablation.attempts=0: must be between 1 and 1000"),
    "none at once": (PLAIN + "concurrent: 0\n", "ablation.concurrent=0: must be between 1 and 1000000"),
}


def refusal(given: str, overrides: list[str]) -> str:
    with pytest.raises(ValueError, match=r"\w") as caught:
        load_ablation_config(given, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_no_ablation_is_refused_in_one_line(case: str, written: Written) -> None:
    content, expected = FILES[case]
    assert re.search(expected, refusal(written(content), [])), case


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("uniform: [0, 1, 2]", "uniform=[0.0, 1.0, 2.0]: give the least and the greatest"),
        ("uniform: [1, 0]", "uniform=[1.0, 0.0]: give the least and the greatest"),
        ("uniform: [0, .inf]", "uniform[1]=inf: must be finite"),
        ("uniform: [0, .nan]", "uniform[1]=nan: must be finite"),
        ("log_uniform: [0, 1]", "log_uniform=[0.0, 1.0]: give the least and the greatest, both above 0"),
        ("integers: []", "integers=[]: give the least and the greatest"),
        ("integers: [1.5, 3]", "integers[0]=1.5: must be an int"),
        ("integers: [3, 3]", "integers=[3, 3]: give the least and the greatest"),
    ],
)
def test_a_range_that_is_none(axis: str, expected: str, written: Written) -> None:
    assert expected in refusal(written(f"axes: {{a: {{key: x, {axis}}}}}\nsearch: {{kind: random}}\n"), [])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("ablation.seeds", "'ablation.seeds' is not of the form key=value"),
        ("ablation.seeds=[1,2", "ablation.seeds=[1,2 cannot be read (expected ',' or ']'"),
        ("ablation.seed=[1]", "key 'ablation.seed'; did you mean 'ablation.seeds'?"),
        ("ablation.seeds=3", "seeds=3: must be a list[int]"),
        ("ablation.axes.alpha.vals=[1]", "key 'ablation.axes.alpha.vals'; did you mean 'ablation.axes.alpha.values'?"),
        ("ablation.axes.alpha.values=1", "axes.alpha.values=1: must be a list"),
        ("ablation.axes.alfa.values=[1]", "ablation.axes.alfa: give a key with its values"),
        ("ablation.axes=3", "axes=3: must be a dict"),
        ("ablation.search.knd=random", "key 'ablation.search.knd'; did you mean 'ablation.search.kind'?"),
        ("ablation.=3", "unknown configuration key 'ablation.'"),
    ],
)
def test_an_override_of_the_ablation_that_is_none(override: str, expected: str) -> None:
    assert expected in refusal("alpha", [override])


def test_an_unknown_ablation_names_the_nearest_and_all() -> None:
    line = refusal("beta_shedule", [])
    assert line.startswith("ablation=beta_shedule: no such ablation; did you mean 'beta_schedule'?; there are alpha, ")
    assert "ablation=my.yaml" in line
    assert refusal("none/mine.yaml", []) == "ablation=none/mine.yaml: there is no such file"


def test_a_file_whose_name_cannot_begin_a_run_id(tmp_path: Path) -> None:
    file = tmp_path / "my ablation.yaml"
    file.write_text(PLAIN)
    assert "ablation 'my ablation' cannot be a file name here" in refusal(str(file), [])


def test_a_definition_made_in_code_is_checked_alike() -> None:
    config = AblationConfig(axes={"a": AxisConfig(key="x", values=[1, 2])})
    check_ablation(config)
    config.search.kind = "tpe"
    with pytest.raises(ValueError, match="must be one of grid, random"):
        check_ablation(config)
