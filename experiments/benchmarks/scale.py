"""How the platform's own work grows: with registered clients, cohorts, rounds, the supernet's size, and actors.

    python -m fedloom.experiments.benchmarks.scale [--parts registered cohorts rounds supernets actors]
        [--repeats 3] [--folder FOLDER] [--small]

Clients do nothing (`noop`): what is measured is the real loop, executor, recorder, tables and checkpoints. Every case
runs in a separate process, one at a time, and figures are medians over repeats. Prints a table per part, the constants
of `Server` if the parts from which they follow were measured, and one JSON object with all figures on the last line.
Only ratios within one call are meaningful. Results and checkpoints are written to FOLDER, by default the system's
temporary one; with a folder in memory (/dev/shm) times are those of the platform alone, without waiting for the disk.
"""

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from fedloom.actors.actor_set import ActorSet, Member
from fedloom.actors.address import stay_on_loopback
from fedloom.actors.client import RemoteClient
from fedloom.actors.cluster import connected
from fedloom.actors.placement import ActorGroup
from fedloom.actors.pool import ActorPool
from fedloom.actors.server import make_pool
from fedloom.experiments.benchmarks import noop
from fedloom.experiments.benchmarks.processes import printed
from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.config import ExecutorConfig, RayConfig, RunConfig, TiersConfig
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.federation.world import World
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import Watcher, make_serial, start_run
from fedloom.platform.spaces.space_config import SpaceConfig

READS = 3
STORE_BYTES = 300_000_000


