"""Ablations on a cluster: in turn, refused, interrupted, killed, resumed; and what is left behind in Ray: nothing."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedloom.experiments.store.ablations import Ablation, find_ablation
from fedloom.experiments.store.trials import trial_states
from fedloom.platform.results.status import read_status
from fedloom.platform.results.tables import TABLES, TIME_COLUMNS, read_table

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("no_ray_cluster")]

KILLS = int(os.environ.get("FEDLOOM_KILLS", "2"))
LIMIT_S = 600
"""Nobody waits so long; it ends a test that hangs."""
FEDLOOM = [sys.executable, "-m", "fedloom.experiments.cli"]

TINY = [
    "experiment=fedoras_digits",
    "space.stem_channels=8",
    "data.num_clients=8",
    "tiers.count=2",
    "tiers.paths=1000",
    "method.train.rounds=3",
    "method.train.epochs=1",
    "method.train.clients_per_round=4",
    "method.search.population=4",
    "method.search.offspring=2",
    "method.search.budget=6",
    "method.finetune.rounds=2",
    "method.finetune.epochs=1",
    "method.finetune.clients_per_round=2",
    "method.rand_init.rounds=0",
    "method.rand_init.clients_per_round=2",
]
SERIAL = ["executor.kind=serial", *TINY]
SEARCH = """
title: Which searcher?
axes:
  searcher: {key: method.search.searcher, values: [nsga2, random]}
seeds: [1, 2]
figures: [tiers_by_axis]
"""
RATES = """
axes:
  lr: {key: method.train.lr, values: [0.1, 0.05, 1.0e+12]}
seeds: [1]
attempts: 1
"""
ROUNDS = """
axes:
  rate: {key: method.train.lr, values: [0.1, 0.03, 0.0001, 0.00001]}
seeds: [1]
scheduler: {kind: asha, metric: loss, grace_rounds: 2, reduction_factor: 2}
"""


class Somebody:
    """Types `fedloom ablate` on a machine of the cluster."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.results = folder / "results"

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts the command."""
        once = {argument.partition("=")[0]: argument for argument in arguments}.values()  # the last one counts
        return subprocess.Popen(
            [*FEDLOOM, "ablate", *once, f"ray.address={self.cluster.gcs}"],
            cwd=self.folder,
            env=self.cluster.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ablate(self, *arguments: str) -> tuple[int, str]:
        """The command's exit code and all that it said."""
        out, err = (process := self.begin(*arguments)).communicate(timeout=LIMIT_S)
        return process.returncode, out + err

    def write(self, name: str, text: str) -> str:
        """The argument that names an ablation of one's own."""
        (self.folder / name).write_text(text)
        return f"ablation={name}"

    def the_ablation(self) -> Ablation:
        """The only ablation there is."""
        return find_ablation(self.results, "")

    def states(self) -> list[str]:
        """The trials' states in the plan's order."""
        return [s.state for s in trial_states(self.results, self.the_ablation())]


@pytest.fixture
def somebody(cluster: Any, tmp_path: Path) -> Somebody:
    """Somebody with an empty folder."""
    return Somebody(cluster, tmp_path)


