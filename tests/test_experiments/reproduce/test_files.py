"""Files of items are read strictly: every mistake is one line that says where it is and what is allowed."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedloom.experiments.reproduce.items import Published, load_item
from fedloom.experiments.reproduce.plan import Asked, parts_of

Load = Callable[..., Any]


def values() -> dict[str, Any]:
    scale = {"experiment": "fedavg_digits", "seeds": [1, 2], "settings": {"s": {}, "r": {"data.alpha": 0.1}}}
    read = {"from": "models", "value": "accuracy", "place": "tier"}
    return {
        "title": "T",
        "source": "Paper, Tab. 1",
        "runs": {"paper": scale, "small": scale},
        "quantities": {"a": {"read": read, "published": {"s": {"tier1": [1, 0.5], "tier2": 2}}}},
        "claims": [{"text": "It is so.", "at_least": {"of": "a", "value": 1}}],
    }


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads the item with one value changed; the place is a path such as runs.paper.seeds, None deletes."""

    def changed(place: str = "", value: Any = None, name: str = "tab1") -> Any:
        content = values()
        *way, last = place.split("/") if place else [""]
        at: Any = content
        for part in way:
            at = at[int(part)] if isinstance(at, list) else at[part]
        if place and value is None:
            del at[last]
        elif place:
            at[last] = value
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "x" / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        return load_item(f"x/{name}", tmp_path)

    return changed


