"""Experiment trackers of a run (`tracking.to`): they get every finished round once it is stored.

Each tracker has a thread and a process of its own, so that nothing it does ends, slows or changes the run.
"""

import importlib.util
import json
import logging
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedloom.platform.federation.algorithm import Row
from fedloom.platform.federation.config import TrackingConfig
from fedloom.platform.federation.event_files import FINAL, scalars
from fedloom.platform.results.files import read_json, within, write_atomically
from fedloom.platform.results.paths import RunPaths
from fedloom.platform.results.tables import read_runs

logger = logging.getLogger(__name__)

FOLDER = "trackers"
"""The folder of a run's artefacts that records how many rounds each tracker has received."""
MOST_WAITING = 1000
"""Largest number of rounds that wait for a tracker; further ones are not sent."""
END_S, ALL_S, MODELS_S = 5.0, 30.0, 60.0
"""Seconds that the end of a run waits for a tracker's next answer, for all its answers, and for one about a model."""
GONE = "its process has ended"
PROCESS = Path(__file__).with_name("tracker_process.py")


def check_trackers(config: TrackingConfig) -> None:
    """Raises ValueError for a tracker whose package is not installed."""
    for name in config.processes:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # W&B's own folder in the working directory looks like a package
            package = name if name == "aim" else f'"fedloom[{name}]"'  # aim and fedloom need different filelocks
            raise ValueError(f"tracking.to has {name}, which is not installed: pip install {package}")
    if config.models and "aim" in config.to:
        raise ValueError("tracking.models=true: Aim stores no models; leave aim out of tracking.to")


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run that a tracker receives at its start."""

    id: str
    name: str
    tags: Sequence[str]
    group: str | None
    config: Mapping[str, Any]


class Trackers:
    """The trackers of a run; receives the rows of every round that is stored.

    A resumed run first sends the rounds that a tracker has missed, from its tables, and never sends a round twice.
    """

    def __init__(self, config: TrackingConfig, run: TrackedRun, paths: RunPaths, step: int) -> None:
        """`step` is the number of rounds in the run's tables."""
        self._step, self._models, self._paths = step, config.models, paths
        self._trackers = [_Tracker(name, config.project, run, paths) for name in config.processes]
        behind = [tracker.sent for tracker in self._trackers if tracker.sent < step]
        for at, values in _history(paths, min(behind)) if behind else ():
            for tracker in self._trackers:
                tracker.put(at, values)

    def add(self, rows: Sequence[Row]) -> None:
        """Sends a round's values; the values of a stage's end belong to its last round."""
        rounds = sum(table == "rounds" for table, _ in rows)
        if self._trackers and (values := scalars(rows)):
            self._send(self._step if rounds else self._step - 1, values)
        self._step += rounds

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.put(step, values, most=MOST_WAITING)

    def close(self, state: str) -> None:
        """Waits a few seconds for the trackers, and warns of the rounds that they lack."""
        if not self._trackers:
            return
        models = []
        if self._models and state == "done":
            rows = read_runs([self._paths], "models").drop_duplicates("file")
            for row in rows.to_dict("records"):
                named = "-".join(str(row[name]) for name in ("stage", "tier", "architecture") if row[name])
                try:
                    models.append((str(within(self._paths.artifacts, row["file"])), named.replace("/", "-")))
                except ValueError as error:  # in a stranger's results
                    logger.warning("a model is not sent to trackers: %s", error)
        for tracker in self._trackers:
            tracker.end(state, models)
        began_s = time.monotonic()
        for tracker in self._trackers:
            tracker.wait(began_s, ALL_S if state == "done" else END_S, MODELS_S if models else END_S)


def _history(paths: RunPaths, first: int) -> Iterator[tuple[int, Mapping[str, float]]]:
    """The values of a run's rounds in its tables, from a step on."""
    tables = ((name, read_runs([paths], name)) for name in ("rounds", "evaluations"))
    records = {name: json.loads(rows.to_json(orient="records", double_precision=15)) for name, rows in tables}
    steps = {(row["stage"], row["round"]): step for step, row in enumerate(records["rounds"])}
    last_of_stage = {stage: step for (stage, _), step in steps.items()}
    # Stages that may end early are scored after every round, and the score is sent with the round.
    configs = [json.loads(config) for config in read_runs([paths], "runs")["config"].dropna()]
    judged = any(config["stop"]["patience"] is not None or config["stop"]["target"] is not None for config in configs)
    rows_of: dict[int, list[Row]] = {step: [("rounds", row)] for step, row in enumerate(records["rounds"])}
    for row in records["evaluations"]:
        scored_after = judged and row["client_id"] is None and row["stage"] != FINAL
        round_ = row["round"] - (scored_after and row["round"] > 0)
        step = steps.get((row["stage"], round_), last_of_stage.get(row["stage"]))
        if step is not None:
            rows_of[step].append(("evaluations", row))
    for step, rows in rows_of.items():
        if step >= first:
            yield step, scalars(rows)


class TrackerError(Exception):
    """The tracker has raised an error, or its process is gone."""


