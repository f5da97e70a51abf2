"""Importances of an ablation's axes: variances by hand, their laws, and forests that must see an effect."""

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.extra.numpy as arrays
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, strategies as st

from fedloom.experiments import analysis
from fedloom.experiments.analysis.importances import variances
from fedloom.experiments.report.importances import importances_block
from fedloom.experiments.store.ablations import Ablation
from tools.generated_ablation import Fates, planted, write_planned


def planned(axes: dict[str, tuple[Any, ...]]) -> Ablation:
    return Ablation("a", "a", "", "demo", axes, {}, (1,), (), {}, (), 1, None, "")


def framed(axes: dict[str, tuple[Any, ...]], rows: Sequence[tuple[Any, ...]]) -> pd.DataFrame:
    """A frame of rows (values of the axes, seed, accuracy)."""
    kinds = {axis: pd.CategoricalDtype(list(values), ordered=True) for axis, values in axes.items()}
    return pd.DataFrame(rows, columns=[*axes, "seed", "accuracy"]).astype(kinds)


def by_axes(frame: pd.DataFrame, axes: dict[str, tuple[Any, ...]]) -> dict[str, float]:
    rows = analysis.importances(frame, planned(axes))
    return {str(k): float(v) for k, v in zip(rows["axes"], rows["importance"], strict=True)}


TWO = {"a": (0, 1), "b": ("x", "y")}
MEANS = {(0, "x"): 1.0, (0, "y"): 3.0, (1, "x"): 5.0, (1, "y"): 11.0}
"""The grand mean is 5; a adds ∓3, b ∓2, and together they add ±1: sums of squares of 72, 32 and 8 in 8 trials."""


def test_a_grid_is_decomposed_as_by_hand() -> None:
    # Seeds add ∓1 everywhere, which is a sum of squares of 8 of 120, and no noise.
    rows = [(a, b, seed, mean + (2 * seed - 3)) for (a, b), mean in MEANS.items() for seed in (1, 2)]
    shares = by_axes(framed(TWO, rows), TWO)
    assert shares == pytest.approx({"a": 72 / 120, "b": 32 / 120, "a × b": 8 / 120, "seeds": 8 / 120})
    assert analysis.importances(framed(TWO, rows), planned(TWO))["order"].tolist() == [1, 1, 2, 0]


def test_what_noise_would_add_is_the_seeds() -> None:
    # The seeds add ∓1, ∓1, ∓1 and ∓5: ∓2 on average (a sum of squares of 32), and a rest of 24 with 3 degrees of
    # freedom. Of the noise, a variance of 8, each effect of one degree contains 8.
    rows = [
        (a, b, seed, mean + (2 * seed - 3) * (5 if mean == 11 else 1))
        for (a, b), mean in MEANS.items()
        for seed in (1, 2)
    ]
    shares = by_axes(framed(TWO, rows), TWO)
    assert shares == pytest.approx({"a": 64 / 168, "b": 24 / 168, "a × b": 0, "seeds": 80 / 168})


def test_one_seed_tells_nothing_about_noise() -> None:
    shares = by_axes(framed(TWO, [(a, b, 1, mean) for (a, b), mean in MEANS.items()]), TWO)
    assert shares == pytest.approx({"a": 72 / 112, "b": 32 / 112, "a × b": 8 / 112})


def test_seeds_without_all_settings_do_not_count() -> None:
    rows = [(a, b, seed, mean * seed) for (a, b), mean in MEANS.items() for seed in (1, 2)]
    assert by_axes(framed(TWO, rows[:-1]), TWO) == by_axes(framed(TWO, rows[::2]), TWO)


GRIDS = st.tuples(st.integers(2, 3), st.integers(2, 4), st.integers(2, 3), st.integers(1, 3)).flatmap(
    lambda shape: arrays.arrays(np.float64, shape, elements=st.integers(0, 100).map(float))
)


