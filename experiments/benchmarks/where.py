"""Where a round's time goes, with the serial executor and with Ray actors: training, sums, calls, rows, checkpoints.

    python -m fedloom.experiments.benchmarks.where [--cases cnn logistic tiny] [--actors 2] [--precision bfloat16]

Prints a table per case: median milliseconds per round by part, in the process that runs the loop, and the work that
clients report per actor. With 0 actors everything is in one process. The clock is read around the platform's own
functions; parts within parts are not counted twice. The last line is one JSON object.
"""

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from statistics import median
from threading import get_ident
from typing import Any

import ray

from fedloom.actors import pool
from fedloom.actors.address import stay_on_loopback
from fedloom.actors.cluster import connected
from fedloom.actors.server import make_pool
from fedloom.experiments.benchmarks.cases import CASES, run_config
from fedloom.experiments.benchmarks.processes import printed
from fedloom.platform.averaging.average import WeightedSums
from fedloom.platform.clients import execution
from fedloom.platform.clients.assignments import ClientResult
from fedloom.platform.federation.algorithm import TrainingStage
from fedloom.platform.federation.loop import Loop
from fedloom.platform.federation.recorder import Recorder
from fedloom.platform.results.status import StatusFile
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import Watcher, make_serial, start_run

WARM_UP = 3
"""First rounds that are left out, because in them actors start and memory is allocated."""

PARTS: tuple[tuple[str, Any, str], ...] = (
    ("plan", TrainingStage, "plan"),
    ("ship: weights to the object store", pool.ActorPool, "_share"),
    ("ship: calls of actors", pool.ActorPool, "_dispatch"),
    ("wait for actors", ray, "wait"),
    ("unpack results", pool, "unpack"),
    ("add up chunks", WeightedSums, "merge"),
    ("average", TrainingStage, "merge"),
    ("rows of clients", ClientResult, "row"),
    ("status", StatusFile, "write"),
    ("wait for rows and checkpoint of the round before", Recorder, "wait"),
    ("train and add, in this process", execution, "run_chunk"),
)
CLIENTS = "train: clients' work, per actor"
ADDED = "add: updates to sums, per actor"
REST = "everything else"


class Clock:
    """Seconds by part since the last lap; a part within a part counts for the inner one."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seconds: dict[str, float] = {}
        self.since = time.perf_counter()
        self.laps: list[dict[str, float]] = []

    def lap(self) -> None:
        """Ends a round."""
        self._count()
        self.laps.append(self.seconds)
        self.seconds = {}

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Counts the block as this part."""
        self._count()
        self.open.append(part)
        try:
            yield
        finally:
            self._count()
            self.open.pop()

    def _count(self) -> None:
        now = time.perf_counter()
        part = self.open[-1] if self.open else REST
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.since
        self.since = now


def timed(clock: Clock, part: str, function: Callable[..., Any], thread: int) -> Callable[..., Any]:
    """The function, wrapped so that the clock counts its calls from the loop's thread as this part."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != thread:  # rows and checkpoints are written in parallel with the next round
            return function(*args, **kwargs)
        with clock.within(part):
            return function(*args, **kwargs)

    return call


def main() -> None:
    """Measures each case in a process of its own and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["cnn", "logistic", "tiny"], choices=list(CASES))
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args.one, args.actors, args.precision)))
        return
    figures = {case: in_process(case, args.actors, args.precision) for case in args.cases}
    for case, parts in figures.items():
        whole = parts.pop("round")
        print(f"\n{case}: a round of {whole:.2f} ms")
        for part, ms in parts.items():
            print(f"  {part:<52} {ms:>8.2f} ms {ms / whole:>6.1%}")
        parts["round"] = whole
    print(json.dumps(figures))


def in_process(case: str, actors: int, precision: str) -> dict[str, float]:
    """The figures of a case, measured in a separate process."""
    command = [sys.executable, "-m", "fedloom.experiments.benchmarks.where", "--one", case]
    command += ["--actors", str(actors), "--precision", precision]
    figures: dict[str, float] = printed(command)
    return figures


def measured(case: str, actors: int, precision: str) -> dict[str, float]:
    """Median milliseconds per round, by part."""
    stay_on_loopback("local")
    logging.disable(logging.WARNING)
    clock = Clock()
    for part, owner, name in PARTS:
        setattr(owner, name, timed(clock, part, getattr(owner, name), get_ident()))
    round_of = Loop._round

    def whole_round(*args: Any) -> Any:
        after = round_of(*args)
        clock.lap()
        return after

    setattr(Loop, "_round", whole_round)  # noqa: B010
    with tempfile.TemporaryDirectory() as results:
        config = run_config(CASES[case], actors, results, precision)
        watcher = Watcher(lambda _run_id, _origin: None, lambda _progress: None)
        if actors:
            with connected(config.ray):
                start_run(config, make_pool, watcher)
        else:
            start_run(config, make_serial, watcher)
        reported = work_of_actors(Path(results), max(1, actors))
    laps = clock.laps[WARM_UP:]
    parts = {part: 1e3 * median(lap.get(part, 0.0) for lap in laps) for part in [*(p for p, _, _ in PARTS), REST]}
    whole = 1e3 * median(sum(lap.values()) for lap in laps)
    return {"round": whole, **{part: ms for part, ms in parts.items() if ms > 0}, **reported}


def work_of_actors(results: Path, actors: int) -> dict[str, float]:
    """Median milliseconds per round that clients report for their work, divided evenly among the actors."""
    clients = read_table(results, "clients")
    clients = clients[clients["round"] >= WARM_UP]
    sums = clients.groupby("round")[["wall_s", "overhead_s"]].sum() * 1e3 / actors
    return {CLIENTS: float(sums["wall_s"].median()), ADDED: float(sums["overhead_s"].median())}


if __name__ == "__main__":
    main()
