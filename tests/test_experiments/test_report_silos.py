"""Cross-silo runs in reports: settings, silos, personalisation gains, phases, and the drawings of cells."""

import copy
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console

from fedloom.experiments.analysis.settings import settings_of
from fedloom.experiments.analysis.silo_curves import Phases, curves, phases
from fedloom.experiments.analysis.silo_gains import as_square, p_matrix, personalisation_gains
from fedloom.experiments.analysis.silo_summaries import silo_summaries
from fedloom.experiments.analysis.silos import in_short, is_decided, latest_architectures, per_silo
from fedloom.experiments.analysis.tables import load
from fedloom.experiments.report.figures import cells
from fedloom.experiments.report.figures.cells import Cell, CellEdge, cell_edges, darts_space_of, dot_source, parse
from fedloom.experiments.report.figures.gains import gains_figure
from fedloom.experiments.report.figures.silos import curves_figure, silo_accuracy_figure, spans_of
from fedloom.experiments.report.figures.style import png
from fedloom.experiments.report.pages.runs import summary_table, write_report
from fedloom.experiments.report.pages.silo_gaps import missing_of_silos
from fedloom.experiments.report.pages.values import report_json
from fedloom.platform.methods.silo.perturbation import is_settled
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.spaces.slices import subspace_id

UNDECIDED, HALF, DECIDED = "/".join(["0,1"] * 10), "/".join(["0"] * 5 + ["0,1"] * 5), "/".join("0110." + "11001")
DECIDED = DECIDED.replace(".", "")
CONFIG: dict[str, Any] = {
    "experiment": "spider_tiny",
    "seed": 1,
    "dry_run": False,
    "data": {"dataset": "digits", "num_clients": 3},
    "executor": {"kind": "serial"},
    "tiers": {"count": 1, "upper_bounds": None, "cost": "macs"},
    "space": {"name": "darts_s2_small", "channels": 4},
    "method": {
        "name": "spider",
        "search": {"kind": "perturbation", "start": 1, "every": 1},
        "train": {"rounds": 4, "lr": 0.1},
    },
}
SUBSPACES = (UNDECIDED, HALF, DECIDED, DECIDED)
"""After each round of a tiny run."""


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncing guards against power failures only, and is slow on a busy disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def config(**changes: Any) -> dict[str, Any]:
    """CONFIG with values changed by dotted keys, their dots written as two underscores."""
    changed = copy.deepcopy(CONFIG)
    for key, value in changes.items():
        *path, last = key.split("__")
        place = changed
        for part in path:
            place = place[part]
        place[last] = value
    return changed


def begin(root: Path, run_id: str, experiment: str, status: str = "done", **changes: Any) -> RunWriter:
    writer = RunWriter.create(root, experiment, run_id)
    settings = config(**changes)
    tiers = json.dumps([{"tier": "tier1", "upper": 100.0, "clients": 3}])
    writer.update_run(config=json.dumps(settings), status=status, method=settings["method"]["name"], tiers=tiers)
    return writer


def add_training(
    writer: RunWriter, subspaces: Sequence[Sequence[str]], *, stage: str = "spider", validated: bool = True
) -> None:
    """Rounds of three silos; `subspaces` per round and silo, a loss of 2 / (round + 1) plus the silo's number."""
    for i, of_silos in enumerate(subspaces):
        work = {"clients_planned": 3, "bytes_down": 30, "bytes_up": 60, "macs": 9, "simulated_s": 1.0}
        writer.add("rounds", stage=stage, round=i, wall_s=1.5, loss=1.0, metric=0.5, **work)
        for silo, subspace in enumerate(of_silos):
            measured = {"loss": 2.0 / (i + 1) + silo, "metric": 0.5, "peak_memory_bytes": 1000 * (silo + 1) + i}
            place = {"stage": stage, "round": i, "client_id": silo}
            writer.add("clients", **place, subspace=subspace, status="ok", parameters=70, **measured)
            if validated:
                row = {**place, "model": "personal", "split": "validation", "samples": 5}
                writer.add("evaluations", **row, metric="accuracy", value=0.1 * i + 0.1 * silo)
                writer.add("evaluations", **row, metric="loss", value=1.0)


def add_model(
    writer: RunWriter, model: str, accuracies: Sequence[float], architectures: Sequence[str], samples: int = 10
) -> None:
    """The final evaluation of a model on every silo: parameters are 100, 200, ..., MACs ten times that."""
    for silo, (accuracy, architecture) in enumerate(zip(accuracies, architectures, strict=True)):
        place = {"stage": "evaluation", "round": 0, "model": model, "tier": "tier1", "client_id": silo}
        for metric, value in (("accuracy", accuracy), ("loss", 1 - accuracy)):
            row = {"split": "test", "metric": metric, "value": value, "samples": samples}
            writer.add("evaluations", **place, architecture=architecture, **row)
        for metric, cost in (("parameters", 100 * (silo + 1)), ("macs", 1000 * (silo + 1))):
            writer.add("evaluations", **place, architecture=architecture, metric=metric, value=cost)


def add_gains(writer: RunWriter, matrix: Mapping[tuple[int, int], float]) -> None:
    """p_ij by (i, j)."""
    writer.add("rounds", stage="gains", round=0, wall_s=100.0, clients_planned=3, bytes_down=999, bytes_up=999)
    for (i, j), accuracy in matrix.items():
        writer.add("clients", stage="gains", round=0, client_id=i, status="ok", loss=77.0, peak_memory_bytes=10**9)
        row = {"stage": "gains", "round": 0, "client_id": i, "split": "test", "samples": 10}
        writer.add("evaluations", **row, model=f"silo-{j}", metric="accuracy", value=accuracy)
        writer.add("evaluations", **row, model=f"silo-{j}", metric="loss", value=9.0)