@given(GRIDS)
def test_shares_are_a_decomposition(grid: np.ndarray[Any, Any]) -> None:
    if np.ptp(grid) == 0:
        return
    rows = {name: share for name, _, share in variances(grid, ["a", "b", "c"])}
    assert min(rows.values()) >= 0
    assert sum(rows.values()) == pytest.approx(1)
    # Neither order of values, nor of axes, nor unit and origin matter.
    moved = {name: share for name, _, share in variances(2.5 * grid[::-1].transpose(1, 0, 2, 3) - 7, ["b", "a", "c"])}
    assert moved["a"] == pytest.approx(rows["a"], abs=1e-9)
    assert moved["b × a"] == pytest.approx(rows["a × b"], abs=1e-9)
    assert moved["three or more axes"] == pytest.approx(rows["three or more axes"], abs=1e-9)


RANGES = {
    "lr": tuple(float(v) for v in np.linspace(0, 1, 40)),
    "rule": ("opa", "plain"),
    "idle": tuple(float(v) for v in np.linspace(5, 9, 40)),
}


def sampled(accuracy: Callable[[float, str], float]) -> pd.DataFrame:
    rng = np.random.default_rng(1)
    rows = []
    for i, (lr, idle) in enumerate(zip(RANGES["lr"], rng.permutation(RANGES["idle"]), strict=True)):
        rule = RANGES["rule"][i % 2]
        rows += [(lr, rule, idle, seed, accuracy(lr, rule) + 0.01 * rng.standard_normal()) for seed in (1, 2)]
    return framed(RANGES, rows)


def test_a_forest_tells_what_matters_in_a_random_search() -> None:
    shares = by_axes(sampled(lambda lr, rule: lr + (0.5 if rule == "opa" else 0.0)), RANGES)
    # lr has a variance of 1/12 and rule of 1/16; a forest, which averages, sees less than all of it.
    assert shares["lr"] == pytest.approx(0.57, abs=0.15)
    assert shares["rule"] == pytest.approx(0.43, abs=0.15)
    assert shares["idle"] < 0.02


def test_noise_is_no_importance_and_few_settings_give_none() -> None:
    rng = np.random.default_rng(2)
    frame = sampled(lambda _lr, _rule: 10 * float(rng.standard_normal()))
    assert max(by_axes(frame, RANGES).values()) < 0.15
    assert by_axes(frame.head(2 * 9), RANGES) == {}
    assert by_axes(frame.assign(accuracy=0.5), RANGES) == by_axes(frame.head(0), RANGES) == {}
    with pytest.raises(ValueError, match="no measure 'f1'"):
        analysis.importances(frame, planned(RANGES), "f1")


BUDGET = ["ablation=comm_budget", "experiment=fedoras_digits", "ablation.axes.averaging.values=[opa,plain]"]


def test_the_report_has_a_row_per_effect(tmp_path: Any) -> None:
    ablation, tables = analysis.load_ablation(tmp_path, write_planned(tmp_path, BUDGET, rounds=4).ablation_id)
    block = importances_block(ablation, tables)
    assert block.heads == ("axes", "accuracy")  # bytes and time are the same everywhere
    assert [row[0] for row in block.rows] == ["budget", "averaging", "budget × averaging", "seeds"]
    grid = np.array([planted(trial, 0) for trial in ablation.trials]).reshape(3, 2, 2)
    expected = [100 * share for _, _, share in variances(grid, ["budget", "averaging"])]
    assert [float(row[1]) for row in block.rows] == pytest.approx(expected, abs=0.06)


def test_trials_that_wait_leave_a_grid_to_the_forest(tmp_path: Any) -> None:
    ablation = write_planned(tmp_path, BUDGET, Fates(waiting=[0]), rounds=4)  # of one of the two seeds
    block = importances_block(*analysis.load_ablation(tmp_path, ablation.ablation_id))
    assert "Only one seed" in block.text[0]
    assert [row[0] for row in block.rows] == ["budget", "averaging", "budget × averaging"]
    ablation = write_planned(tmp_path, BUDGET, Fates(waiting=[0, 1]), rounds=4)
    assert importances_block(*analysis.load_ablation(tmp_path, ablation.ablation_id)).rows == ()  # five are too few