@dataclass(frozen=True)
class ScaleCase:
    """A federation of no-op clients, and how they are executed.

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


# -- one case, in this process ----------------------------------------------------------------------------------------


def run_config(case: ScaleCase, cache: str, results: str) -> RunConfig:
    """The case as a run's configuration."""
    train = TrainingConfig(rounds=case.rounds, clients_per_round=case.cohort)
    store_bytes = STORE_BYTES + 16 * case.parameters * (1 + case.actors)
    return RunConfig(
        experiment="scale",
        results=results,
        data=DataConfig(
            dataset=f"{noop.HERE}:numbers",
            options={"samples": case.registered},
            partition="iid",
            num_clients=case.registered,
            validation_share=0.0,
            cache=cache,
        ),
        space=SpaceConfig(name=f"{noop.HERE}:line", num_classes=noop.CLASSES),
        tiers=TiersConfig(count=1, paths=10),
        method=noop.NoOpConfig(train=train, parameters=case.parameters, rest_s=case.rest_s),
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
    """Records, after every round, the clock, this process's CPU time, and its memory."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self.resident: dict[int, int] = {}

    def round(self, progress: Any) -> None:
        """Records a round; memory only after 1, 2, 5, 10, 20, 50, ... and all rounds, as reading it takes long."""
        self.wall_s.append(time.perf_counter())
        self.cpu_s.append(time.process_time())
        done = progress.round + 1
        if str(done).rstrip("0") in ("1", "2", "5") or done == progress.rounds_total:
            self.resident[done] = resident_bytes()

    def figures(self, warm_up: int) -> dict[str, Any]:
        """Seconds per round after the warm-up, seconds to the end of the first round, and bytes by number of rounds."""
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
    watch = Watch()
    if case.kind == "serial":
        start_run(config, make_serial, Watcher(round=watch.round))
    else:
        with connected(config.ray):
            start_run(config, make_pool if case.kind == "ray" else make_simulated, Watcher(round=watch.round))
    tables = sizes(Path(config.results)) if case.reads else {}
    return {**asdict(case), **watch.figures(case.warm_up), **tables}


def sizes(results: Path) -> dict[str, Any]:
    """Rows, bytes and reading time of the tables `rounds` and `clients`."""
    figures: dict[str, Any] = {}
    for table in ("rounds", "clients"):
        read_s = []
        for _ in range(READS):
            started_s = time.perf_counter()
            figures[f"{table}_rows"] = len(read_table(results, table))
            read_s.append(time.perf_counter() - started_s)
        figures[f"{table}_bytes"] = sum(file.stat().st_size for file in (results / table).rglob("*.parquet"))
        figures[f"{table}_read_s"] = median(read_s)
    return figures


def resident_bytes() -> int:
    """The current resident memory of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


# -- many actors in few processes -------------------------------------------------------------------------------------


class ThreadedSet(ActorSet):
    """An actor set that starts a single process with one thread per actor.

    64 processes that import torch would need 64 cores and 16 GB to measure the server, which sees no difference: 64
    handles, each with one chunk at a time.
    """

    _process: Any = None

    def start(self, group: ActorGroup, *, joins: bool = False) -> None:
        """Adds one more actor of the group, which shares the process of the others."""
        if self._process is None:
            remote = RemoteClient.options(num_cpus=group.num_cpus, max_concurrency=group.actors, max_restarts=0)
            self._process = remote.remote(self._spec_ref, group.num_gpus)
        self.members.append(Member(self._process, group, self._process.about.remote(), joins=joins))
        self.idle.setdefault(group.name, [])


class SimulatedPool(ActorPool):
    """The platform's pool over threads instead of processes."""

    def _start_actors(self) -> None:
        self.actors = ThreadedSet(self.spec, self.resident)
        super()._start_actors()


def make_simulated(world: World) -> SimulatedPool:
    """A pool of `executor.actors` simulated actors."""
    actors = world.config.executor.actors or 1
    return SimulatedPool(world.spec, [ActorGroup("all", actors, num_cpus=1.0, num_gpus=0.0)])


# -- the parts --------------------------------------------------------------------------------------------------------


Figures = Mapping[str, Any]
"""The measured figures of one case."""
Row = dict[str, Any]

FLAT_ROUNDS = 100
"""Rounds after which a process has imported and allocated what every later round needs."""
REST_S = 0.05


def _registered(numbers: Sequence[int], rounds: int) -> list[ScaleCase]:
    return [ScaleCase(number, cohort=10, rounds=rounds, warm_up=rounds // 10) for number in numbers]


def _cohorts(sizes: Sequence[int], clients: int) -> list[ScaleCase]:
    """Cases whose rounds have about `clients` clients in total, so that short rounds are measured as long as others."""
    return [ScaleCase(max(sizes), cohort=size, rounds=3 + max(2, clients // size)) for size in sizes]


def _rounds(numbers: Sequence[int]) -> list[ScaleCase]:
    return [ScaleCase(100, cohort=10, rounds=number, reads=True) for number in numbers]


def _supernets(millions: Sequence[float], cohorts: tuple[int, int]) -> list[ScaleCase]:
    """Every size with few and with more clients: the difference gives the cost of a client's weights."""
    return [
        ScaleCase(10, cohort, rounds=5, parameters=int(1e6 * size), kind="ray", warm_up=1)
        for size in millions
        for cohort in cohorts
    ]


def _actors(numbers: Sequence[int], rests: Sequence[int], real: Sequence[int], per_actor: int) -> list[ScaleCase]:
    """No-op clients one by one and in chunks of ten, clients that wait before they answer, and a few real actors."""
    case = ScaleCase(0, cohort=0, rounds=6, kind="simulated")
    busy = [replace(case, actors=k, chunk_size=chunk) for chunk in (1, 10) for k in numbers]
    slow = [replace(case, actors=k, rest_s=REST_S) for k in rests]
    real_ones = [replace(case, actors=k, kind="ray") for k in real]
    return [_filled(each, per_actor) for each in [*busy, *slow, *real_ones]]


def _filled(case: ScaleCase, per_actor: int) -> ScaleCase:
    cohort = case.actors * case.chunk_size * per_actor
    if not case.rest_s:
        cohort = max(cohort, 32 * per_actor)
    return replace(case, registered=cohort, cohort=cohort)


LARGE: dict[str, list[ScaleCase]] = {
    "registered": _registered([100, 1000, 10_000, 100_000, 1_000_000], rounds=500),
    "cohorts": _cohorts([10, 30, 100, 300, 1000, 3000, 10_000], clients=5000),
    "rounds": _rounds([1, 10, 100, 1000, 10_000]),
    "supernets": _supernets([1, 10, 50, 200], cohorts=(1, 5)),
    "actors": _actors([1, 8, 64], rests=[1, 2, 4, 8, 16, 32, 64], real=[1, 2], per_actor=16),
}
SMALL: dict[str, list[ScaleCase]] = {
    "registered": _registered([100, 1000], rounds=10),
    "cohorts": _cohorts([10, 100], clients=10),
    "rounds": _rounds([1, 20]),
    "supernets": [replace(case, kind="serial") for case in _supernets([0.01, 0.1], cohorts=(1, 2))],
    "actors": [replace(case, kind="serial", rest_s=0.0) for case in _actors([1, 2], [1], [], per_actor=1)],
}
"""Small cases without Ray: other tests cover its actors."""


@dataclass(frozen=True)
class Measured:
    """A case with its figures, and those of the part's first case: one of each per repeat."""

    case: ScaleCase
    runs: Sequence[Figures]
    first_runs: Sequence[Figures]

    def median(self, name: str) -> float:
        """The median of a figure over repeats."""
        return float(median(run[name] for run in self.runs))

    def ratio(self, name: str) -> float:
        """The median ratio to the first case, taken within each repeat because the machine's speed varies over time."""
        return float(median(run[name] / first[name] for run, first in zip(self.runs, self.first_runs, strict=True)))

    def resident_bytes(self, rounds: int | None = None) -> float:
        """The median memory of the process after this many rounds, by default all."""
        return float(median(run["resident_bytes"][str(rounds or self.case.rounds)] for run in self.runs))


def rows_of(part: str, cases: Sequence[ScaleCase], repeats: Sequence[Sequence[Figures]]) -> list[Row]:
    """The rows of a part's table, one per case."""
    by_case = list(zip(*repeats, strict=True))
    return [_ROWS[part](Measured(case, runs, by_case[0])) for case, runs in zip(cases, by_case, strict=True)]


def _registered_row(measured: Measured) -> Row:
    return {
        "registered": measured.case.registered,
        "round_ms": 1e3 * measured.median("round_s"),
        "cpu_ms": 1e3 * measured.median("cpu_s"),
        "ratio": measured.ratio("round_s"),
        "cpu_ratio": measured.ratio("cpu_s"),
        "start_s": measured.median("start_s"),
        "resident_mb": measured.resident_bytes() / 1e6,
    }


def _cohort_row(measured: Measured) -> Row:
    cohort, round_s, cpu_s = measured.case.cohort, measured.median("mean_s"), measured.median("cpu_s")
    return {
        "cohort": cohort,
        "round_ms": 1e3 * round_s,
        "cpu_ms": 1e3 * cpu_s,
        "clients_per_s": cohort / round_s,
        "cpu_us_per_client": 1e6 * cpu_s / cohort,
    }


def _rounds_row(measured: Measured) -> Row:
    rounds = measured.case.rounds
    num_rows, size_bytes, read_s = (measured.median(f"clients_{name}") for name in ("rows", "bytes", "read_s"))
    return {
        "rounds": rounds,
        "resident_mb": measured.resident_bytes() / 1e6,
        "to_round_100": measured.resident_bytes() / measured.resident_bytes(min(FLAT_ROUNDS, rounds)),
        "client_rows": num_rows,
        "kb": size_bytes / 1e3,
        "bytes_per_row": size_bytes / num_rows,
        "read_ms": 1e3 * read_s,
        "read_us_per_row": 1e6 * read_s / num_rows,
    }


def _supernet_row(measured: Measured) -> Row:
    weights_bytes = 4 * measured.case.parameters
    cpu_s = measured.median("cpu_s")
    return {
        "parameters": measured.case.parameters,
        "clients": measured.case.cohort,
        "round_s": measured.median("mean_s"),
        "cpu_s": cpu_s,
        "cpu_s_per_gb": 1e9 * cpu_s / weights_bytes,
        "resident_per_state": measured.resident_bytes() / weights_bytes,
    }


def _actors_row(measured: Measured) -> Row:
    case, round_s = measured.case, measured.median("mean_s")
    return {
        "kind": case.kind,
        "actors": case.actors,
        "chunk_size": case.chunk_size,
        "rest_ms": 1e3 * case.rest_s,
        "clients": case.cohort,
        "clients_per_s": case.cohort / round_s,
        "of_ideal": case.cohort * case.rest_s / case.actors / round_s if case.rest_s else None,
        "cpu_us_per_client": 1e6 * measured.median("cpu_s") / case.cohort,
    }


_ROWS: Mapping[str, Callable[[Measured], Row]] = {
    "registered": _registered_row,
    "cohorts": _cohort_row,
    "rounds": _rounds_row,
    "supernets": _supernet_row,
    "actors": _actors_row,
}


# -- the constants of one server --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """CPU seconds of the server process.

    Attributes:
        round_s: per round: plan, rows, checkpoint's head.
        client_s: per client: its assignment, report and rows.
        chunk_s: per chunk: Ray's call and its result.
        state_s_per_byte: per byte of the weights: sharing, mean, checkpoint.
        update_s_per_byte: per byte of a chunk's sums: adding it.
    """

    round_s: float
    client_s: float
    chunk_s: float
    state_s_per_byte: float
    update_s_per_byte: float

    def __str__(self) -> str:
        return (
            f"server: {1e3 * self.round_s:.3g} ms/round, {1e6 * self.client_s:.3g} us/client, "
            f"{1e6 * self.chunk_s:.3g} us/chunk, {1e9 * self.state_s_per_byte:.3g} s/GB of weights, "
            f"{1e9 * self.update_s_per_byte:.3g} s/GB of updates"
        )


def server_of(figures: Mapping[str, Sequence[Row]]) -> Server | None:
    """The constants from the figures of the parts `cohorts`, `supernets` and `actors`; None if one is missing."""
    if not {"cohorts", "supernets", "actors"} <= figures.keys():
        return None
    cohorts, supernets = figures["cohorts"], figures["supernets"]
    per_client_s = _slope(cohorts[0], cohorts[-1], "cohort", "cpu_ms") / 1e3
    round_s = max(0.0, cohorts[0]["cpu_ms"] / 1e3 - cohorts[0]["cohort"] * per_client_s)
    client_s, chunk_s = _clients_and_chunks(figures["actors"])
    state_s, update_s = _per_byte(supernets)
    return Server(round_s, client_s, chunk_s, state_s, update_s)


def _per_byte(supernets: Sequence[Row]) -> tuple[float, float]:
    """Seconds per byte of the weights and of a client's update: medians over all sizes but the smallest.

    With the smallest, clients and rounds cost more than bytes.
    """
    pairs = [*zip(supernets[::2], supernets[1::2], strict=True)]
    pairs = pairs[1:] or pairs
    update_s = median(_slope(few, more, "clients", "cpu_s") / (4 * few["parameters"]) for few, more in pairs)
    state_s = median(few["cpu_s"] / (4 * few["parameters"]) - few["clients"] * update_s for few, _ in pairs)
    return state_s, update_s


def _slope(first: Row, last: Row, x: str, y: str) -> float:
    return float((last[y] - first[y]) / (last[x] - first[x]))


def _clients_and_chunks(actors: Sequence[Row]) -> tuple[float, float]:
    """Seconds per client and per chunk, from the cases with the most actors: clients one by one, and in chunks."""
    busy = {row["chunk_size"]: row for row in actors if not row["rest_ms"] and row["kind"] != "ray"}
    (one, alone), (many, together) = sorted(busy.items())
    single_s, shared_s = (1e-6 * row["cpu_us_per_client"] for row in (alone, together))
    chunk_s = (single_s - shared_s) / (1 / one - 1 / many)
    return max(0.0, single_s - chunk_s / one), chunk_s


def main() -> None:
    """Measures the parts and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=[*LARGE], default=[*LARGE])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="where results, checkpoints and prepared data are written")
    parser.add_argument("--small", action="store_true", help="a few small cases per part, to see that all of it works")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        stay_on_loopback("local")
        logging.disable(logging.WARNING)
        with tempfile.TemporaryDirectory(dir=args.folder) as results:
            case = ScaleCase(**json.loads(args.case))
            print(json.dumps(measure(case, run_config(case, args.folder, results))))
        return
    figures: dict[str, list[Row]] = {}
    for part in args.parts:
        cases = (SMALL if args.small else LARGE)[part]
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            figures[part] = rows_of(part, cases, measured(cases, args.repeats, folder))
        print_table(part, figures[part])
    server = server_of(figures)
    if server is not None:
        print(f"\n{server}")
    print(json.dumps({**figures, **({} if server is None else {"server": asdict(server)})}))


def measured(cases: list[ScaleCase], repeats: int, folder: str) -> list[list[Figures]]:
    """The figures by repeat and case; every repeat runs all cases one after the other."""
    return [[run_in_process(case, folder) for case in cases] for _ in range(repeats)]


def run_in_process(case: ScaleCase, folder: str) -> Figures:
    """Runs a case in a separate process."""
    command = [sys.executable, "-m", "fedloom.experiments.benchmarks.scale", "--folder", folder]
    command += ["--case", json.dumps(asdict(case))]
    figures: Figures = printed(command)
    return figures


def print_table(part: str, rows: list[Row]) -> None:
    """Prints the rows of a part, with as many digits as their size needs."""
    print(f"\n{part}")
    widths = {name: max(len(name), 9) + 2 for name in rows[0]}
    print("".join(f"{name:>{width}}" for name, width in widths.items()))
    for row in rows:
        print("".join(f"{_short(row[name]):>{width}}" for name, width in widths.items()), flush=True)


def _short(value: Any) -> str:
    if isinstance(value, str) or value is None:
        return value or "-"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


if __name__ == "__main__":
    main()