OTHER = DECIDED[::-1]
MATRIX = {
    (0, 0): 0.9, (0, 1): 0.7, (0, 2): 0.8,
    (1, 0): 0.5, (1, 1): 0.8, (1, 2): 0.6,
    (2, 0): 0.6, (2, 1): 0.7, (2, 2): 0.6,
}  # fmt: skip


def write_spider(root: Path, run_id: str, better: float = 0.0, *, gains: bool = True, **changes: Any) -> None:
    writer = begin(root, run_id, "spider_tiny", **changes)
    add_training(writer, [(s,) * 3 for s in SUBSPACES])
    add_model(writer, "personal", [0.5 + better, 0.7 + better, 0.9 + better], [DECIDED, OTHER, DECIDED])
    add_model(writer, "global", [0.4, 0.5, 0.6], [UNDECIDED] * 3)
    if gains:
        add_gains(writer, MATRIX)
    writer.close()


def write_fixed(root: Path, run_id: str, method: str = "knn_per", model: str = "personal") -> None:
    """A method with a network of one architecture and no search."""
    changes = {"method": {"name": method, "train": {"rounds": 2}}, "space__name": "resnet18"}
    writer = begin(root, run_id, method, **changes)
    add_training(writer, [("0",) * 3] * 2, stage="fedavg", validated=False)
    add_model(writer, model, [0.3, 0.4, 0.5], ["0"] * 3)
    if method == "knn_per":
        row = {"stage": "evaluation", "round": 0, "model": model, "client_id": 1}
        writer.add("evaluations", **row, metric="neighbour_share", value=0.4)
    writer.close()


