"""One case of the scale benchmark in this process: no-op clients through the platform's own loop and recorder."""

import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from fedloom.actors.address import stay_on_loopback
from fedloom.platform.federation.config import ExecutorConfig, RayConfig, RunConfig, TiersConfig

KINDS = ("serial", "ray", "simulated")
READS = 3
STORE_BYTES = 300_000_000


@dataclass(frozen=True)
class ScaleCase:
    """A federation of no-op clients, and who executes them.

    Attributes:
        registered: clients of the federation, of which `cohort` take part in each of `rounds`.
        parameters: scalars of the shared weights, 4 bytes each.
        kind: `serial` (this process), `ray` (an actor per process) or `simulated` (an actor per thread).
        chunk_size: clients that an actor gets in one call.
        rest_s: seconds that a client waits before it answers.
        warm_up: first rounds that are not counted.
    """

    registered: int
    cohort: int
    rounds: int
    parameters: int = 1000
    kind: str = "serial"
    actors: int = 1
    chunk_size: int = 1
    rest_s: float = 0.0
    warm_up: int = 2
    reads: bool = False


def main() -> None:
    """`scale_case CASE CACHE`: CASE is a `ScaleCase` as JSON, CACHE the folder of prepared data."""
    case, cache = ScaleCase(**json.loads(sys.argv[1])), sys.argv[2]
    stay_on_loopback("local")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=cache) as results:
        print(json.dumps(measure(case, run_config(case, cache, results))))


def run_config(case: ScaleCase, cache: str, results: str) -> RunConfig:
    """The case as a run's configuration."""
    from fedloom.experiments.benchmarks.noop import CLASSES, HERE, NoOpConfig
    from fedloom.platform.data.config import DataConfig
    from fedloom.platform.federation.training_config import TrainingConfig
    from fedloom.platform.spaces.space_config import SpaceConfig

    train = TrainingConfig(rounds=case.rounds, clients_per_round=case.cohort)
    store_bytes = STORE_BYTES + 16 * case.parameters * (1 + case.actors)
    return RunConfig(
        experiment="scale",
        results=results,
        data=DataConfig(
            dataset=f"{HERE}:numbers",
            options={"samples": case.registered},
            partition="iid",
            num_clients=case.registered,
            validation_share=0.0,
            cache=cache,
        ),
        space=SpaceConfig(name=f"{HERE}:line", num_classes=CLASSES),
        tiers=TiersConfig(count=1, paths=10),
        method=NoOpConfig(train=train, parameters=case.parameters, rest_s=case.rest_s),
        executor=ExecutorConfig(
            kind="serial" if case.kind == "serial" else "ray",
            actors=case.actors,
            chunk_size=case.chunk_size,
            stack_clients="off",
        ),
        ray=RayConfig(
            address="local",
            num_cpus=case.actors if case.kind == "ray" else 1,
            object_store_memory_bytes=store_bytes,
        ),
    )


class Watch:
    """Takes down, after every round, the clock, this process's own processor time, and its memory."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self.resident: dict[int, int] = {}

    def round(self, progress: Any) -> None:
        """Memory at 1, 2, 5, 10, 20, 50, ... rounds alone, because reading it takes longer than a short round."""
        self.wall_s.append(time.perf_counter())
        self.cpu_s.append(time.process_time())
        done = progress.round + 1
        if str(done).rstrip("0") in ("1", "2", "5") or done == progress.rounds_total:
            self.resident[done] = resident_bytes()

    def figures(self, warm_up: int) -> dict[str, Any]:
        """Medians per round after the warm-up; seconds to the end of the first round; bytes by number of rounds."""
        first = min(warm_up, len(self.wall_s) - 2)
        return {
            "start_s": self.wall_s[0] - self.started_s,
            "round_s": median(_steps(self.wall_s)[first:]) if first >= 0 else None,
            "cpu_s": _mean(self.cpu_s[first:]) if first >= 0 else None,
            "mean_s": _mean(self.wall_s[first:]) if first >= 0 else None,
            "resident_bytes": self.resident,
        }


def _steps(marks: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(marks)]


def _mean(marks: list[float]) -> float:
    return (marks[-1] - marks[0]) / (len(marks) - 1)


def measure(case: ScaleCase, config: RunConfig) -> dict[str, Any]:
    """Runs the case and returns its figures, with the tables' sizes and reading times if it asks for them."""
    from fedloom.platform.runs.run import Watcher, start_run

    watch = Watch()
    if case.kind == "serial":
        from fedloom.platform.runs.run import make_serial

        start_run(config, make_serial, Watcher(round=watch.round))
    else:
        from fedloom.actors.cluster import connected
        from fedloom.actors.server import make_pool
        from fedloom.experiments.benchmarks.simulated import make_simulated

        with connected(config.ray):
            start_run(config, make_pool if case.kind == "ray" else make_simulated, Watcher(round=watch.round))
    tables = sizes(Path(config.results)) if case.reads else {}
    return {**asdict(case), **watch.figures(case.warm_up), **tables}


def sizes(results: Path) -> dict[str, Any]:
    """Rows, bytes and reading time of the tables `rounds` and `clients`."""
    from fedloom.platform.results.tables import read_table

    found: dict[str, Any] = {}
    for table in ("rounds", "clients"):
        found[f"{table}_rows"] = len(read_table(results, table))
        found[f"{table}_bytes"] = sum(file.stat().st_size for file in (results / table).rglob("*.parquet"))
        found[f"{table}_read_s"] = median(_timed(lambda table=table: read_table(results, table)) for _ in range(READS))  # type: ignore[misc]
    return found


def _timed(do: Callable[[], object]) -> float:
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


def resident_bytes() -> int:
    """The memory that this process has now."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
