"""Runs one variant of the overhead benchmark in this process and prints its figures as JSON."""

import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fedloom.actors.address import stay_on_loopback

STARTED = time.perf_counter()
WARM_UP_ROUNDS = 2


def main() -> None:
    """`variant CASE NAME`: NAME is plain, serial, ray_1, ray_2, ray_2_bfloat16 or ray_2_memory."""
    case, name = sys.argv[1:]
    stay_on_loopback("local")
    logging.disable(logging.WARNING)
    if name == "plain":
        figures = plain(case)
    else:
        actors = int(name.split("_")[1]) if name.startswith("ray") else 0
        precision = "bfloat16" if "bfloat16" in name else "float32"
        figures = platform(case, actors, precision, memory="memory" in name)
    print(json.dumps(figures))


def plain(case_name: str) -> dict[str, Any]:
    """Measures the case with two plain processes."""
    from fedloom.experiments.benchmarks.cases import CASES, run_config
    from fedloom.experiments.benchmarks.plain import plain_rounds
    from fedloom.platform.data.dataset import Dataset
    from fedloom.platform.data.prepare import prepare_dataset

    dataset = Dataset.open(prepare_dataset(run_config(CASES[case_name], 0, "").data))
    begun = time.perf_counter()
    rounds_s = plain_rounds(CASES[case_name], str(dataset.path), dataset.mean, dataset.std)
    start_s = time.perf_counter() - begun - sum(rounds_s) + begun - STARTED
    return {"rounds_s": rounds_s[WARM_UP_ROUNDS:], "start_s": start_s}


class Stopwatch:
    """Records the times at which rounds end."""

    def __init__(self, memory_pid: int | None = None) -> None:
        self.ends: list[float] = []
        self.memory_pid = memory_pid
        self.bytes_after: dict[int, int] = {}

    def started(self, run_id: str, supernet_of: str) -> None:
        """Records nothing."""

    def round(self, progress: Any) -> None:
        """Records the end of a round and, after rounds 5 and 50, the memory."""
        self.ends.append(time.perf_counter())
        if self.memory_pid is not None and progress.round in (5, 50):
            from fedloom.experiments.benchmarks.processes import descendants, is_rays_own, pss_bytes

            ours = [pid for pid in descendants(self.memory_pid) if not is_rays_own(pid)]
            self.bytes_after[progress.round] = sum(pss_bytes(pid) for pid in ours)


def platform(case_name: str, actors: int, precision: str, *, memory: bool) -> dict[str, Any]:
    """Measures the case with the platform's own loop, tables and checkpoints; the loop runs in this process."""
    from fedloom.actors.cluster import connected
    from fedloom.actors.server import make_pool
    from fedloom.experiments.benchmarks.cases import CASES, run_config
    from fedloom.platform.runs.run import Watcher, make_serial, start_run

    watch = Stopwatch(os.getpid() if memory else None)
    watcher = Watcher(watch.started, watch.round)
    with tempfile.TemporaryDirectory() as results:
        config = run_config(CASES[case_name], actors, results, precision)
        if actors:
            with connected(config.ray):
                start_run(config, make_pool, watcher)
        else:
            start_run(config, make_serial, watcher)
        assert list(Path(results).iterdir()), "the run wrote its tables"
    if memory:
        return {"bytes_5": watch.bytes_after[5], "bytes_50": watch.bytes_after[50]}
    rounds_s = [b - a for a, b in zip(watch.ends, watch.ends[1:], strict=False)]
    return {"rounds_s": rounds_s[WARM_UP_ROUNDS - 1 :], "start_s": watch.ends[0] - rounds_s[0] - STARTED}


if __name__ == "__main__":
    main()