def shown(renderable: object, width: int = 150) -> str:
    console = Console(width=width, file=StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


def values_of(root: Path, *run_ids: str) -> dict[str, Any]:
    (summary,) = silo_summaries(load(root, list(run_ids)))
    return {name: None if v is None else v.mean for name, v in summary.values.items()}


def test_a_run_has_mean_spread_worst_and_costs_of_its_silos(tmp_path: Path) -> None:
    write_spider(tmp_path, "r1")
    assert values_of(tmp_path, "r1") == {
        "accuracy": pytest.approx(0.7),
        "std": pytest.approx(0.2 * (2 / 3) ** 0.5),
        "worst": pytest.approx(0.5),
        "global_accuracy": pytest.approx(0.5),
        "gain": pytest.approx((0.15 + 0.25 - 0.05) / 3),
        "parameters": 200.0,
        "macs": 2000.0,
        "peak_memory_bytes": 3003.0,  # silo 2 in the last round of training; what measures gains does not count
        "bytes_per_round": 30.0,  # 4 rounds of 90 bytes for 3 silos
        "wall_s": 6.0,
        "architectures": 2.0,
    }


def test_seeds_are_one_setting_with_intervals_and_methods_are_rows_of_one_table(tmp_path: Path) -> None:
    write_spider(tmp_path, "r1", gains=False)
    write_spider(tmp_path, "r2", 0.1, gains=False, seed=2)
    write_spider(tmp_path, "r3", gains=False, method__train__lr=0.5)
    write_fixed(tmp_path, "r4")
    write_fixed(tmp_path, "r5", "fednas", model="global")
    runs = ["r1", "r2", "r3", "r4", "r5"]
    found = silo_summaries(load(tmp_path, runs))
    assert [(s.setting.name, s.method, s.model) for s in found] == [
        ("spider_tiny, lr=0.1", "spider", "personal"),
        ("spider_tiny, lr=0.5", "spider", "personal"),
        ("knn_per", "knn_per", "personal"),
        ("fednas", "fednas", "global"),
    ]
    accuracy = found[0].values["accuracy"]
    assert accuracy is not None
    # t(0.975; 1 degree of freedom) = 12.7062; standard deviation 0.1 / sqrt(2), over two runs.
    assert (accuracy.mean, accuracy.half_width) == (pytest.approx(0.75), pytest.approx(12.7062 * 0.05, rel=1e-4))
    assert found[3].values["global_accuracy"] is None
    text = shown(summary_table(tmp_path, runs))
    line = next(t for t in text.splitlines() if t.startswith("knn_per"))
    assert line.split() == ["knn_per", "40.0", "8.2", "30.0", "–", "1"]
    costs = [t for t in text.splitlines() if t.startswith("knn_per")][1]
    assert costs.split() == ["knn_per", "200", "2.00", "k", "3.00", "kB", "30", "B", "3", "s"]
    assert "(fednas: the shared one)" in " ".join(text.split())
    assert "gain" not in text


def test_a_repeated_seed_is_one_sample_with_its_mean(tmp_path: Path) -> None:
    for run_id, better, seed in (("r1", 0.0, 1), ("r2", 0.1, 1), ("r3", 0.25, 2)):
        write_spider(tmp_path, run_id, better - 0.1, gains=False, seed=seed)
    (found,) = silo_summaries(load(tmp_path, ["r1", "r2", "r3"]))
    accuracy = found.values["accuracy"]
    assert accuracy is not None
    # Of seeds 1 and 2: 0.65 and 0.85.
    assert (accuracy.mean, accuracy.runs) == (pytest.approx(0.75), 2)
    assert accuracy.half_width == pytest.approx(12.7062 * 0.1, rel=1e-4)
    text = " ".join(shown(summary_table(tmp_path, ["r1", "r2", "r3"])).split())
    assert "over 2 seeds of a setting; a repeated seed counts once, with its mean." in text
    text = " ".join(shown(summary_table(tmp_path, ["r1", "r2"])).split())
    assert "Mean over the runs of one seed, which give no interval." in text
    assert "±" not in text


def test_several_data_sets_have_a_column_that_tells_them_apart(tmp_path: Path) -> None:
    write_spider(tmp_path, "r1", gains=False)
    assert "digits" not in shown(summary_table(tmp_path, "r1"))
    write_spider(tmp_path, "r2", gains=False, data__dataset="cifar10")
    text = shown(summary_table(tmp_path, ["r1", "r2"]))
    assert "digits" in text
    assert "cifar10" in text


def test_a_silo_without_test_samples_is_left_out_and_the_rest_counts(tmp_path: Path) -> None:
    writer = begin(tmp_path, "r1", "spider_tiny")
    add_training(writer, [(DECIDED,) * 3])
    add_model(writer, "personal", [0.2, 0.4], [DECIDED, OTHER])
    place = {"stage": "evaluation", "round": 0, "model": "personal", "client_id": 2, "architecture": DECIDED}
    writer.add("evaluations", **place, split="test", metric="accuracy", value=0.0, samples=0)
    writer.close()
    rows = per_silo(load(tmp_path))
    assert rows["client_id"].tolist() == [0, 1, 2]
    assert rows["samples"].tolist() == [10, 10, 0]
    assert rows["accuracy"].isna().tolist() == [False, False, True]
    values = values_of(tmp_path, "r1")
    assert (values["accuracy"], values["worst"]) == (pytest.approx(0.3), 0.2)
    assert "1 clients have no test samples" in shown(summary_table(tmp_path, "r1"))


def test_rows_of_silos_hold_what_the_method_measures(tmp_path: Path) -> None:
    write_fixed(tmp_path, "r1")
    rows = per_silo(load(tmp_path))
    assert rows[["client_id", "model", "architecture"]].values.tolist() == [[i, "personal", "0"] for i in range(3)]
    assert rows["neighbour_share"].fillna(-1).tolist() == [-1, 0.4, -1]
    assert rows["global_accuracy"].isna().all()
    assert rows["parameters"].tolist() == [100, 200, 300]


# -- personalisation gains ---------------------------------------------------------------------------------------------


def matrix(values: Mapping[tuple[int, int], float]) -> pd.DataFrame:
    rows = [("e", "r", i, j, p) for (i, j), p in values.items()]
    frame = pd.DataFrame(rows, columns=["experiment", "run_id", "client_id", "silo", "accuracy"])
    return frame.astype({"client_id": "Int64", "silo": "Int64"})


def gains_of(values: Mapping[tuple[int, int], float]) -> dict[int, float]:
    frame = personalisation_gains(matrix(values))
    return dict(zip(frame["client_id"], frame["gain"], strict=True))


def test_gains_of_two_silos_by_hand() -> None:
    found = gains_of({(0, 0): 0.9, (0, 1): 0.6, (1, 0): 0.75, (1, 1): 0.5})
    assert found == {0: pytest.approx(0.3), 1: pytest.approx(-0.25)}


def test_gains_of_three_silos_by_hand() -> None:
    found = gains_of(MATRIX)
    # ((0.9 - 0.7) + (0.9 - 0.8)) / 2, ((0.8 - 0.5) + (0.8 - 0.6)) / 2, ((0.6 - 0.6) + (0.6 - 0.7)) / 2
    assert found == {0: pytest.approx(0.15), 1: pytest.approx(0.25), 2: pytest.approx(-0.05)}


def test_missing_entries_leave_gains_over_the_rest_or_none() -> None:
    frame = personalisation_gains(matrix({(0, 0): 0.9, (0, 2): 0.5, (1, 0): 0.5, (2, 2): 0.7})).set_index("client_id")
    assert frame.loc[0, "gain"] == pytest.approx(0.4)
    assert frame["compared"].to_dict() == {0: 1, 1: 1, 2: 0}
    assert np.isnan(frame.loc[1, "gain"])  # its own architecture was not measured
    assert np.isnan(frame.loc[2, "gain"])  # nobody else's was


def test_gains_agree_with_equation_6_read_word_by_word() -> None:
    rng = np.random.default_rng(3)
    p = rng.random((5, 5))
    found = gains_of({(i, j): p[i, j] for i in range(5) for j in range(5)})
    for i in range(5):
        assert found[i] == pytest.approx(sum(p[i, i] - p[i, j] for j in range(5) if j != i) / 4)


def test_the_matrix_is_read_from_the_stage_of_gains_alone(tmp_path: Path) -> None:
    write_spider(tmp_path, "r1")
    frame = p_matrix(load(tmp_path))
    assert dict(zip(zip(frame["client_id"], frame["silo"], strict=True), frame["accuracy"], strict=True)) == MATRIX
    assert as_square(frame).values.tolist() == [[0.9, 0.7, 0.8], [0.5, 0.8, 0.6], [0.6, 0.7, 0.6]]


def test_a_part_of_the_matrix_is_square_with_gaps(tmp_path: Path) -> None:
    writer = begin(tmp_path, "r1", "spider_tiny")
    add_training(writer, [(DECIDED,) * 3])
    add_gains(writer, {(1, 1): 0.5, (1, 7): 0.25})
    writer.close()
    square = as_square(p_matrix(load(tmp_path)))
    assert square.index.tolist() == square.columns.tolist() == [1, 7]
    assert square.loc[1].tolist() == [0.5, 0.25]
    assert square.loc[7].isna().all()
    assert {p.stem for p in write_report(tmp_path).plots} >= {"gains"}


# -- curves and phases -------------------------------------------------------------------------------------------------


def test_curves_are_means_over_silos_with_rounds_counted_over_all_stages(tmp_path: Path) -> None:
    writer = begin(tmp_path, "r1", "spider_tiny")
    add_training(writer, [(UNDECIDED,) * 3] * 2, stage="first")
    add_training(writer, [(DECIDED,) * 3], stage="second")
    add_gains(writer, {(0, 0): 0.5})
    writer.close()
    frame = curves(load(tmp_path))
    train, validation = (frame[frame["series"] == s] for s in ("train", "validation"))
    assert train[["rounds_done", "mean_loss"]].values.tolist() == [[1, 3.0], [2, 2.0], [3, 3.0]]
    assert validation["rounds_done"].tolist() == [1, 2, 3]
    assert validation["mean"].tolist() == pytest.approx([0.1, 0.2, 0.1])
    assert validation["std"].tolist() == pytest.approx([0.1 * (2 / 3) ** 0.5] * 3)
    assert validation["silos"].tolist() == [3, 3, 3]


def test_what_silos_score_after_the_last_round_ends_their_curves_and_is_no_round(tmp_path: Path) -> None:
    for run_id, scored in (("r1", False), ("r2", True)):
        writer = begin(tmp_path, run_id, "spider_tiny")
        for stage in ("first", "second"):
            add_training(writer, [(UNDECIDED,) * 3] * 2, stage=stage)
            if scored:
                writer.add("rounds", stage=stage, round=2, clients_planned=0, bytes_down=0, bytes_up=0, wall_s=9.0)
                for silo in range(3):
                    row = {"model": "personal", "split": "validation", "metric": "accuracy", "samples": 5}
                    writer.add("evaluations", stage=stage, round=2, client_id=silo, value=0.8, **row)
        writer.close()
    assert values_of(tmp_path, "r2") == values_of(tmp_path, "r1")
    frame = curves(load(tmp_path, ["r2"]))
    validation = frame[frame["series"] == "validation"]
    assert validation["rounds_done"].tolist() == [1, 2, 3, 4]
    assert validation["mean"].tolist() == pytest.approx([0.1, 0.8, 0.1, 0.8])
    assert validation["silos"].tolist() == [3] * 4
    assert frame.loc[frame["series"] == "train", "rounds_done"].tolist() == [1, 2, 3, 4]


def test_phases_begin_with_the_search_and_end_with_the_last_decision(tmp_path: Path) -> None:
    writer = begin(tmp_path, "r1", "spider_tiny")
    late = (UNDECIDED, HALF, HALF, DECIDED)
    add_training(writer, list(zip(SUBSPACES, SUBSPACES, late, strict=True)))
    writer.close()
    (found,) = phases(load(tmp_path))
    # Round 2, the third, began with the first silos' last decision, round 3 with the last silo's.
    assert found == Phases("r1", search_start=1, first_decided=2, last_decided=3, rounds=4)
    assert spans_of(found) == ((0, 1), (1, 3), (3, 4))


def test_what_a_late_silo_decided_is_not_kept_and_does_not_count(tmp_path: Path) -> None:
    writer = begin(tmp_path, "r1", "spider_tiny")
    add_training(writer, [(UNDECIDED,) * 2, (DECIDED,) * 2])
    for round_, (status, subspace) in enumerate([("timed_out", DECIDED), ("ok", UNDECIDED), ("timed_out", DECIDED)]):
        place = {"stage": "spider", "round": round_, "client_id": 2}
        writer.add("clients", **place, subspace=subspace, status=status, loss=1.0)
    writer.close()
    tables = load(tmp_path)
    (found,) = phases(tables)
    assert (found.first_decided, found.last_decided) == (1, None)
    assert latest_architectures(tables)["architecture"].tolist() == [DECIDED, DECIDED, UNDECIDED]


def test_rounds_of_decisions_are_counted_over_all_training_stages(tmp_path: Path) -> None:
    writer = begin(tmp_path, "r1", "spider_tiny")
    add_training(writer, [(UNDECIDED,) * 3] * 2, stage="first")
    add_training(writer, [(UNDECIDED,) * 3, (DECIDED,) * 3], stage="second")
    writer.close()
    (found,) = phases(load(tmp_path))
    assert (found.last_decided, found.rounds) == (3, 4)


def test_a_pruned_edge_is_decided_and_a_running_search_has_no_end(tmp_path: Path) -> None:
    pruned = "/".join(["0", "", "1"] + ["0"] * 7)
    for run_id, last in (("r1", pruned), ("r2", HALF)):
        writer = begin(tmp_path, run_id, "spider_tiny")
        add_training(writer, [(UNDECIDED,) * 3, (pruned, pruned, last)])
        writer.close()
    first, second = phases(load(tmp_path, ["r1", "r2"]))
    assert (first.first_decided, first.last_decided) == (1, 1)
    assert (second.first_decided, second.last_decided) == (1, None)
    assert spans_of(second) == ((0, 1), (1, 2), (2, 2))


def test_where_edges_are_pruned_the_search_goes_on_until_every_node_has_two(tmp_path: Path) -> None:
    thin = "/".join(["0", "0", "0", "", "0"] * 2)
    for run_id, prune_edges in (("r1", True), ("r2", False)):
        writer = begin(tmp_path, run_id, "spider_tiny", method__search__prune_edges=prune_edges)
        add_training(writer, [(s,) * 3 for s in (UNDECIDED, DECIDED, thin)])
        writer.close()
    assert [p.last_decided for p in phases(load(tmp_path, ["r1", "r2"]))] == [2, 1]


def test_pruned_texts_are_told_apart_as_the_search_itself_does() -> None:
    space = darts_space_of(CONFIG)
    assert space is not None
    rng = np.random.default_rng(5)
    told = set()
    for _ in range(200):
        kept = tuple(((), (0,), (1,), (0, 1))[i] for i in rng.choice(4, 10, p=[0.4, 0.3, 0.25, 0.05]))
        for prune_edges in (False, True):
            settled = is_settled(space, kept, prune_edges=prune_edges)
            assert is_decided(subspace_id(kept), prune_edges=prune_edges) == settled
            told.add((prune_edges, settled))
    assert len(told) == 4


def test_milenas_searches_from_the_first_round_for_as_long_as_configured(tmp_path: Path) -> None:
    for run_id, rounds in (("r1", 3), ("r2", 9)):
        writer = begin(tmp_path, run_id, "spider_tiny", method__search={"kind": "milenas", "rounds": rounds})
        add_training(writer, [(s,) * 3 for s in (UNDECIDED, UNDECIDED, UNDECIDED, DECIDED)])
        writer.close()
    assert phases(load(tmp_path, ["r1"])) == [Phases("r1", 0, 3, 3, 4)]
    (running,) = phases(load(tmp_path, ["r2"]))
    assert (running.search_start, running.last_decided) == (0, None)


def test_methods_without_a_search_have_no_phases(tmp_path: Path) -> None:
    write_fixed(tmp_path, "r1")
    assert phases(load(tmp_path)) == []


def texts_of(figure: Figure | None) -> set[str]:
    assert figure is not None
    return {child.get_text() for axes in figure.axes for child in axes.texts}


def test_phases_are_named_where_they_agree_and_bars_where_they_do_not(tmp_path: Path) -> None:
    write_spider(tmp_path, "r1", gains=False)
    write_spider(tmp_path, "r2", gains=False, method__train__lr=0.5)
    write_spider(tmp_path, "r3", gains=False, method__search__start=0)
    for runs, named, lines in ((["r1", "r2"], True, 2), (["r1", "r3"], False, 4)):
        tables = load(tmp_path, runs)
        figure = curves_figure(curves(tables), phases(tables), settings_of(tables))
        assert bool(texts_of(figure)) == named, runs
        assert figure is not None
        assert [len(axes.lines) for axes in figure.axes] == [lines, lines]  # a curve, and a bar, per setting


def test_figures_draw_the_silos_of_a_repeated_seed_once_and_the_phases_of_all_seeds(tmp_path: Path) -> None:
    for run_id, better, seed in (("r1", 0.0, 1), ("r2", 0.1, 1), ("r3", 0.0, 2)):
        write_spider(tmp_path, run_id, better, gains=False, seed=seed)
    writer = begin(tmp_path, "r4", "spider_tiny", seed=3)
    add_training(writer, [(s,) * 3 for s in (UNDECIDED, HALF, HALF, DECIDED)])
    writer.close()
    tables = load(tmp_path, ["r1", "r2", "r3", "r4"])
    figure = silo_accuracy_figure(per_silo(tables), settings_of(tables))
    assert figure is not None
    dots = figure.axes[0].collections[0].get_offsets()
    # Seeds 1 (its runs have 50 and 60, 70 and 80, 90 and 100 %) and 2.
    assert sorted(np.asarray(dots)[:, 0]) == pytest.approx([50, 55, 70, 75, 90, 95])
    figure = curves_figure(curves(tables), phases(tables), settings_of(tables))
    assert figure is not None
    # The search ends after 2, 2 and 3 rounds.
    ends = [patch.get_extents().x1 for patch in figure.axes[0].patches]
    inside = figure.axes[0].transData.inverted().transform([(end, 0) for end in ends])[:, 0]
    assert inside == pytest.approx([1, 7 / 3, 4])
    assert "(3 seeds, 4 runs)" in figure.legends[0].get_texts()[0].get_text()


def test_the_heat_map_shows_points_and_gains_and_leaves_gaps_empty(tmp_path: Path) -> None:
    figure = gains_figure(matrix({(0, 0): 0.9, (0, 1): 0.6, (1, 1): 0.5}))
    assert figure is not None
    left, right = ([t.get_text() for t in axes.texts] for axes in figure.axes)
    assert left == ["90.0", "60.0", "50.0"]
    assert right == ["+30.0", "+30.0"]
    assert gains_figure(matrix({})) is None


# -- cells -------------------------------------------------------------------------------------------------------------


def test_cells_hold_the_kept_operators_of_their_type() -> None:
    space = darts_space_of(CONFIG)
    assert space is not None
    kept = parse(space, "0//1/0,1/1/0/0/0/0/")
    assert kept == ((0,), (), (1,), (0, 1), (1,), (0,), (0,), (0,), (0,), ())
    assert cell_edges(space, kept, "normal") == (
        CellEdge(0, 2, ("skip_connect",)),
        CellEdge(0, 3, ("sep_conv_3x3",)),
        CellEdge(1, 3, ("skip_connect", "sep_conv_3x3")),
        CellEdge(2, 3, ("sep_conv_3x3",)),
    )
    assert len(cell_edges(space, kept, "reduction")) == 4
    assert parse(space, "0-1-0-1-0-1-0-1-0-1") == tuple((i % 2,) for i in range(10))


@pytest.mark.parametrize("text", ["0", "0/1", "x/" * 10, "/".join(["7"] * 10), "1,0/" * 9 + "0"])
def test_texts_of_other_spaces_are_no_cells(text: str) -> None:
    space = darts_space_of(CONFIG)
    assert space is not None
    assert parse(space, text) is None


@pytest.mark.parametrize("space", [{"name": "resnet18"}, {"name": "nobody_knows"}, {"name": "darts_s2", "future": 1}])
def test_other_spaces_have_no_cells(space: dict[str, Any]) -> None:
    assert darts_space_of({"space": space}) is None


def test_graphviz_is_told_every_edge_with_its_operator() -> None:
    source = dot_source(Cell("silo 0", 2, (CellEdge(0, 2, ("skip_connect",)), CellEdge(2, 3, ("sep_conv_3x3", "new")))))
    drawn = [line for line in source.splitlines() if "->" in line and "invis" not in line]
    assert [line.split(" [")[0] for line in drawn] == ["n0 -> n2", "n2 -> n3", "n2 -> n3", "n2 -> n4", "n3 -> n4"]
    assert ['label="skip"' in drawn[0], 'label="sep3"' in drawn[1], 'label="new"' in drawn[2]] == [True] * 3
    assert 'label="c_k-2"' in source
    assert "dashed" not in next(line for line in source.splitlines() if line.startswith("n3 ["))
    pruned = dot_source(Cell("silo 0", 2, (CellEdge(0, 2, ("skip_connect",)),)))
    assert "dashed" in next(line for line in pruned.splitlines() if line.startswith("n3 ["))
    assert "rankdir=LR" in source


def without_dot(_name: str) -> None:
    return None


def colours(image: bytes) -> int:
    with Image.open(BytesIO(image)) as picture:
        return len(picture.convert("RGB").getcolors(picture.width * picture.height))


def some_cells(count: int) -> list[Cell]:
    edges = tuple(CellEdge(s, n, ("skip_connect", "sep_conv_3x3")) for n in range(2, 6) for s in range(n))
    return [Cell(f"silo {i}", 4, edges) for i in range(count)]


def test_matplotlib_draws_cells_without_graphviz(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells.shutil, "which", without_dot)
    assert colours(png(cells.cells_figure(some_cells(1)))) > 50


def test_a_dot_that_fails_leaves_the_drawing_to_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cells.shutil, "which", without_dot)
    expected = png(cells.cells_figure(some_cells(1)))
    monkeypatch.undo()
    broken = tmp_path / "dot"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("dot") == str(broken)
    assert png(cells.cells_figure(some_cells(1))) == expected