def test_a_whole_file(load: Load) -> None:
    item = load()
    assert item.quantities["a"].published == {("s", "tier1"): Published(1, 0.5), ("s", "tier2"): Published(2)}
    assert item.needs_runs
    assert len(item.claims) == 1


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("title", None, "paper/x/tab1.yaml: title is missing"),
        ("titel", "T", "unknown key 'titel'; did you mean 'title'?; there are title, source"),
        ("runs/large", {}, "runs: unknown key 'large'; there are paper, small"),
        ("runs/paper/seeds", [1, 1], "give different whole numbers from 0"),
        ("runs/paper/experiment", "fedavg_digit", "no preset 'fedavg_digit'; did you mean 'fedavg_digits'?"),
        ("runs/paper/settings/s", {"experiment": "fedavg_digit"}, "no preset 'fedavg_digit'"),
        ("runs/paper/settings", {}, "settings are missing"),
        ("runs/paper/sedes", [1], "unknown key 'sedes'; did you mean 'seeds'?"),
        ("runs_of", "x/tab2", "runs_of: there is no item 'x/tab2'; did you mean 'x/tab1'?"),
        ("quantities/a/read/from", "model", "from=model; did you mean 'models'?"),
        ("quantities/a/read/reduce", "median", "reduce=median; did you mean 'mean'?; there are one, mean"),
        ("quantities/a/ratio", ["a", "a"], "has read and ratio: give one of them"),
        ("quantities/b", {"ratio": ["a", "c"]}, "there is no quantity above it 'c'"),
        ("quantities/b", {"ratio": ["a"]}, "give a list of two quantities"),
        ("quantities/b", {"unit": "%"}, "neither published nor measured"),
        ("quantities/b", {"count": {"from": "spaces", "value": "x"}}, "from=spaces; did you mean 'space'?"),
        ("quantities/a/published/s/tier1", "much", "published: s: tier1 is much: give a number"),
        ("quantities/a/published/s/tier1", [1, 2, 3], "give a number, or [number, standard deviation]"),
        ("claims/0/at_least/of", "b", "there is no quantity 'b'"),
        ("claims/0/at_least/settings", ["t"], "at scale paper: there is no setting 't'"),
        ("claims/0/at_least/value", None, "at_least: value is missing"),
        ("claims/0/at_most", {"of": "a", "value": 3}, "has 2 checks: give one of greater"),
        ("claims/0/scales", ["huge"], "there is no scale 'huge'"),
        ("claims/0/needs", "trained", "claims 1: needs: there is no regime 'trained'"),
        ("regimes", {"trained": {"text": "x", "at_least": {"of": "b", "value": 1}}}, "regimes: trained: there is no"),
        ("claims/0/band", {"of": "a", "target": 1, "tolerance": 1}, "has 2 checks"),
        ("claims", [{"text": "x", "band": {"of": "a", "target": 1, "tolerance": "much"}}], "a share such as 10 %"),
        ("claims", [{"text": "x", "band": {"of": "a", "target": 1, "tolerance": -1}}], "is -1: give a number from 0"),
        ("claims", [{"text": "x", "close": {"of": "a", "to": "a", "within": -1}}], "is -1: give a number from 0"),
        ("claims/0/at_least", {"of": {"of": "a", "setting": "s"}, "settings": ["r"], "value": 1}, "settings have no"),
        ("claims/0/at_least", {"of": {"of": "a", "place": "t"}, "places": ["u"], "value": 1}, "places have no effect"),
        ("claims", [{"text": "x", "monotone": {"of": "a", "places": ["t"], "order": ["t", "u"]}}], "name none in `of`"),
        ("claims/0/at_least/value", float("nan"), "value is nan: give a finite number"),
        ("claims", [{"text": "x", "monotone": {"of": "a", "order": ["s"]}}], "give at least two settings or places"),
    ],
)
def test_a_mistake_is_one_line(load: Load, place: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        load(place, value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("what", ["setting", "place"])
def test_one_value_is_not_compared_with_those_of_all_settings_or_places(load: Load, what: str) -> None:
    """The second side is read where the first one is, and would have no value there; turned round, it has."""
    one, a = {"of": "a", what: "s"}, values()["quantities"]["a"]
    load("claims", [{"text": "x", "less": {"of": "a", "than": one}}])
    load("quantities/b", {"ratio": ["a", one]})
    with pytest.raises(ValueError, match=f"claims 1: a in one {what} is compared with a in every one: turn them round"):
        load("claims", [{"text": "x", "greater": {"of": one, "than": "a"}}])
    with pytest.raises(ValueError, match=f"quantities: b: a in one {what} .*, or name the {what} of a"):
        load("quantities/b", {"ratio": [one, "a"]})
    with pytest.raises(ValueError, match=f"quantities: c: b in one {what} is compared with a in every one"):
        load("quantities", {"a": a, "b": {"difference": [one, one]}, "c": {"ratio": ["b", "a"]}})


def test_no_number_is_chosen_by_test_data(load: Load) -> None:
    read = {"from": "evaluations", "value": "value", "reduce": "max", "where": {"metric": "accuracy"}}
    with pytest.raises(ValueError, match="give the split in where"):
        load("quantities/a/read", read)
    of_test = {**read, "where": {"metric": "accuracy", "split": "test"}}
    for best in (of_test, {"from": "models", "value": "accuracy", "reduce": "max"},
                 {"from": "silos", "value": "loss", "reduce": "min"},
                 {**of_test, "where": {"split": "test"}},
                 {"from": "fairness", "value": "worst", "reduce": "max"},
                 {"from": "fairness_in_perplexity", "value": "mean", "reduce": "min"},
                 {"from": "gains", "value": "gain", "reduce": "max"},
                 {"from": "tiers", "value": "gain", "reduce": "max"}):  # fmt: skip
        with pytest.raises(ValueError, match=f"reduce={best['reduce']} of .* selects on test data"):
            load("quantities/a/read", best)
    for allowed in (
        {**of_test, "reduce": "last"},
        {**of_test, "where": {"metric": "accuracy", "split": "validation"}},
        {"from": "silos", "value": "accuracy", "reduce": "min"},
        {"from": "candidates", "value": "metric", "reduce": "max"},
        {"from": "models", "value": "macs", "reduce": "max"},
        {"from": "fairness", "value": "worst", "reduce": "min"},
        {"from": "convergence", "value": "metric", "reduce": "max"},
        {"from": "subnets", "value": "validation_accuracy", "reduce": "max"},
        {"from": "tiers", "value": "search_metric", "reduce": "max"},
    ):
        load("quantities/a/read", allowed)


def test_what_is_only_published_is_in_no_claim(load: Load) -> None:
    with pytest.raises(ValueError, match="a is only published: a claim compares what is measured"):
        load("quantities/a/read", None)


def test_runs_of_another_item_are_the_same_ablations(load: Load, tmp_path: Path) -> None:
    first = load()
    content = values()
    del content["runs"]
    (tmp_path / "x" / "fig1.yaml").write_text(yaml.safe_dump({**content, "runs_of": "x/tab1"}))
    second = load_item("x/fig1", tmp_path)
    ids = [[part.ablation_id for part in parts_of(item, Asked("small"))] for item in (first, second)]
    assert ids[0] == ids[1]
    assert ids[0] != [part.ablation_id for part in parts_of(first, Asked("small", seeds=(1, 2, 3)))]
    assert ids[0] != [part.ablation_id for part in parts_of(first, Asked("paper"))]


def test_an_item_may_add_runs_of_its_own_to_those_of_others(load: Load, tmp_path: Path) -> None:
    first = load()

    def second(**changes: Any) -> Any:
        own = {"experiment": "fedadam_digits", "settings": {"t": {}, "u": {}}} | changes
        content = {**values(), "runs": {"paper": own, "small": own}, "runs_of": ["x/tab1"]}
        (tmp_path / "x" / "fig1.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        return load_item("x/fig1", tmp_path)

    both = second()
    assert second(seeds=[1, 2]).scales == both.scales
    assert (first.runs_of, both.runs_of) == (("x/tab1",), ("x/tab1", "x/fig1"))
    assert both.scales["small"].run_by == {"s": "x/tab1", "r": "x/tab1", "t": "x/fig1", "u": "x/fig1"}
    (shared,), (same, own) = (parts_of(item, Asked("small")) for item in (first, both))
    assert shared.ablation_id == same.ablation_id
    assert own.ablation_id.startswith("paper-x-fig1-small-fedadam_digits-")
    assert (own.scale.experiment, [*own.scale.settings]) == ("fedadam_digits", ["t", "u"])
    for changes, said in (
        ({"settings": {"r": {}}}, "paper: x/tab1 and x/fig1 both have the setting 'r': rename one"),
        ({"seeds": [1]}, "x/tab1 and x/fig1 differ in seeds or overrides: leave them out in the latter"),
        ({"overrides": ["data.num_clients=3"]}, "differ in seeds or overrides"),
    ):
        with pytest.raises(ValueError, match=said):
            second(**changes)


def test_seeds_are_those_of_the_item_whose_runs_are_read_however_far_away(load: Load, tmp_path: Path) -> None:
    first = load()

    def adds(name: str, setting: str, other: str) -> None:
        own = {"small": {"experiment": "fedadam_digits", "settings": {setting: {}}}}
        content = {**values(), "runs": own, "runs_of": other}
        (tmp_path / "x" / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))

    adds("fig1", "t", "x/tab1")
    adds("fig2", "u", "x/fig1")
    scale, last = first.scales["small"], load_item("x/fig2", tmp_path).scales["small"]
    assert (last.seeds, last.overrides) == (scale.seeds, scale.overrides)
    adds("fig1", "t", "x/fig2")
    with pytest.raises(ValueError, match=r"paper/x/fig2.yaml: runs_of goes in a circle: x/fig2 to x/fig1 to x/fig2"):
        load_item("x/fig2", tmp_path)


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, "s"),  # published
        ({"claims": [{"text": "x", "at_least": {"of": "a", "value": 1}}]}, "sru"),
        ({"claims": [{"text": "x", "at_least": {"of": {"of": "a", "setting": "r"}, "value": 1}}]}, "sr"),
        ({"claims": [{"text": "x", "at_least": {"of": "a", "value": 1, "settings": ["r"]}}]}, "sr"),
        ({"claims": [{"text": "x", "at_least": {"of": "a", "value": 1}, "scales": ["paper"]}]}, "s"),
        ({"claims": [{"text": "x", "monotone": {"of": "a", "along": "settings", "order": ["u", "s"]}}]}, "su"),
        ({"claims": [{"text": "x", "close": {"of": "a", "to": {"of": "a", "setting": "u"}, "within": 1}}]}, "sru"),
        ({"regimes": {"g": {"text": "x", "at_least": {"of": {"of": "a", "setting": "u"}, "value": 1}}}}, "su"),
        ({"ratio": [{"of": "a", "setting": "u"}, {"of": "a", "setting": "s"}]}, "su"),
        (
            {
                "ratio": [{"of": "a", "setting": "u"}, {"of": "a", "setting": "s"}],
                "claims": [{"text": "x", "at_least": {"of": "b", "value": 1}}],
            },
            "su",
        ),
        ({"ratio": ["a", "a"], "claims": [{"text": "x", "at_least": {"of": "b", "value": 1}}]}, "sru"),
        ({"own": {"t": {"method.start_from": "run of r"}}}, "srt"),
        ({"published": {}}, "sru"),
    ],
)
def test_an_item_needs_of_anothers_runs_those_that_its_numbers_and_claims_name(
    load: Load, tmp_path: Path, changes: dict[str, Any], needed: str
) -> None:
    first = load("runs/small/settings", {"s": {}, "r": {"data.alpha": 0.1}, "u": {"data.alpha": 1}})
    content = values()
    content |= {"runs_of": "x/tab1", "claims": changes.get("claims", []), "regimes": changes.get("regimes", {})}
    content["quantities"]["a"]["published"] = changes.get("published", {"s": 1})
    if "ratio" in changes:
        content["quantities"]["b"] = {"ratio": changes["ratio"]}
    del content["runs"]["paper"]
    content["runs"]["small"] = {"experiment": "fedadam_digits", "settings": changes.get("own", {"t": {}})}
    if "own" not in changes:
        del content["runs"]
    (tmp_path / "x" / "fig1.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    item = load_item("x/fig1", tmp_path)
    parts = parts_of(item, Asked("small"))
    assert {name for part in parts for name in part.needed} == {*needed}
    assert sum(part.num_runs for part in parts) == 2 * len(needed)
    (whole,) = parts_of(first, Asked("small"))
    assert (parts[0].ablation_id, whole.needed) == (whole.ablation_id, {"s", "r", "u"})


START = {"experiment": "fedadam_digits", "method.start_from": "run of s"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"s": {}, "t": {**START, "method.start_from": "run of r"}},
            "t: method.start_from=run of r: there is no such setting",
        ),
        ({"t": START, "s": {}}, "t: method.start_from=run of s: that setting does not run first: write it above"),
        ({"s": {}, "t": {"method.start_from": "run of s"}}, "that setting does not run first"),
        ({"s": {"method.start_from": "run of s"}}, "that setting does not run first"),
        ({"a": {}, "t": START, "s": {"data.dataset": "cifar10"}}, "that setting does not run first"),
    ],
)
def test_runs_start_from_settings_that_are_run_before_them(load: Load, settings: dict[str, Any], said: str) -> None:
    load("runs/small/settings", {"s": {}, "t": START})
    load("runs/small/settings", {"s": {"data.dataset": "cifar10"}, "t": {"method.start_from": "run of s"}})
    with pytest.raises(ValueError, match=said):
        load("runs/small/settings", settings)


