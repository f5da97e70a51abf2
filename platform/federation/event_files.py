"""TensorBoard event files of a run (`tensorboard=true`): its rounds and scores.

They only repeat the tables' content, so errors in writing them do not stop a run.
"""

import importlib.util
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from fedloom.platform.federation.algorithm import Row
from fedloom.platform.words import why

logger = logging.getLogger(__name__)

FOLDER = "tensorboard"
SCALARS = ("loss", "metric", "bytes_down", "bytes_up", "beta", "lr", "wall_s", "simulated_s")
"""The columns of `rounds` that are written as curves, by stage."""
FINAL = "evaluation"
"""The stage whose rows of `evaluations` are the run's final scores."""
CONFIGURATION = "configuration"


class Events(Protocol):
    """Receives the rows of finished rounds."""

    def add(self, rows: Sequence[Row]) -> None:
        """Receives the rows of a round or of a stage's end; does not raise."""
        ...

    def close(self) -> None:
        """Called after the last rows."""
        ...


class NoEvents:
    """Ignores all rows."""

    def add(self, rows: Sequence[Row]) -> None:
        pass

    def close(self) -> None:
        pass


def check_event_files() -> None:
    """Raises ValueError if the package for event files is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise ValueError("tensorboard=true needs the package tensorboardX: install it, or set tensorboard=false")


class EventFiles:
    """Writes the events of one process's part of a run, unbuffered.

    The global step counts the run's rounds over all of its stages. A resumed run starts a new file with a marker that
    makes readers discard the events of earlier files from its first step on.
    """

    def __init__(self, folder: Path, step: int, config: Mapping[str, Any]) -> None:
        """`step` is the number of rounds that the run has finished."""
        self.step, self._folder = step, folder
        self._file: Any = None
        try:
            self._open(folder, config)
        except (OSError, ValueError, TypeError) as error:
            self._give_up(error)

    def _open(self, folder: Path, config: Mapping[str, Any]) -> None:
        # Imported only if needed. SummaryWriter is not used, because it queues events for a thread: a crash would lose
        # the queue and leave a gap before the events of the resumed run.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import text

        folder.mkdir(parents=True, exist_ok=True)
        # Readers sort files by name, which holds the opening time in seconds; the step orders files of the same second.
        self._file = EventsWriter(str(folder / "events"), filename_suffix=f".{self.step:09d}")
        self._file.write_event(Event(step=self.step, session_log=SessionLog(status=SessionLog.START)))
        self._write(text(CONFIGURATION, f"```\n{json.dumps(config, indent=1)}\n```"), self.step)
        self._file.flush()

    def add(self, rows: Sequence[Row]) -> None:
        """Writes a round's curves and final scores at the round's step."""
        rounds = sum(table == "rounds" for table, _ in rows)
        if self._file is not None and rounds:
            from tensorboardX.summary import scalar

            try:
                for tag, value in scalars(rows).items():
                    self._write(scalar(tag, value), self.step)
                self._file.flush()
            except (OSError, ValueError, TypeError) as error:
                self._give_up(error)
        self.step += rounds

    def _write(self, summary: Any, step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._file.write_event(Event(wall_time=time.time(), step=step, summary=summary))

    def _give_up(self, error: Exception) -> None:
        logger.warning("no more TensorBoard events of this run are written: %s", why(error, self._folder))
        self.close()

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                logger.warning("the TensorBoard event file could not be closed: %s", why(error, self._folder))


def scalars(rows: Sequence[Row]) -> dict[str, float]:
    """A round's values by tag: its columns (STAGE/COLUMN), its scores, and its final scores (evaluation/MODEL/...)."""
    values: dict[str, float] = {}
    for table, row in rows:
        if table == "rounds":
            known = {name: row[name] for name in SCALARS if row.get(name) is not None}
            values |= {f"{row['stage']}/{name}": float(value) for name, value in known.items()}
    scores = [row for table, row in rows if table == "evaluations" and row.get("value") is not None]
    scores = [row for row in scores if row.get("detail") is None]
    final = [row for row in scores if row["stage"] == FINAL]
    return values | mean_scores([row for row in scores if row["stage"] != FINAL]) | final_scores(final)


def mean_scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """A round's scores by tag STAGE/SPLIT/METRIC: the mean of the server's over architectures, or else of the clients'.

    The last round of a stage has scores of the models before and after it: the later ones count.
    """
    by_tag: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("split") is not None:
            by_tag.setdefault(f"{row['stage']}/{row['split']}/{row['metric']}", []).append(row)
    means: dict[str, float] = {}
    for tag, scores in by_tag.items():
        latest = [row for row in scores if row["round"] == max(row["round"] for row in scores)]
        central = [row for row in latest if row.get("client_id") is None]
        means[tag] = fmean(float(row["value"]) for row in central or latest)
    return means


def final_scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The server's final scores by tag, or the unweighted mean over clients if only clients have scores."""
    central = [row for row in rows if row.get("client_id") is None]
    if central:
        return {_tag(row, _whose(row)): float(row["value"]) for row in central}
    by_tag: dict[str, list[float]] = {}
    for row in rows:
        by_tag.setdefault(_tag(row, "mean_over_clients"), []).append(float(row["value"]))
    return {tag: fmean(values) for tag, values in by_tag.items()}


def _whose(row: Mapping[str, Any]) -> str:
    """The tier or target that a model is for, or its architecture if there is none."""
    tier = row.get("tier")
    return str(row.get("architecture")) if tier in (None, "server") else str(tier)


def _tag(row: Mapping[str, Any], whose: str) -> str:
    parts = (FINAL, row["model"], whose, row.get("split"), row["metric"])
    return "/".join(str(part) for part in parts if part is not None)