class _Tracker:
    """One tracker: its process, and the thread that talks to it."""

    def __init__(self, name: str, project: str, run: TrackedRun, paths: RunPaths) -> None:
        self.name, self._file = name, paths.artifacts / FOLDER / f"{name}.json"
        begun: dict[str, Any] = {"project": project, "handle": None, "url": None, "rounds": 0, "lacking": []}
        self._told = begun | _earlier(self._file, project)
        self._lacking = {*self._told["lacking"]}
        """Rounds before the last one sent that the tracker does not have."""
        self._last = int(self._told["rounds"]) - 1
        self.sent = min(self._lacking, default=self._last + 1)
        """The first round that was not sent."""
        self._begin = {**asdict(run), "project": project, "handle": self._told["handle"]}
        self._queue: queue.Queue[tuple[int, Mapping[str, float]]] = queue.Queue()
        self._rounds, self._unsent = set[int](), set[int]()
        self._end: tuple[str, Sequence[tuple[str, str]]] | None = None
        self._answered_s = time.monotonic()
        self._warned, self._over = False, False
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float], most: float = math.inf) -> None:
        """Queues a round, unless an earlier process has sent it or `most` rounds already wait."""
        if step <= self._last and step not in self._lacking and step not in self._rounds:
            return
        self._rounds.add(step)
        self._unsent.add(step)
        if self._queue.qsize() < most:
            self._queue.put((step, values))

    def end(self, state: str, models: Sequence[tuple[str, str]]) -> None:
        """Notes that the run has ended, so that nothing more will be queued."""
        self._end = state, models
        self._answered_s = time.monotonic()

    def wait(self, began_s: float, most_s: float, patience_s: float) -> None:
        """Waits until the tracker has all rounds, or does not answer; then its process is killed."""
        while self._thread.is_alive():
            now_s = time.monotonic()
            if now_s - self._answered_s > patience_s or now_s - began_s > max(most_s, patience_s):
                self._over = True
                self._warn(f"it has not answered for {now_s - self._answered_s:.0f} s")
                self._kill()
                break
            self._thread.join(0.05)
        if self._unsent:
            logger.warning(
                "%d of %d rounds were not sent to %s: the tables have them all, and `fedloom resume` of a run that is "
                "not done sends what is missing",
                *(len(self._unsent), len(self._rounds), self.name),
            )

    def _work(self) -> None:
        try:
            self._start()
            while True:
                try:
                    step, values = self._queue.get(timeout=0.1)
                except queue.Empty:
                    if self._end is not None and self._queue.empty():
                        break
                    continue
                self._tried({"step": step, "values": values}, step)
            assert self._end is not None, "the loop has seen it"
            state, models = self._end
            for path, name in models:
                self._tried({"model": path, "name": name})
            self._tried({"end": state})
        except (TrackerError, OSError, ValueError) as error:
            if not self._over:
                self._warn(str(error))
        finally:
            self._kill()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(PROCESS), self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C goes to the run only
        )
        self._answer()
        self._told |= self._ask({"begin": self._begin})
        self._write_down()

    def _tried(self, message: Mapping[str, Any], step: int | None = None) -> None:
        """Sends a message; the first error that the tracker answers is logged, and the next message may succeed."""
        answer = self._ask(message, raises=False)
        if "error" in answer:
            self._warn(answer["error"])
        elif step is not None:
            self._unsent.discard(step)
            self._last = max(self._last, step)
            lacking = sorted(each for each in ({*self._unsent} | self._lacking) - {step} if each < self._last)
            self._lacking = {*lacking}
            self._told |= {"rounds": self._last + 1, "lacking": lacking}
            self._write_down()

    def _ask(self, message: Mapping[str, Any], *, raises: bool = True) -> dict[str, Any]:
        assert self._process is not None, "it has been started"
        assert self._process.stdin is not None, "it is a pipe"
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise TrackerError(GONE) from error
        return self._answer(raises=raises)

    def _answer(self, *, raises: bool = True) -> dict[str, Any]:
        assert self._process is not None, "it has been started"
        assert self._process.stdout is not None, "it is a pipe"
        line = self._process.stdout.readline()
        self._answered_s = time.monotonic()
        if not line:
            raise TrackerError(GONE)
        answer: dict[str, Any] = json.loads(line)
        if raises and "error" in answer:
            raise TrackerError(answer["error"])
        return answer

    def _write_down(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, json.dumps(self._told).encode(), durable=False)

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("%s: %s; the run goes on without it", self.name, text)

    def _kill(self) -> None:
        """Ends the process and those that it has started."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        if not self._over:  # otherwise the thread may be writing
            with suppress(OSError, subprocess.TimeoutExpired):
                process.communicate(timeout=1.0)
                return
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _earlier(file: Path, project: str) -> dict[str, Any]:
    """What an earlier process of the run recorded, if it was for the same project."""
    try:
        told = read_json(file)
        if told["project"] == project and all(type(step) is int for step in (told["rounds"], *told["lacking"])):
            return {name: told[name] for name in ("handle", "url", "rounds", "lacking")}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return {}
