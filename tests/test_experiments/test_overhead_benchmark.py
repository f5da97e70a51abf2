"""A client costs the same however many there are in its round."""

import time
from pathlib import Path

from fedloom.experiments.benchmarks.cases import Case, run_config
from fedloom.platform.runs.run import Watcher, make_serial, start_run


def client_s(cohort: int, rounds: int, results: Path) -> float:
    """Seconds of the processor per client after the first round: other processes' time does not count."""
    case = Case("logistic", clients=2000, cohort=cohort, samples=8, rounds=rounds, chunk_size=50, batch_size=8)
    ends: list[float] = []
    watcher = Watcher(round=lambda _: ends.append(time.process_time()))
    start_run(run_config(case, 0, str(results)), make_serial, watcher)
    # Not of single rounds: a round's rows are written while the next one is at work.
    return (ends[-1] - ends[0]) / (rounds - 1) / case.cohort


def test_a_client_of_2000_costs_what_one_of_200_does(tmp_path: Path) -> None:
    ratios: list[float] = []
    while not ratios or (ratios[-1] >= 1.5 and len(ratios) < 3):  # other processes take caches, too
        few = client_s(200, 12, tmp_path / f"few{len(ratios)}")
        ratios.append(client_s(2000, 3, tmp_path / f"many{len(ratios)}") / few)
    assert ratios[-1] < 1.5, ratios