def test_a_dot_that_draws_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    red = tmp_path / "red.png"
    Image.new("RGB", (40, 30), (250, 10, 20)).save(red)
    (tmp_path / "dot").write_text(f"#!/bin/sh\n/bin/cat > /dev/null\n/bin/cat {red}\n")
    (tmp_path / "dot").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with Image.open(BytesIO(png(cells.cells_figure(some_cells(1))))) as picture:
        assert (250, 10, 20) in set(picture.convert("RGB").getdata())


def test_silos_with_the_same_cell_share_a_drawing(tmp_path: Path) -> None:
    write_spider(tmp_path, "r1")
    found = {name: (len(figure.axes), left) for name, figure, left in cells.cell_pictures(load(tmp_path))}
    assert found == {"reduction": (2, 0), "normal": (2, 0)}
    first = next(iter(cells.cell_pictures(load(tmp_path))))[1]
    assert [a.get_title(loc="left") for a in first.axes] == ["silos 0, 2", "silo 1"]


def test_a_running_search_shows_its_latest_architectures(tmp_path: Path) -> None:
    writer = begin(tmp_path, "r1", "spider_tiny", status="running")
    add_training(writer, [(UNDECIDED,) * 3, (HALF, DECIDED, HALF)])
    writer.close()
    assert latest_architectures(load(tmp_path))["architecture"].tolist() == [HALF, DECIDED, HALF]