def test_the_run_from_which_others_start_is_no_override(load: Load) -> None:
    with pytest.raises(ValueError, match="run of NAME stands in settings, not in overrides"):
        load("runs/small/overrides", ["method.start_from=run of s"])


def test_the_id_changes_with_the_runs_from_which_others_start(load: Load) -> None:
    def ids(**changes: Any) -> list[str]:
        item = load("runs/small/settings", {"s": changes, "t": START})
        return [part.ablation_id for part in parts_of(item, Asked("small"))]

    before, after = ids(), ids(**{"data.alpha": 0.1})
    assert len({*before, *after}) == 4
    assert ids() == before


def test_runs_are_those_of_the_item_that_has_them(load: Load, tmp_path: Path) -> None:
    load()
    content = {key: value for key, value in values().items() if key != "runs"}
    for name, runs_of in (("fig1", "x/tab1"), ("fig2", "x/fig1")):
        (tmp_path / "x" / f"{name}.yaml").write_text(yaml.safe_dump({**content, "runs_of": runs_of}))
    with pytest.raises(ValueError, match="runs_of=x/fig1 has no runs of its own: name the item that has them"):
        load_item("x/fig2", tmp_path)


def test_the_id_changes_with_the_runs_alone(load: Load) -> None:
    def ids(item: Any) -> list[str]:
        return [part.ablation_id for part in parts_of(item, Asked("small"))]

    assert ids(load()) == ids(load("title", "Another")) == ids(load("claims", []))
    for place, value in (("overrides", ["data.num_clients=3"]), ("seeds", [1, 2, 3]), ("settings", {"s": {}})):
        assert ids(load()) != ids(load(f"runs/small/{place}", value)), place
