"""Dry runs: the same rows as the real run's without training, over as many rounds as a paper has."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedloom.platform.clients.execution import SerialExecutor
from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.config import CheckpointConfig, DevicesConfig, RunConfig
from fedloom.platform.federation.loop import InterruptedRunError
from fedloom.platform.federation.training_config import PrivacyConfig, TrainingConfig
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.registry import find_method
from fedloom.platform.methods.superfednas import DistributionConfig, ShrinkingConfig
from fedloom.platform.results.checkpoint import load_checkpoint
from fedloom.platform.results.paths import list_runs, run_paths
from fedloom.platform.runs.run import Watcher, make_serial, resume_run, start_run
from fedloom.platform.spaces.slices import architecture_id
from fedloom.platform.spaces.space_config import SpaceConfig

Make = Callable[..., RunConfig]

FIGURES = [
    "stage", "round", "client_id", "tier", "status", "error", "architecture", "subspace", "parameters", "samples",
    "steps", "macs", "bytes_down", "bytes_up", "simulated_s", "selection_probability", "selection_reason",
]  # fmt: skip
SUMS = [
    "stage",
    "round",
    "clients_planned",
    "clients_ok",
    "bytes_down",
    "bytes_up",
    "macs",
    "simulated_s",
    "beta",
    "lr",
]

SPREAD = 2
"""By how much clients may differ in how often tracking gave them the largest or the smallest subnet."""


def run(config: RunConfig, folder: Path) -> dict[str, pd.DataFrame]:
    """A run in a results folder of its own; its tables."""
    config = replace(config, results=str(folder))
    run_id = start_run(config, make_serial)
    return tables(folder, config.experiment, run_id)


def tables(folder: Path, experiment: str, run_id: str) -> dict[str, pd.DataFrame]:
    paths = run_paths(folder, experiment, run_id)
    names = ("clients", "rounds", "evaluations", "candidates", "models")
    frames = {name: pd.read_parquet(paths.table(name)) for name in names if paths.table(name).is_dir()}
    return {
        name: frame.sort_values([c for c in ("stage", "round", "client_id") if c in frame])
        for name, frame in frames.items()
    }


def figures(frame: pd.DataFrame, columns: list[str], stages: set[str]) -> list[dict[Any, Any]]:
    kept = frame[frame["stage"].isin(stages)][columns]
    return kept.astype(object).where(kept.notna(), None).to_dict("records")


# -- the same rows ----------------------------------------------------------------------------------------------------


def slices(elastic: Make, _tiny: Make) -> RunConfig:
    return elastic("batch", train={"rounds": 3})


def tier_aware(elastic: Make, _tiny: Make) -> RunConfig:
    return elastic(train={"rounds": 3, "distribution": DistributionConfig("random", tier_aware=True)})


def whole_supernet(elastic: Make, _tiny: Make) -> RunConfig:
    return elastic(train={"rounds": 2, "travels": "supernet", "shrinking": ShrinkingConfig(2, 0.5)})


def whole_supernet_of_operators(elastic: Make, tiny: Make) -> RunConfig:
    config = elastic(train={"rounds": 2, "travels": "supernet", "shrinking": ShrinkingConfig(2, 0.0)})
    return replace(config, space=tiny().space)


def compressed(elastic: Make, _tiny: Make) -> RunConfig:
    options = {"share": 0.2, "bits": 4, "direction": "both"}
    return elastic("batch", train={"rounds": 2, "processors": ["clip", "top_k", "uniform"], "options": options})


def separately(elastic: Make, _tiny: Make) -> RunConfig:
    family = ["smallest", "d=1,0 e=1", "largest"]
    return elastic("batch", method={"separately": True, "family": family}, train={"clients_per_round": 2})


def dropouts(elastic: Make, _tiny: Make) -> RunConfig:
    return elastic(train={"rounds": 3}, devices=DevicesConfig(dropout=0.3, availability=0.8, deadline_s=0.05))


def traced(elastic: Make, _tiny: Make) -> RunConfig:
    devices = DevicesConfig(
        availability_table="generated",
        availability_period_s=0.2,
        availability_share=0.6,
        jitter=0.5,
        server_bytes_per_s=5e6,
    )
    return elastic(train={"rounds": 5, "clients_per_round": 8}, devices=devices)


def fedoras(_elastic: Make, tiny: Make) -> RunConfig:
    return tiny()


def fedavg(_elastic: Make, tiny: Make) -> RunConfig:
    train = TrainingConfig(rounds=2, clients_per_round=3, batch_size=16, epochs=2)
    return tiny(method=FedAvgConfig(architecture="3-1-2", train=train))


def kept(_elastic: Make, tiny: Make) -> RunConfig:
    train = TrainingConfig(rounds=2, clients_per_round=3, batch_size=16, aggregator="median", processors=["sparsify"])
    return tiny(method=FedAvgConfig(architecture="3-1-2", train=train))


def one_after_the_other(elastic: Make, _tiny: Make) -> RunConfig:
    """Every stage has its own turns, and its own clients at work."""
    train = {"rounds": 2, "clients_per_round": 2, "asynchronous": "fedbuff", "arrivals": 1, "selection": "round_robin"}
    return elastic("batch", method={"separately": True, "family": ["smallest", "largest"]}, train=train)


@pytest.mark.parametrize(
    "make",
    [
        *(slices, compressed, tier_aware, whole_supernet, whole_supernet_of_operators),
        *(separately, dropouts, traced, fedoras, fedavg, kept, one_after_the_other),
    ],
    ids=lambda f: f.__name__,
)
def test_a_dry_run_has_the_rows_of_the_real_one(
    make: Callable[[Make, Make], RunConfig], elastic_config: Make, tiny_config: Make, tmp_path: Path
) -> None:
    config = make(elastic_config, tiny_config)
    real, dry = run(config, tmp_path / "real"), run(replace(config, dry_run=True), tmp_path / "dry")
    stages = set(dry["clients"]["stage"])
    assert stages
    found, expected = figures(dry["clients"], FIGURES, stages), figures(real["clients"], FIGURES, stages)
    assert found == expected
    assert sum(row["macs"] for row in found) > 0
    assert sum(row["bytes_up"] for row in found) > 0
    assert figures(dry["rounds"], SUMS, stages) == figures(real["rounds"], SUMS, stages)
    if make is dropouts:
        assert {row["status"] for row in found} == {"ok", "dropped", "timed_out"}
    if make is traced:
        assert {row["status"] for row in found} == {"ok", "dropped"}
    # Nothing was learnt, nothing was scored, nothing is kept.
    assert dry["clients"][["loss", "metric"]].isna().all(axis=None)
    assert real["clients"]["loss"].notna().any()
    assert all(name not in dry or dry[name].empty for name in ("evaluations", "candidates", "models"))


def test_the_stages_that_depend_on_what_was_learnt_are_left_out(tiny_config: Make, tmp_path: Path) -> None:
    dry = run(tiny_config(dry_run=True), tmp_path / "dry")
    assert set(dry["rounds"]["stage"]) == {"supernet"}
    # evaluate_every=2 has the server score paths after round 0 of a real run.
    assert set(dry["clients"]["tier"]) <= {"tier1", "tier2"}


def test_separate_members_are_counted_one_after_the_other(elastic_config: Make, tmp_path: Path) -> None:
    config = elastic_config(method={"separately": True}, train={"clients_per_round": 2}, dry_run=True)
    dry, space = run(config, tmp_path / "dry"), build_world(config).space
    members = [architecture_id(a) for a in (space.smallest, space.largest)]  # type: ignore[attr-defined]
    assert set(dry["clients"]["stage"]) == {f"alone/{member}" for member in members}
    for stage, rows in dry["clients"].groupby("stage"):
        assert {f"alone/{a}" for a in rows["architecture"]} == {stage}


def test_whether_the_server_scores_makes_no_difference(elastic_config: Make, tmp_path: Path) -> None:
    often = run(elastic_config(train={"evaluate_every": 1}, dry_run=True), tmp_path / "often")
    never = run(elastic_config(train={"evaluate_every": 0}, dry_run=True), tmp_path / "never")
    assert often["evaluations"].empty
    assert figures(often["clients"], FIGURES, {"supernet"}) == figures(never["clients"], FIGURES, {"supernet"})


def test_a_dry_run_needs_no_workers(elastic_config: Make, tmp_path: Path) -> None:
    def refuse(_world: World) -> SerialExecutor:
        raise AssertionError("a dry run starts no executor")

    start_run(elastic_config(dry_run=True, results=str(tmp_path)), refuse)
    (paths,) = list_runs(tmp_path)
    assert load_checkpoint(paths.checkpoint).groups["supernet"].tensors == {}, "no weights"


def test_a_dry_run_without_anything_to_count_is_refused(
    elastic_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.platform.runs.dry_run.is_countable", lambda _stage: False)
    with pytest.raises(ValueError, match="dry_run=true: this method has no stage that can be counted"):
        run(elastic_config(dry_run=True), tmp_path / "dry")
    assert not (tmp_path / "dry" / "runs").exists()


def test_a_control_variate_is_received_whole_whatever_comes_back(tiny_config: Make, tmp_path: Path) -> None:
    config = tiny_config()
    train = replace(config.method.train, local_rule="scaffold", momentum=0.0, rounds=1, epochs=1, evaluate_every=0)
    config = replace(config, method=replace(config.method, train=train))
    real, dry = run(config, tmp_path / "real"), run(replace(config, dry_run=True), tmp_path / "dry")
    rows = [frame["clients"].query("stage == 'supernet'") for frame in (real, dry)]
    assert rows[0]["bytes_down"].tolist() == rows[1]["bytes_down"].tolist()
    assert (rows[0]["bytes_up"] < rows[0]["bytes_down"]).any(), "of operators that no step has reached"


def test_what_a_dry_run_does_not_know_is_said(
    tiny_config: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = TrainingConfig(rounds=1, clients_per_round=3, selection="oort")
    config = tiny_config(method=FedAvgConfig(architecture="3-1-2", train=train), dry_run=True)
    run(config, tmp_path / "dry")
    assert "selection=oort may choose by clients' losses, which are not known without training" in caplog.text
    train = replace(train, selection="uniform", weighting="plain", privacy=PrivacyConfig(secure=True))
    with pytest.raises(ValueError, match=r"dry_run=true: method\.train\.privacy\.secure=true masks weights"):
        run(replace(config, method=FedAvgConfig(architecture="3-1-2", train=train)), tmp_path / "dry")


@pytest.mark.parametrize("method", ["fedmn", "global_nas"])
def test_what_clients_train_may_depend_on_training_although_it_does_not_at_first(
    silo_config: Make, tmp_path: Path, method: str
) -> None:
    space = SpaceConfig("darts_s2_small", channels=4, nodes=1)
    with pytest.raises(ValueError, match="dry_run=true: this method has no stage that can be counted"):
        run(replace(silo_config(find_method(method).config(), space=space), dry_run=True), tmp_path / "dry")


# -- over many rounds -------------------------------------------------------------------------------------------------


def many_rounds(elastic: Make, rounds: int, heuristic: str = "tracking_sandwich") -> RunConfig:
    """Twenty clients, C = 0.4, on a space in which a random draw is hardly ever the smallest or the largest."""
    config = elastic(
        train={"rounds": rounds, "clients_per_round": 8, "distribution": DistributionConfig(heuristic)},
        dry_run=True,
        data=DataConfig(num_clients=20, train_samples=320, test_samples=80),
        checkpoint=CheckpointConfig(every=rounds),
    )
    return replace(config, space=replace(config.space, depths=[2, 2], expansions=[1.0, 2.0, 3.0, 4.0]))


def times_served(config: RunConfig, rows: pd.DataFrame) -> tuple[Counter[int], Counter[int], Counter[int]]:
    """From the rows: how often each client took part, had the largest and had the smallest subnet."""
    space = build_world(config).space
    largest, smallest = (architecture_id(a) for a in (space.largest, space.smallest))  # type: ignore[attr-defined]
    by_subnet = {text: Counter(rows[rows["architecture"] == text]["client_id"]) for text in (largest, smallest)}
    return Counter(rows["client_id"]), by_subnet[largest], by_subnet[smallest]


def test_tracking_serves_all_clients_alike_over_many_rounds(elastic_config: Make, tmp_path: Path) -> None:
    config = many_rounds(elastic_config, 300)
    rows = run(config, tmp_path / "dry")["clients"]
    assert len(rows) == 2400
    took_part, *served = times_served(config, rows)
    assert len(took_part) == 20
    assert max(took_part.values()) - min(took_part.values()) > 10, "clients are drawn, not taken in turn"
    for count in served:
        assert count.total() >= 300, "one in every round"
        assert max(count.values()) - min(count.values()) <= SPREAD
        for a, b in itertools.combinations(range(20), 2):
            if took_part[a] == took_part[b]:
                assert abs(count[a] - count[b]) <= 1, (a, b)


def test_random_subnets_serve_clients_unevenly(elastic_config: Make, tmp_path: Path) -> None:
    config = many_rounds(elastic_config, 100, "random")
    config = replace(config, space=replace(config.space, depths=[0, 0], expansions=[1.0, 2.0]))
    _, largest, smallest = times_served(config, run(config, tmp_path / "dry")["clients"])
    assert all(max(count.values()) - min(count.values()) > 2 * SPREAD for count in (largest, smallest))


def test_the_counters_survive_a_resume(elastic_config: Make, tmp_path: Path) -> None:
    config = replace(many_rounds(elastic_config, 40), checkpoint=CheckpointConfig(every=7))
    whole = run(config, tmp_path / "whole")
    broken = replace(config, results=str(tmp_path / "broken"))
    ids: list[str] = []
    asked = itertools.count(1)
    with pytest.raises(InterruptedRunError):
        start_run(
            broken,
            make_serial,
            Watcher(started=lambda run_id, _: ids.append(run_id), should_stop=lambda: next(asked) == 17),
        )
    (paths,) = list_runs(tmp_path / "broken")
    served = load_checkpoint(paths.checkpoint).data
    assert "served" in str(served)
    resume_run(broken, ids[0], make_serial)
    resumed = tables(tmp_path / "broken", config.experiment, ids[0])
    assert figures(resumed["clients"], FIGURES, {"supernet"}) == figures(whole["clients"], FIGURES, {"supernet"})
    assert figures(resumed["rounds"], SUMS, {"supernet"}) == figures(whole["rounds"], SUMS, {"supernet"})
    (whole_paths,) = list_runs(tmp_path / "whole")
    states = [load_checkpoint(p.checkpoint).data["data"] for p in (paths, whole_paths)]
    assert states[0] == states[1]
    assert states[0]["served"]["largest"]
