"""Bayesian search: suggestions are those of the seed and the results, and a stopped search goes on as it would."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedloom.experiments.ablation import running
from fedloom.experiments.ablation.bayesian import Known, known_points, suggested
from fedloom.experiments.ablation.config import AxisConfig
from fedloom.experiments.ablation.in_process import run_in_process
from fedloom.experiments.ablation.plan import next_batch, plan_ablation, planned_ablation
from fedloom.experiments.ablation.running import ResultsLocation, RunningAblation, end_search
from fedloom.experiments.analysis.ablation import load_ablation
from fedloom.experiments.report.ablation import ablation_content
from fedloom.experiments.report.history import history_picture
from fedloom.experiments.store.ablations import Ablation, find_ablation, write_ablation
from fedloom.experiments.store.trials import STATUS, End, TrialState, trial_states
from fedloom.platform.results.status import read_status

pytest.importorskip("optuna")

AXES = {
    "lr": AxisConfig("method.train.lr", log_uniform=[0.001, 1.0]),
    "share": AxisConfig("data.alpha", uniform=[2.0, 3.0]),
    "rounds": AxisConfig("method.train.rounds", integers=[1, 3]),
    "rule": AxisConfig("method.train.weighting", values=["opa", "plain"]),
    "both": AxisConfig(settings={"few": {}, "many": {"executor.threads": 2}}),
}

SEARCH = """
axes:
  lr: {key: method.train.lr, log_uniform: [0.001, 1]}
  epochs: {settings: {preset's: {}, two: {method.train.epochs: 2}}}
seeds: [1]
overrides: [method.train.rounds=1, executor.kind=serial, data.num_clients=8, method.train.clients_per_round=2,
            data.train_samples=320, data.test_samples=80]
search: {kind: bayesian, samples: 3, seed: 5, batch: 2}
"""


def searched(objective: Callable[[Mapping[str, Any]], float], points: int, seed: int = 1) -> list[Known]:
    known: list[Known] = []
    while len(known) < points:
        known += [Known(point, objective(point)) for point in suggested(AXES, seed, known, 4)]
    return known


def test_suggestions_lie_in_their_ranges_and_are_those_of_the_seed() -> None:
    first = searched(lambda point: point["lr"], 8)
    points = [dict(known.setting) for known in first]
    assert all(0.001 <= p["lr"] <= 1 and 2 <= p["share"] <= 3 for p in points)
    assert {p["rounds"] for p in points} <= {1, 2, 3}
    assert {p["rule"] for p in points} == {"opa", "plain"}
    assert {p["both"] for p in points} == {"few", "many"}
    assert [float(f"{p['lr']:.4g}") for p in points] == [p["lr"] for p in points]
    assert searched(lambda point: point["lr"], 8) == first
    assert searched(lambda point: point["lr"], 8, seed=2) != first
    # What is suggested next depends on what was reached, not on the searcher that suggested it.
    assert suggested(AXES, 1, first[:4], 4) == points[4:]


def test_it_learns_where_the_objective_is_high() -> None:
    known = searched(lambda point: -abs(point["lr"] - 0.03) + (point["rule"] == "opa"), 24)
    assert [point.setting["rule"] for point in known[-8:]].count("opa") >= 6


def test_points_are_not_repeated_and_may_come_to_an_end() -> None:
    axes = {"rule": AxisConfig("method.train.weighting", values=["opa", "plain", "fedavg"])}
    known = [Known({"rule": "opa"}, 0.5), Known({"rule": "plain"}, None)]
    assert suggested(axes, 1, known, 4) == [{"rule": "fedavg"}]
    assert suggested(axes, 1, [*known, Known({"rule": "fedavg"}, None, was_stopped=True)], 4) == []


class View:
    """Interrupts after so many trials."""

    def __init__(self, after: int) -> None:
        self.left = after

    def planned(self, ablation: Ablation, states: list[TrialState], at_once: int, to_run: int) -> None: ...

    def started(self, index: int) -> None:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1

    def round(self, index: int, figures: Mapping[str, Any]) -> None: ...

    def ended(self, index: int, end: End) -> None:
        assert end.kind == "done", end

    def waiting(self, message: str) -> None: ...


def arguments(folder: Path, *more: str) -> list[str]:
    (folder / "own.yaml").write_text(SEARCH)
    return [f"ablation={folder / 'own.yaml'}", "experiment=fedavg_digits", f"results={folder / 'results'}", *more]


def test_a_stopped_search_goes_on_as_it_would_have(tmp_path: Path) -> None:
    settings = []
    for name, stops in (("whole", ()), ("stopped", (1, 1))):
        (tmp_path / name).mkdir()
        ablation = plan_ablation(arguments(tmp_path / name))
        assert len(ablation.trials) == 2, "the first batch is planned"
        root = tmp_path / name / "results"
        for begun, after in enumerate(stops):
            stored = find_ablation(root, ablation.ablation_id) if begun else ablation
            with pytest.raises(KeyboardInterrupt):
                run_in_process(stored, ResultsLocation(str(root), root), View(after), is_new=not begun)
        stored = find_ablation(root, ablation.ablation_id) if stops else ablation
        run_in_process(stored, ResultsLocation(str(root), root), View(3), is_new=not stops)
        done, tables = load_ablation(root, ablation.ablation_id)
        assert [state.state for state in trial_states(root, done)] == ["done"] * 3
        settings.append([(trial.index, dict(trial.setting), trial.overrides) for trial in done.trials])
        assert read_status(done.folder(root) / STATUS).state == "done"
    assert settings[0] == settings[1]
    assert all(point.objective is not None for point in known_points(root, done))
    (picture,) = history_picture(done, tables)
    _, best = picture.figure.axes[0].get_lines()
    assert list(best.get_ydata()) == sorted(best.get_ydata())
    content = ablation_content(done, trial_states(root, done), tables)
    assert dict(content.runs[0].facts)["trials"] == "3 (Bayesian search of 3 points)"


def test_a_search_that_ends_between_two_batches_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ablation, root = plan_ablation(arguments(tmp_path)), tmp_path / "results"
    location, status = ResultsLocation(str(root), root), ablation.folder(root) / STATUS
    monkeypatch.setattr(running, "trial_states", lambda _, of: [TrialState(trial, "done") for trial in of.trials])
    write_ablation(root, ablation)
    assert ablation.points_left == 1
    with RunningAblation(ablation, location, ()):
        pass
    assert read_status(status).state == "interrupted"
    end_search(ablation, location)
    assert read_status(status).state == "done"


def test_a_preset_that_changes_meanwhile_ends_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text("defaults: [fedavg_digits]\nmethod: {train: {batch_size: 16}}")
    ablation = plan_ablation(arguments(tmp_path, f"experiment={preset}"))
    known = [Known(trial.setting, 0.5) for trial in ablation.trials]
    monkeypatch.setattr("fedloom.experiments.ablation.plan.known_points", lambda *_: known)
    longer = next_batch(tmp_path, ablation)
    assert longer is not None
    assert [trial.config["method"]["train"]["batch_size"] for trial in longer.trials] == [16, 16, 16]
    preset.write_text("defaults: [fedavg_digits]\nmethod: {train: {batch_size: 64}}")
    with pytest.raises(ValueError, match=r"trial 0 would be another run now \(method.train.batch_size 16 -> 64\)"):
        next_batch(tmp_path, ablation)


def test_later_batches_have_their_own_settings_and_what_was_changed_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = "{a: {tags: [a], executor.client_timeout_s: 5}, b: {tags: [b], executor.client_timeout_s: 6}}"
    command = arguments(tmp_path)
    (tmp_path / "own.yaml").write_text(SEARCH.replace("{preset's: {}, two: {method.train.epochs: 2}}", settings))
    ablation, root = plan_ablation(command), tmp_path / "results"
    write_ablation(root, ablation)
    monkeypatch.setattr(
        "fedloom.experiments.ablation.plan.known_points", lambda _, of: [Known(t.setting, 0.5) for t in of.trials]
    )
    resumed = planned_ablation(root, ablation.ablation_id, ["checkpoint.every=7", "data.cache=here"])
    others = [{"lr": 0.5, "epochs": setting} for setting in "ab"]
    monkeypatch.setattr("fedloom.experiments.ablation.plan.suggested", lambda *_: others)
    longer = next_batch(root, resumed)
    assert longer is not None
    for setting, trial in zip("ab", longer.trials[2:], strict=True):
        assert trial.config["tags"] == [setting]
        assert trial.config["executor"]["client_timeout_s"] == {"a": 5.0, "b": 6.0}[setting]
        assert (trial.config["checkpoint"]["every"], trial.config["data"]["cache"]) == (7, "here")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.validation_share=0", r"^data.validation_share=0: a Bayesian search compares points on validation data"),
        ("ablation.search.samples=20000", "has 20000 trials: 10000 at most"),
        ("ablation.search.kind=grid", "a range is for ablation.search.kind=random or bayesian; a grid needs values"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_ablation(arguments(tmp_path, override))


def test_without_optuna_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r'kind=bayesian needs Optuna: pip install "fedloom\[optuna\]"'):
        plan_ablation(arguments(tmp_path))