def test_architectures_in_little_room() -> None:
    assert in_short("0/1//0,1/1/0") == "01. {01}10"


# -- the report --------------------------------------------------------------------------------------------------------


def test_the_report_of_a_run_has_all_tables_and_figures_and_no_tiers(tmp_path: Path) -> None:
    write_spider(tmp_path, "r1")
    files = write_report(tmp_path)
    names = [p.stem for p in files.plots]
    assert names == ["silos", "phases", "gains", "reduction-cells", "normal-cells", "communication"]
    for plot in files.plots:
        assert colours(plot.read_bytes()) > 50, plot
    page = files.markdown.read_text()
    for title in ("## Silos\n", "## Silos of run r1", "## Personalisation gains of run r1"):
        assert title in page
    for nonsense in ("Tiers", "tier1", "rand-init", "Pareto", "central search", "Fairness", "pper bound"):
        assert nonsense not in page
    assert files.missing == ()
    assert "| 1 | 80.0 | 55.0 | 60.0 | 2 | +25.0 |" in page
    assert "| mean |" in page
    assert "| 0 | 01101 1001" not in page
    assert f"| 0 | {in_short(DECIDED)} | 10 | 50.0 | 0.5 | 40.0 | 100 | 1.00 k |" in page


def test_the_method_in_total_is_without_what_only_measures(tmp_path: Path) -> None:
    write_spider(tmp_path, "r1")
    kinds = {row["kind"]: row for row in report_json(tmp_path)["communication_by_kind"]}
    assert (kinds["method"]["bytes_down"], kinds["gains"]["bytes_down"]) == (120, 999)


