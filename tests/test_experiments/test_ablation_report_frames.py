"""Ablations as frames: planted numbers over seeds, in pairs, with missing trials, and with shared supernets."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedloom.experiments import analysis
from fedloom.experiments.analysis.ablation import held, is_grid
from fedloom.experiments.analysis.rounds import convergence, megabytes, simulated_hours, steps
from fedloom.experiments.analysis.settings import settings_of
from fedloom.experiments.analysis.tables import Tables
from fedloom.experiments.report.runs import load_chosen
from fedloom.experiments.store.ablations import FRAME_COLUMNS, Ablation
from tools.generated_ablation import Fates, write_planned

BETA = ["ablation=beta_schedule", "experiment=superfednas_digits"]
WHAT = ["ablation=comm_budget", "experiment=fedoras_digits"]
BUDGET = [*WHAT, "ablation.axes.averaging.values=[opa,fedavg,plain]"]


def planned(root: Path, arguments: list[str], fates: Fates | None = None) -> tuple[Ablation, Tables, pd.DataFrame]:
    written = write_planned(root, arguments, fates, rounds=10, candidates=4)
    ablation, tables = analysis.load_ablation(root, written.ablation_id[:-2])
    return ablation, tables, analysis.ablation_frame(tables, ablation)


@pytest.fixture(scope="module")
def beta(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ablation, Tables, pd.DataFrame]:
    return planned(tmp_path_factory.mktemp("beta"), BETA)


def of(rows: pd.DataFrame, **values: Any) -> dict[str, Any]:
    """The one row with these values."""
    for name, value in values.items():
        rows = rows[rows[name] == value]
    (row,) = rows.to_dict("records")
    return {str(k): v for k, v in row.items()}


def test_every_trial_and_subnet_has_a_row_with_its_place_in_the_ablation(beta: Any) -> None:
    ablation, _, frame = beta
    assert len(frame) == 2 * 3 * 2 * 2 * 5
    assert frame["trial"].tolist() == sorted(frame["trial"].tolist())
    assert list(frame.columns[:5]) == ["trial", "seed", "beta_0", "decay", "decay_share"]
    assert frame["decay"].cat.categories.tolist() == ["constant", "linear", "cosine"]
    first = frame.iloc[0]
    assert (first["seed"], first["beta_0"], first["decay"], first["decay_share"]) == (1, 0.9, "constant", 0.5)
    assert first["run_id"] == f"{ablation.ablation_id}-0000"
    # 0.70, - 0.03 (constant) + 0.02 (half of the rounds) times 0.9, - 0.002: what seed 1 does
    assert first["accuracy"] == pytest.approx(0.689)


def test_settings_have_the_values_of_two_seeds_and_no_interval(beta: Any) -> None:
    ablation, _, frame = beta
    rows = analysis.by_setting(frame, "accuracy", list(ablation.axes))
    assert len(rows) == 12 * 5
    assert set(rows["n"]) == {2}
    place = {"beta_0": 0.5, "decay": "linear", "decay_share": 0.8, "subnet": "0-0-0"}
    row = of(rows, **place)
    # Seeds 0.70 - 0.05 * 0.9 - 0.002 = 0.653 and 0.70 - 0.05 * 1.1 + 0.002 = 0.647.
    assert row["mean"] == pytest.approx(0.65)
    assert row["values"] == pytest.approx([0.653, 0.647])
    assert pd.isna(row["half_width"])
    assert of(analysis.by_setting(frame, "macs", list(ablation.axes)), **place)["mean"] == 150_000
    # 10 rounds of 10 clients that receive and send 4000 bytes each
    assert of(analysis.by_setting(frame, "total_bytes", list(ablation.axes)), **place)["mean"] == 800_000
    assert rows["subnet"].tolist()[:5] == ["0-0-0", "1-9-1", "9-9-9", "14-14-14", "83-83-83"]


def test_a_seed_counts_once_over_axes_that_are_not_named(beta: Any) -> None:
    _, _, frame = beta
    row = of(analysis.by_setting(frame, "accuracy", ["decay"]), decay="cosine", subnet="0-0-0")
    # The mean over beta_0 and decay_share of both seeds: 0.70 - 0.02 + 0.01, in parts of 0.9 and 1.1.
    assert row["n"] == 2
    assert row["mean"] == pytest.approx(0.69)
    assert row["values"] == pytest.approx([0.689, 0.691])


def test_one_axis_is_looked_at_with_the_others_at_their_references(beta: Any) -> None:
    ablation, _, frame = beta
    assert analysis.references(ablation) == {"beta_0": 0.9, "decay": "cosine", "decay_share": 0.8}
    assert held(ablation, "decay") == {"beta_0": 0.9, "decay_share": 0.8}
    rows = analysis.marginal(frame, ablation, "decay")
    smallest = rows[rows["subnet"] == "0-0-0"]
    assert smallest["decay"].tolist() == ["constant", "linear", "cosine"]
    assert smallest["mean"].tolist() == pytest.approx([0.67, 0.69, 0.70])
    assert smallest["values"].iloc[2] == pytest.approx([0.698, 0.702])


def test_values_are_compared_with_the_reference_in_pairs(beta: Any) -> None:
    ablation, _, frame = beta
    rows = analysis.against_reference(frame, ablation, "beta_0")
    assert len(rows) == 5
    row = of(rows, subnet="9-9-9")
    assert (row["value"], row["reference"], row["test"], row["n"], row["seeds"]) == (0.5, 0.9, "none", 12, 2)
    # Six pairs of seed 1 and six of seed 2 are two values, however many runs there are.
    assert row["mean"] == pytest.approx(-0.04)
    assert row["values"] == pytest.approx([-0.036, -0.044])
    assert all(pd.isna(row[name]) for name in ("low", "high", "p_value"))
    assert len(analysis.against_reference(frame, ablation, "decay")) == 2 * 5


def test_a_seed_counts_once_in_the_test_and_only_if_it_has_all_pairs(tmp_path: Path) -> None:
    ablation, _, frame = planned(tmp_path, [*BETA, "ablation.seeds=[1,2,3]"])
    row = of(analysis.against_reference(frame, ablation, "beta_0"), subnet="9-9-9")
    # Eighteen pairs are three values: mean -0.04, standard deviation 0.004, 2 degrees of freedom.
    assert (row["n"], row["seeds"], row["test"]) == (18, 3, "paired t")
    assert row["values"] == pytest.approx([-0.036, -0.044, -0.04])
    assert row["high"] - row["mean"] == pytest.approx(4.30265273 * 0.004 / 3**0.5, rel=1e-6)
    assert row["p_value"] == pytest.approx(1 - (300 / 302) ** 0.5, rel=1e-6)  # t = 10 sqrt(3)
    lacking = frame[frame["trial"] != frame["trial"].max()]
    row = of(analysis.against_reference(lacking, ablation, "beta_0"), subnet="9-9-9")
    assert (row["n"], row["seeds"], row["test"]) == (17, 3, "none")
    assert pd.isna(row["p_value"])
    # A pair of each seed, but at another value of the decay.
    decays = {1: "constant", 2: "linear", 3: "cosine"}
    mixed = frame[(frame["decay"] == frame["seed"].map(decays)) & (frame["decay_share"] == 0.8)]
    row = of(analysis.against_reference(mixed, ablation, "beta_0"), subnet="9-9-9")
    assert (row["n"], row["seeds"], row["test"]) == (3, 3, "none")


def test_missing_and_failed_trials_lower_n(tmp_path: Path) -> None:
    fates = Fates(failed=[1], running=[3], waiting=[4, 17])
    ablation, tables, frame = planned(tmp_path, BUDGET, fates)
    assert len(tables.paths) == 16
    assert frame.loc[frame["trial"] == 1, "accuracy"].isna().all()
    assert not frame["trial"].isin([4, 17]).any()
    rows = analysis.by_setting(frame, "accuracy", ["budget", "averaging"])
    place = {"model": "fine_tuned", "tier": "tier1"}
    counts = {(r["budget"], r["averaging"]): r["n"] for r in rows.to_dict("records") if r["model"] == "fine_tuned"}
    assert counts[1.0, "opa"] == counts[1.0, "fedavg"] == counts[1.0, "plain"] == counts[0.25, "plain"] == 1
    assert counts[0.5, "opa"] == counts[0.25, "fedavg"] == 2
    alone = of(rows, budget=1.0, averaging="opa", **place)
    assert alone["mean"] == pytest.approx(0.698)
    assert pd.isna(alone["half_width"])
    # Half a training is no sample of what the method costs.
    costs = analysis.by_setting(frame, "total_bytes", ["budget", "averaging"])
    assert of(costs, budget=1.0, averaging="opa", **place)["n"] == 1
    # Budget 1.0 against 0.5: of six pairs that were planned three lack a run.
    assert of(analysis.against_reference(frame, ablation, "budget"), value=1.0, **place)["n"] == 3


def test_an_axis_without_the_experiments_own_value_refers_to_its_first(tmp_path: Path) -> None:
    changed = [*WHAT, "ablation.axes.budget.values=[0.25,0.8]", "ablation.axes.averaging.values=[opa]"]
    ablation, _, frame = planned(tmp_path, changed)
    assert "budget" not in ablation.reference
    assert analysis.references(ablation) == {"budget": 0.25, "averaging": "opa"}
    rows = analysis.against_reference(frame, ablation, "budget")
    row = of(rows, model="fine_tuned", tier="tier2")
    # 0.09 and 0.11: what the planted -0.10 is in seeds 1 and 2
    assert (row["value"], row["reference"], row["n"]) == (0.8, 0.25, 2)
    assert row["mean"] == pytest.approx(0.10)
    assert row["values"] == pytest.approx([0.09, 0.11])


def test_runs_that_began_with_anothers_supernet_have_its_training(tmp_path: Path) -> None:
    ablation, tables, frame = planned(
        tmp_path,
        ["ablation=search", "experiment=fedoras_digits"],
        Fates(reusing={i: i % 2 for i in range(2, 18)}),
    )
    alone = analysis.load(tmp_path, ablation.trials[4].run_id)
    assert not (alone.rounds["stage"] == "supernet").any()
    assert set(analysis.outcomes(alone)["total_bytes"]) == {50 * 10 * 4000 * 2}, "as if it had trained it"
    of_stages = analysis.first_reached(alone, 0.5).groupby("kind")["megabytes"].min()
    assert of_stages["fine_tuned"] > 10 * 10 * 4000 * 2 / 1e6
    assert (load_chosen(tmp_path, [ablation.trials[4].run_id]).rounds["stage"] == "supernet").sum() == 10
    rounds = tables.rounds[tables.rounds["stage"] == "supernet"]
    assert rounds.groupby("run_id").size().tolist() == [10] * 18
    assert set(frame["total_bytes"]) == {50 * 10 * 4000 * 2}  # 10 rounds of training, 40 of fine-tuning
    curves = analysis.convergence(tables)
    curves = curves[(curves["kind"] == "supernet") & (curves["series"] == "validation")]
    shared = curves[curves["run_id"].isin([ablation.trials[0].run_id, ablation.trials[4].run_id])]
    assert shared["metric"].tolist()[:2] == shared["metric"].tolist()[2:]
    (tmp_path / "rounds").joinpath("experiment=fedoras_digits", f"run_id={ablation.trials[1].run_id}").rename(
        tmp_path / "gone"
    )
    (tmp_path / "evaluations").joinpath("experiment=fedoras_digits", f"run_id={ablation.trials[1].run_id}").rename(
        tmp_path / "gone too"
    )
    _, tables = analysis.load_ablation(tmp_path, ablation.ablation_id)
    assert tables.rounds.loc[tables.rounds["stage"] == "supernet", "run_id"].nunique() == 9


def test_steps_are_clients_and_then_candidates(tmp_path: Path) -> None:
    _, tables, _ = planned(tmp_path, [*BUDGET, "ablation.seeds=[1]"])
    rows = steps(tables)
    first = rows[rows["run_id"] == rows["run_id"].iloc[0]]
    # Validated before rounds 0 and 5, three paths each; then four candidates for each of four tiers.
    assert first.loc[first["phase"] == "supernet", "step"].tolist() == [0, 0, 0, 50, 50, 50]
    assert first.loc[first["phase"] == "search", "step"].tolist() == list(range(101, 117))


def test_a_random_search_holds_nothing_and_has_no_pairs(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "axes:\n  lr: {key: method.train.lr, log_uniform: [0.001, 1.0]}\n"
        "  momentum: {key: method.train.momentum, values: [0.0, 0.9]}\n"
        "search: {kind: random, samples: 4}\nseeds: [1, 2]\n"
    )
    ablation, _, frame = planned(tmp_path, [f"ablation={own}", "experiment=fedoras_digits"])
    assert not is_grid(ablation)
    assert held(ablation, "lr") == {}
    drawn = replace(ablation, reference={**ablation.reference, "lr": 3.0})
    assert analysis.references(drawn)["lr"] == ablation.axes["lr"][0], "a search has not drawn the experiment's own"
    assert set(analysis.marginal(frame, ablation, "lr")["n"]) == {2}
    assert analysis.against_reference(frame, ablation, "lr").empty


def test_before_any_trial_has_begun_the_frames_are_empty(tmp_path: Path) -> None:
    ablation, tables, frame = planned(tmp_path, BUDGET, Fates(waiting=range(18)))
    assert tables.paths == ()
    assert frame.empty
    assert analysis.by_setting(frame, "accuracy", list(ablation.axes)).empty
    assert analysis.against_reference(frame, ablation, "budget").empty


def test_an_axis_called_like_a_column_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("axes:\n  macs: {key: method.train.lr, values: [0.1, 0.2]}\n")
    with pytest.raises(ValueError, match=r"axes\.macs: tables of results have a column 'macs': give it another"):
        planned(tmp_path, [f"ablation={own}", "experiment=fedoras_digits"])
    ablation, tables, frame = planned(tmp_path, BUDGET, Fates(waiting=range(18)))
    of_runs = analysis.ablation_frame(tables, ablation, each="run")
    frames = [frame, of_runs, analysis.by_setting(frame, "loss", ["budget"])]
    frames += [rounds(tables) for rounds in (convergence, simulated_hours, megabytes, steps)]  # figures add the axes
    own = {str(column) for each in frames for column in each} - {*ablation.axes}
    assert own | {"group", "shown"} == FRAME_COLUMNS
    planned_earlier = replace(ablation, axes={"macs": (1,)})
    with pytest.raises(ValueError, match="the axis 'macs' has the name of a column of the frame"):
        analysis.ablation_frame(tables, planned_earlier)


def test_lists_and_nulls_are_text(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("seeds: [1]\naxes:\n  shares: {key: tiers.shares, values: [null, [0.4, 0.3, 0.2, 0.1]]}\n")
    ablation, _, frame = planned(tmp_path, [f"ablation={own}", "experiment=fedoras_digits"])
    assert frame["shares"].cat.categories.tolist() == ["null", "[0.4,0.3,0.2,0.1]"]
    assert analysis.references(ablation) == {"shares": "null"}
    assert len(analysis.marginal(frame, ablation, "shares")) == 2 * 3 * 4


def test_the_points_of_an_ablation_are_the_settings_of_its_runs(beta: Any) -> None:
    ablation, tables, frame = beta
    points = frame.groupby(list(ablation.axes), observed=True)["run_id"].agg(lambda ids: frozenset(ids))
    settings = settings_of(tables)
    assert {frozenset(s.run_ids) for s in settings} == set(points)
    assert {s.num_seeds for s in settings} == {2}
