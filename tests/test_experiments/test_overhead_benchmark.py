"""A client costs the same however many there are in its round."""

import time
from dataclasses import replace
from pathlib import Path

from fedloom.experiments.benchmarks.cases import CASES, run_config
from fedloom.platform.runs.run import Watcher, make_serial, start_run


def client_s(name: str, rounds: int, results: Path) -> float:
    """Seconds of the processor per client after the first round: other processes' time does not count."""
    case, ends = replace(CASES[name], rounds=rounds), list[float]()
    watcher = Watcher(round=lambda _: ends.append(time.process_time()))
    start_run(run_config(case, 0, str(results)), make_serial, watcher)
    # Not of single rounds: a round's rows are written while the next one is at work.
    return (ends[-1] - ends[0]) / (rounds - 1) / case.cohort


def test_a_client_of_2000_costs_what_one_of_200_does(tmp_path: Path) -> None:
    ratios: list[float] = []
    while not ratios or (ratios[-1] >= 1.5 and len(ratios) < 3):  # other processes take caches, too
        few = client_s("cohort_200", 12, tmp_path / f"few{len(ratios)}")
        ratios.append(client_s("cohort_2000", 3, tmp_path / f"many{len(ratios)}") / few)
    assert ratios[-1] < 1.5, ratios