def test_json_holds_settings_silos_matrix_gains_and_phases(tmp_path: Path) -> None:
    write_spider(tmp_path, "r1")
    values = json.loads(json.dumps(report_json(tmp_path), allow_nan=False))
    (row,) = values["silos"]
    assert (row["method"], row["run_ids"], row["accuracy"]["runs"]) == ("spider", ["r1"], 1)
    assert row["accuracy"]["mean"] == pytest.approx(0.7)
    assert len(values["silo_clients"]) == 3
    assert len(values["personalisation"]["matrix"]) == 9
    assert [g["gain"] for g in values["personalisation"]["gains"]] == pytest.approx([0.15, 0.25, -0.05])
    assert values["phases"][0] == {
        "run_id": "r1", "search_start": 1, "first_decided": 2, "last_decided": 2, "rounds": 4,
    }  # fmt: skip
    assert values["fairness"] == values["per_tier"] == values["summary"] == []


def test_a_run_in_training_says_that_nothing_was_measured_yet(tmp_path: Path) -> None:
    writer = begin(tmp_path, "r1", "spider_tiny", status="running")
    add_training(writer, [(UNDECIDED,) * 3, (HALF,) * 3])
    writer.close()
    files = write_report(tmp_path)
    assert {p.stem for p in files.plots} == {"phases", "reduction-cells", "normal-cells", "communication"}
    said = " ".join(files.missing)
    assert "no accuracy of silos" in said
    assert "undecided" not in said
    assert "search has ended" not in said