@pytest.fixture(scope="module")
def searched(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Somebody:
    """An ablation over searchers that was not disturbed."""
    somebody = Somebody(cluster, tmp_path_factory.mktemp("searched"))
    code, said = somebody.ablate(somebody.write("search.yaml", SEARCH), *SERIAL)
    assert code == 0, said
    return somebody


@pytest.fixture(scope="module")
def alive(cluster: Any) -> Callable[[], list[str]]:
    """Asks Ray's state API for actors and placement groups that live."""

    def listed(kind: str) -> list[dict[str, Any]]:
        return list(cluster.ask(f"v0/{kind}")["data"]["result"]["result"])

    def ask() -> list[str]:
        actors = [a["name"] or a["class_name"] for a in listed("actors") if a["state"] != "DEAD"]
        groups = [g["placement_group_id"] for g in listed("placement_groups") if g["state"] != "REMOVED"]
        return actors + groups

    return ask


def assert_nothing_left(alive: Callable[[], list[str]], within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while (left := alive()) and time.monotonic() < end:
        time.sleep(0.5)
    assert not left


def rows(somebody: Somebody) -> dict[str, pd.DataFrame]:
    """All tables by setting and seed, without names and times; the shared supernet's trainer is a name, too."""
    names = {t.run_id: f"{t.label()}" for t in somebody.the_ablation().trials}
    found = {}
    for table in TABLES:
        frame = read_table(somebody.results, table)
        frame["trial"] = frame["run_id"].map(names)
        aside = [c for c in frame if c in {*TIME_COLUMNS[table], "run_id", "config", "ablation", "supernet_run_id"}]
        frame = frame.drop(columns=aside).sort_values("trial", kind="stable")
        found[table] = frame.reset_index(drop=True)
    return found


def test_trials_that_fill_the_machine_run_in_turn(somebody: Somebody, alive: Callable[[], list[str]]) -> None:
    rates = somebody.write("rates.yaml", "axes: {lr: {key: method.train.lr, values: [0.1, 0.05]}}\nseeds: [1]\n")
    code, said = somebody.ablate(rates, *TINY, "executor.actors=2", "method.train.rounds=1")
    assert code == 0, said
    assert "2 trials, 2 to run, up to 1 at once" in said
    runs = read_table(somebody.results, "runs").sort_values("started")
    assert runs["status"].tolist() == ["done"] * 2
    assert (runs["started"].iloc[1:].to_numpy() >= runs["ended"].iloc[:-1].to_numpy()).all()
    assert sorted(runs["setting"]) == ['{"lr": 0.05}', '{"lr": 0.1}']
    assert set(runs["ablation"]) == {somebody.the_ablation().ablation_id}
    clients = read_table(somebody.results, "clients")
    assert set(clients["status"]) == {"ok"}
    assert_nothing_left(alive)


def test_a_trial_that_does_not_fit_is_refused_at_once(somebody: Somebody) -> None:
    rates = somebody.write("rates.yaml", "axes: {lr: {key: method.train.lr, values: [0.1, 0.05]}}\n")
    began = time.monotonic()
    code, said = somebody.ablate(rates, *TINY, "executor.actors=3")
    took_s = time.monotonic() - began
    assert code == 2
    assert "3 client actors need 3 CPUs at once, the cluster has 2: 1 CPUs are missing" in said
    assert [line.partition(":")[0] for line in said.splitlines()] == [said.partition(":")[0], "fedloom"]
    assert not somebody.results.exists()
    assert took_s < 10 * (1 + os.getloadavg()[0])  # ten seconds on a machine that does nothing else


def test_an_ablation_over_the_search_trains_once(searched: Somebody) -> None:
    rounds, runs = read_table(searched.results, "rounds"), read_table(searched.results, "runs")
    trained = rounds[rounds["stage"] == "supernet"].groupby("run_id").size()
    assert trained.tolist() == [3, 3]  # one run per seed, of two
    assert set(runs["supernet_run_id"]) == set(trained.index)
    assert runs.groupby("supernet")["run_id"].count().tolist() == [2, 2]
    assert rounds[rounds["stage"].str.startswith("search")].groupby("run_id").size().size == 4


def test_killed_at_any_moment_and_resumed_it_ends_the_same(
    searched: Somebody, somebody: Somebody, alive: Callable[[], list[str]], tmp_path: Path
) -> None:
    moments = random.Random(7)
    process = somebody.begin(somebody.write("search.yaml", SEARCH), *SERIAL)
    for kill in range(KILLS):
        _wait_for(lambda: bool(list(somebody.results.glob("artifacts/*/status.json"))), process)
        time.sleep(moments.uniform(0, 12))
        process.send_signal(signal.SIGINT if kill == 0 else signal.SIGKILL)
        out, err = process.communicate(timeout=LIMIT_S)
        if kill == 0:
            assert process.returncode in (0, 130), err
        assert_nothing_left(alive)
        if kill == 0:  # and moved
            somebody.results.rename(tmp_path / "elsewhere")
            somebody.results = tmp_path / "elsewhere"
        process = somebody.begin("--resume", somebody.the_ablation().ablation_id, f"--results={somebody.results}")
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out + err
    assert somebody.states() == ["done"] * 4
    expected, found = rows(searched), rows(somebody)
    for table in TABLES:
        pd.testing.assert_frame_equal(found[table], expected[table], check_exact=True, obj=table)


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], within_s: float = 90.0) -> None:
    end = time.monotonic() + within_s
    while not condition() and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.1)


def test_failed_and_killed_trials_leave_the_others_alone_and_are_retried(
    somebody: Somebody, alive: Callable[[], list[str]]
) -> None:
    process = somebody.begin(somebody.write("rates.yaml", RATES), *SERIAL, "method.train.rounds=15")
    pid = _kill_first_trial(somebody, process)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 4, out + err  # a process died, beside the runs that failed
    states = trial_states(somebody.results, somebody.the_ablation())
    assert [s.state for s in states] == ["died", "done", "failed"], pid
    assert "client" in states[2].message
    runs = read_table(somebody.results, "runs").set_index("trial")
    assert runs.loc[2, "error"]
    failed = read_table(somebody.results, "clients").query("status == 'failed'")
    assert set(failed["run_id"]) == {s.trial.run_id for s in states[2:]}
    assert_nothing_left(alive)
    code, said = somebody.ablate("--retry-failed", somebody.the_ablation().ablation_id, f"--results={somebody.results}")
    assert code == 3, said
    assert somebody.states() == ["done", "done", "failed"]
    again = read_table(somebody.results, "runs").set_index("trial")
    assert again.loc[1, "ended"] == runs.loc[1, "ended"]
    assert again.loc[0, "status"] == "done"
    whole = read_table(somebody.results, "rounds")
    assert whole.groupby("run_id").size()[[s.trial.run_id for s in states[:2]]].nunique() == 1


def _kill_first_trial(somebody: Somebody, process: subprocess.Popen[str]) -> int:
    def at_work() -> bool:
        found = list(somebody.results.glob("artifacts/*-0000/status.json"))
        return bool(found) and read_status(found[0]).stage == "supernet" and read_status(found[0]).round > 2

    _wait_for(at_work, process)
    pid = read_status(next(somebody.results.glob("artifacts/*-0000/status.json"))).pid
    os.kill(pid, signal.SIGKILL)
    return pid


def test_asha_stops_trials_early(somebody: Somebody, alive: Callable[[], list[str]]) -> None:
    code, said = somebody.ablate(somebody.write("rounds.yaml", ROUNDS), *SERIAL, "method.train.rounds=8")
    assert code == 0, said
    states = trial_states(somebody.results, somebody.the_ablation())
    found = [s.state for s in states]
    assert set(found) == {"done", "stopped"}
    rounds = read_table(somebody.results, "rounds").query("stage == 'supernet'").groupby("run_id").size()
    assert rounds[states[found.index("done")].trial.run_id] == 8
    assert_nothing_left(alive)
