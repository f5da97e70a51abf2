"""Settings: their names, what they differ in, and numbers over their seeds."""

import json
from typing import Any

import pandas as pd
import pytest

from fedloom.experiments import analysis
from fedloom.experiments.analysis.settings import by_seed, estimate, estimate_by_seed, settings_of, spread
from fedloom.platform.plugins import called
from fedloom.platform.results.writer import RunWriter


def names_of(runs: Any, *run_ids: str) -> list[str]:
    return [setting.name for setting in settings_of(analysis.load(runs.root, run_ids))]


def test_a_name_begins_with_what_tells_its_setting_from_the_others(runs: Any) -> None:
    common = {"a": 1, "b": 1, "c": 1, "d": 1, "zeta": 1}
    for run_id, changes in (("r1", {}), ("r2", {"zeta": 2}), ("r3", dict.fromkeys("abcd", 2))):
        runs.begin(run_id, 1, **(common | changes)).close()
    assert names_of(runs, "r1", "r2", "r3") == [
        "demo, a=1, b=1, c=1, zeta=1, and 1 more",
        "demo, a=1, b=1, c=1, zeta=2, and 1 more",
        "demo, a=2, b=2, c=2, d=2, and 1 more",
    ]


def test_long_values_are_cut_in_names_and_whole_in_what_differs(runs: Any) -> None:
    for run_id, family in (("r1", ["x" * 40]), ("r2", ["y"])):
        runs.begin(run_id, 1, family=family).close()
    first, second = settings_of(analysis.load(runs.root))
    assert first.name == f"demo, family=[{'x' * 30}…"
    assert first.differences == {"method.train.family": ["x" * 40]}
    assert second.name == "demo, family=[y]"


def test_a_run_that_stored_no_configuration_is_a_setting_of_its_own(runs: Any) -> None:
    for run_id in ("r1", "r2"):
        RunWriter.create(runs.root, "demo", run_id).close()
    assert names_of(runs, "r1", "r2") == ["demo, r1", "demo, r2"]


def test_runs_of_another_precision_are_another_setting_and_those_of_other_actors_are_not(runs: Any) -> None:
    for run_id, executor in (
        ("r1", {"precision": "float32", "actors": 1}),
        ("r2", {"precision": "float32", "actors": 4}),
        ("r3", {"precision": "bfloat16", "actors": 1}),
    ):
        config = {"experiment": "demo", "seed": 1, "executor": executor}
        writer = RunWriter.create(runs.root, "demo", run_id)
        writer.update_run(config=json.dumps(config))
        writer.close()
    settings = [(setting.name, setting.run_ids) for setting in settings_of(analysis.load(runs.root))]
    assert settings == [("demo, precision=float32", ("r1", "r2")), ("demo, precision=bfloat16", ("r3",))]


def test_a_setting_counts_its_distinct_seeds(runs: Any) -> None:
    for i, seed in enumerate((1, 1, 2)):
        runs.begin(f"r{i}", seed).close()
    (setting,) = settings_of(analysis.load(runs.root))
    assert (setting.run_ids, setting.num_seeds, setting.repeats_seeds) == (("r0", "r1", "r2"), 2, True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fedavg", "fedavg"),
        ("fedper:METHOD", "fedper"),
        ("methods.fedper:METHOD", "fedper"),
        ("my_rules:soft", "soft"),
        ("s3://bucket", "s3://bucket"),
        ("{a:1}", "{a:1}"),
    ],
)
def test_own_code_goes_by_its_name(name: str, text: str) -> None:
    assert called(name) == text


def test_a_spread_over_seeds_averages_the_runs_of_a_seed_first() -> None:
    rows = pd.DataFrame(
        [("r0", "s1", 0, 0.2), ("r0", "s1", 0, 0.4), ("r1", "s1", 0, 0.5), ("r2", "s2", 0, 0.8), ("r2", "s2", 1, 1.0)],
        columns=["run_id", "seeds", "round", "value"],
    )
    found = spread(rows, ["round"], "value")
    assert found.loc[0].tolist() == pytest.approx([0.6, 0.4, 0.8])
    assert found.loc[1].tolist() == [1.0, 1.0, 1.0]
    known = estimate_by_seed([0.2, None, 0.4, 0.8], ["s1", "s1", "s1", "s2"])
    assert known is not None
    assert known.values == pytest.approx((0.3, 0.8))
    assert estimate_by_seed([None], ["s1"]) is None


def test_values_by_seed_are_in_the_order_of_the_seeds_as_numbers() -> None:
    seeds = [json.dumps({"training": seed}) for seed in (10, 9, 2)]
    known = estimate_by_seed([0.1, 0.9, 0.2], seeds)
    assert known is not None
    assert known.values == (0.2, 0.9, 0.1)
    rows = pd.DataFrame({"seeds": seeds, "value": [0.1, 0.9, 0.2]})
    assert by_seed(rows, ["value"])["value"].tolist() == [0.2, 0.9, 0.1]


def test_diverged_perplexities_have_an_interval() -> None:
    """The squares of these deviations are beyond the largest float; 4.3027 is Student's quantile of two degrees."""
    known = estimate([1e300, 2e300, 3e300])
    assert known is not None
    assert (known.mean, known.half_width) == pytest.approx((2e300, 4.3027 * 1e300 / 3**0.5), rel=1e-4)