def test_gains_that_were_asked_for_and_are_not_there_are_said(tmp_path: Path) -> None:
    asked = {"name": "spider", "gains": {"epochs": 3}, "train": {"rounds": 1}}
    for run_id, status in (("r1", "running"), ("r2", "done")):
        write_spider(tmp_path, run_id, gains=False, status=status, method=asked)
    assert "personalisation gains were not measured yet." in shown(summary_table(tmp_path, "r1")).replace("P", "p")
    assert "ersonalisation gains were not measured." in shown(summary_table(tmp_path, "r2"))


def test_a_search_that_ended_too_early_is_said(tmp_path: Path) -> None:
    writer = begin(tmp_path, "r1", "spider_tiny")
    add_training(writer, [(UNDECIDED,) * 3])
    add_model(writer, "personal", [0.5] * 3, [DECIDED, HALF, HALF])
    writer.close()
    assert "edges left to be searched in silos 1, 2" in shown(summary_table(tmp_path, "r1"))


# -- what is missing ---------------------------------------------------------------------------------------------------


def said_of(root: Path, run_id: str = "r1") -> str:
    tables = load(root, [run_id])
    status = str(tables.runs["status"].iloc[0])
    return " | ".join(missing_of_silos(tables, run_id, status))


def test_silos_that_failed_in_the_evaluation_are_named_and_those_without_test_samples_not(tmp_path: Path) -> None:
    writer = begin(tmp_path, "r1", "spider_tiny", data__num_clients=4)
    add_training(writer, [(DECIDED,) * 4])
    add_model(writer, "personal", [0.2], [DECIDED])
    place = {"stage": "evaluation", "round": 0, "model": "personal", "client_id": 2, "architecture": DECIDED}
    writer.add("evaluations", **place, split="test", metric="accuracy", value=0.0, samples=0)
    for silo in (1, 3):
        writer.add("clients", stage="evaluation", round=0, client_id=silo, status="failed", error="out of memory")
    writer.close()
    assert said_of(tmp_path) == "no accuracy on test data of silos 1, 3: mean, std and worst are over the others"
    assert "no accuracy on test data of silos 1, 3" in shown(summary_table(tmp_path, "r1")).replace("N", "n")


def test_when_all_failed_nothing_was_measured(tmp_path: Path) -> None:
    writer = begin(tmp_path, "r1", "spider_tiny")
    add_training(writer, [(DECIDED,) * 3])
    writer.add("rounds", stage="evaluation", round=0, clients_planned=3)
    for silo in range(3):
        writer.add("clients", stage="evaluation", round=0, client_id=silo, status="failed")
    writer.close()
    assert said_of(tmp_path) == "nothing was measured on test data: no accuracy of silos"


@pytest.mark.parametrize(
    ("method", "model", "consequence"),
    [
        ("spider", "personal", "what is scored as personal there is the shared model"),
        ("ditto", "personal", "what is scored as personal there is the shared model"),
        ("fedpnas", "personal", "scored as personal there is the shared base with cells that were never trained"),
        ("fednas", "global", "the shared model has learned nothing from the data there"),
        ("knn_per", "personal", "the shared model has learned nothing from the data there"),
    ],
)
def test_silos_that_never_counted_in_training_are_named(
    tmp_path: Path, method: str, model: str, consequence: str
) -> None:
    writer = begin(tmp_path, "r1", method, method={"name": method, "train": {"rounds": 3}})
    add_training(writer, [(DECIDED,)] * 3)
    for round_, (one, two) in enumerate([("failed", "dropped"), ("ok", "timed_out"), ("dropped", "failed")]):
        for silo, status in ((1, one), (2, two)):
            writer.add("clients", stage="spider", round=round_, client_id=silo, status=status)
    add_model(writer, model, [0.2, 0.3, 0.4], [DECIDED] * 3)
    for silo in range(3):  # a row of what only measures is no training
        writer.add("clients", stage="evaluation", round=0, client_id=silo, status="ok")
    writer.close()
    first, second = said_of(tmp_path).split(": ")
    assert first == "no training round of silo 2 counted (failed, dropped or late every time)"
    assert second.endswith(consequence)


def test_a_silo_that_was_neither_trained_nor_scored_is_named_once(tmp_path: Path) -> None:
    writer = begin(tmp_path, "r1", "spider_tiny")
    add_training(writer, [(DECIDED,) * 2])
    add_model(writer, "personal", [0.2, 0.3], [DECIDED] * 2)
    writer.close()
    assert said_of(tmp_path) == "no accuracy on test data of silo 2: mean, std and worst are over the others"


def write_gains(root: Path, matrix: Mapping[tuple[int, int], float], status: str = "done", **gains: Any) -> None:
    method = {"name": "spider", "gains": {"epochs": 3, "clients": None, **gains}, "train": {"rounds": 1}}
    writer = begin(root, "r1", "spider_tiny", status=status, method=method)
    add_training(writer, [(DECIDED,) * 3])
    add_model(writer, "personal", [0.2, 0.3, 0.4], [DECIDED] * 3)
    add_gains(writer, matrix)
    writer.close()


def test_pairs_without_an_accuracy_are_named(tmp_path: Path) -> None:
    write_gains(tmp_path, {pair: p for pair, p in MATRIX.items() if pair not in ((0, 1), (2, 2))})
    assert said_of(tmp_path) == (
        "personalisation gains of silos 0, 2 are incomplete: 2 of 9 p_ij were not measured, (i, j) = (0, 1), (2, 2)"
    )


def test_many_pairs_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    write_gains(tmp_path, {(0, 0): 0.5, (1, 1): 0.5})
    assert said_of(tmp_path) == (
        "personalisation gains of every silo are incomplete: 7 of 9 p_ij were not measured, "
        "(i, j) = (0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1), ..."
    )


@pytest.mark.parametrize(
    ("status", "gains", "left_out"),
    [("done", {}, set()), ("done", {"clients": 2}, {2}), ("running", {}, {2}), ("done", {"epochs": 0}, {1, 2})],
)
def test_pairs_that_were_not_to_be_measured_or_not_yet_are_not_missed(
    tmp_path: Path, status: str, gains: dict[str, Any], left_out: set[int]
) -> None:
    write_gains(tmp_path, {pair: p for pair, p in MATRIX.items() if not left_out & set(pair)}, status, **gains)
    assert said_of(tmp_path) == ""


def test_a_silo_without_test_samples_has_no_pairs_to_miss(tmp_path: Path) -> None:
    method = {"name": "spider", "gains": {"epochs": 3}, "train": {"rounds": 1}}
    writer = begin(tmp_path, "r1", "spider_tiny", method=method)
    add_training(writer, [(DECIDED,) * 3])
    add_model(writer, "personal", [0.2, 0.3], [DECIDED] * 2)
    add_gains(writer, {pair: p for pair, p in MATRIX.items() if pair[0] != 2})
    for stage, model in (("evaluation", "personal"), ("gains", "silo-0")):
        place = {"stage": stage, "round": 0, "model": model, "client_id": 2}
        writer.add("evaluations", **place, split="test", metric="accuracy", value=0.0, samples=0)
    writer.close()
    assert said_of(tmp_path) == ""


def test_several_modules_per_edge_are_no_unfinished_search_where_nothing_is_searched(tmp_path: Path) -> None:
    for run_id, method in (("r1", {"name": "fedmn"}), ("r2", {"name": "spider", "search": {"start": 1}})):
        writer = begin(tmp_path, run_id, method["name"], method={**method, "train": {"rounds": 1}})
        add_training(writer, [(HALF,) * 3], validated=False)
        add_model(writer, "personal", [0.5] * 3, [HALF] * 3)
        writer.close()
    assert said_of(tmp_path, "r1") == ""
    assert said_of(tmp_path, "r2") == "the search ended with edges left to be searched in every silo"
    assert phases(load(tmp_path, ["r1"])) == []
    for run_id, braces in (("r1", "several that are used together"), ("r2", "what is undecided")):
        assert f"braces hold {braces}" in write_report(tmp_path, [run_id]).markdown.read_text()


def test_a_dry_run_shows_what_it_counted_and_says_that_nothing_was_trained(tmp_path: Path) -> None:
    writer = begin(tmp_path, "r1", "spider_tiny", dry_run=True)
    work = {"clients_planned": 3, "bytes_down": 30, "bytes_up": 60, "macs": 9, "simulated_s": 1.0}
    writer.add("rounds", stage="spider", round=0, **work)
    writer.add("clients", stage="spider", round=0, client_id=0, status="ok")
    writer.close()
    files = write_report(tmp_path)
    assert [p.stem for p in files.plots] == ["communication"]
    assert "dry run" in " ".join(files.missing)
    assert "30 B" in shown(summary_table(tmp_path, "r1"))


def test_runs_with_tiers_keep_their_tables_beside_silos(tmp_path: Path) -> None:
    write_spider(tmp_path, "r1")
    writer = begin(tmp_path, "r2", "fedavg", method={"name": "fedavg"})
    place = {"stage": "rand_init/tier1", "round": 0}
    writer.add("rounds", **place, loss=1.0, bytes_down=5, bytes_up=5, macs=1, clients_planned=1)
    row = {"stage": "evaluation", "round": 0, "model": "rand_init", "tier": "tier1", "architecture": "0-0"}
    for client_id in (None, 0):
        scored = {"split": "test", "metric": "accuracy", "value": 0.5, "samples": 9}
        writer.add("evaluations", **row, **scored, client_id=client_id)
    writer.close()
    files = write_report(tmp_path, ["r1", "r2"])
    page = files.markdown.read_text()
    assert all(title in page for title in ("## Tiers: fedavg", "## Silos\n", "## Fairness over clients"))
    assert "spider_tiny | personal" not in page
    assert {"convergence-fedavg", "clients-fedavg", "silos"} <= {p.stem for p in files.plots}
    assert "convergence-spider_tiny" not in {p.stem for p in files.plots}


def test_a_run_of_a_fixed_network_has_no_cells_phases_or_gains(tmp_path: Path) -> None:
    write_fixed(tmp_path, "r1")
    files = write_report(tmp_path)
    assert [p.stem for p in files.plots] == ["silos", "phases", "communication"]
    assert files.missing == ()
    assert "neighbours' share" in files.markdown.read_text()


def test_several_runs_have_figures_together_and_of_each(tmp_path: Path) -> None:
    write_spider(tmp_path, "r1")
    write_spider(tmp_path, "r2", 0.05, seed=2)
    write_fixed(tmp_path, "r3", "ditto")
    names = {p.stem for p in write_report(tmp_path, ["r1", "r2", "r3"]).plots}
    assert names >= {"silos", "phases", "gains-r1", "gains-r2", "normal-cells-r1", "reduction-cells-r2"}
    assert "gains-r3" not in names
