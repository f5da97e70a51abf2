"""Writes finished rounds to disk while the next round runs.

A round is reported only when its rows are in the journal and, if it is one of every `checkpoint.every`, its state in
the checkpoint. One thread of the run's process writes both, in order, with at most one round waiting: clients do not
wait for the disk, and a crash loses the round in progress and what was reported since the last checkpoint.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.platform.federation.algorithm import KeptModel, Row, RunState
from fedloom.platform.federation.event_files import Events, NoEvents
from fedloom.platform.plugins import check_keys
from fedloom.platform.results.checkpoint import Saved, save_checkpoint, save_model
from fedloom.platform.results.files import from_json
from fedloom.platform.results.paths import STATE_FILE
from fedloom.platform.results.writer import Position, RunWriter
from fedloom.platform.words import naming

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """A round's results: its rows and models, and the state after it (None: no checkpoint)."""

    rows: Sequence[Row]
    models: Sequence[tuple[Mapping[str, Any], KeptModel]] = ()
    state: RunState | None = None
    first: Callable[[], None] = lambda: None
    """Called before the state is saved; after a crash in between, the resumed run calls it again."""
    then: Callable[[], None] = lambda: None
    """Called when everything is on disk."""
    gpus: frozenset[str] = frozenset()
    """The GPUs that its clients were trained on, with their software."""


class Recorder:
    """The single thread that uses a run's writer and checkpoint."""

    def __init__(
        self,
        writer: RunWriter,
        config: Mapping[str, Any] | None = None,
        saved: Saved | None = None,
        events: Events | None = None,
        stored: Callable[[], None] = lambda: None,
        sent: Callable[[Sequence[Row]], None] = lambda _: None,
    ) -> None:
        """`config` is stored in every checkpoint, which cannot be resumed with another configuration.

        `stored` is called when a round and its state are on disk and nothing is being written; it raises an error to
        stop the run. `sent` is then called with the round's rows.
        """
        self.stored, self.sent = stored, sent
        self.events = events or NoEvents()
        self.writer, self.config, self.saved = writer, config or {}, saved
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._waiting: Record | None = None
        self._pending: Future[None] | None = None

    def submit(self, record: Record) -> None:
        """Queues a round after waiting for the previous one; raises the previous one's error."""
        self.wait()
        self._waiting = record

    def start(self) -> None:
        """Starts writing the queued round.

        Called after the next round's work has been started, because two threads of one interpreter slow each other
        down.
        """
        if self._waiting is not None:
            record, self._waiting = self._waiting, None
            self._pending = self._thread.submit(self._write, record)

    def wait(self) -> None:
        """Returns when all submitted rounds are on disk; raises their errors."""
        self.start()
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Waits for all rounds and ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self.events.close()

    def _note_gpus(self, gpus: frozenset[str]) -> None:
        """Adds GPUs to those in the run's row; warns once, also after a resume, if they are of several kinds."""
        known = from_json(str(self.writer.run_row.get("gpus") or "[]"), self.writer.paths.table("runs"))
        new = sorted(gpus.difference(known))
        if new:
            self.writer.update_run(gpus=json.dumps([*known, *new]))
        if len(known) < 2 <= len(known) + len(new):
            logger.warning(
                "the run's clients are trained on GPUs of several kinds, between which results may differ in their "
                "last bits: %s (the column gpu of clients says which)",
                "; ".join([*known, *new]),
            )

    def _write(self, record: Record) -> None:
        writer, paths = self.writer, self.writer.paths
        with naming(paths.artifacts):
            if record.gpus:
                self._note_gpus(record.gpus)
            for table, row in record.rows:
                writer.add(table, **row)
            for names, model in record.models:
                card = {
                    "tier": model.tier,
                    "architecture": model.architecture,
                    "macs": int(model.macs),
                    "parameters": model.parameters,
                }
                stored = save_model(paths, model.name, model.tensors, card, writer.manifest.replacing)
                writer.add("models", **names, **card, file=stored.file, hash=stored.hash)
            position = writer.commit()
            # Events before the state: if a crash repeats the round, its events replace these.
            self.events.add(record.rows)
            record.first()
            if record.state is not None:
                folder = paths.checkpoint
                self.saved = save_state(folder, record.state, position, self.config, paths.run_id, self.saved)
                writer.manifest.require(folder / STATE_FILE)
                self.stored()
            self.sent(record.rows)
            record.then()


def save_state(
    folder: Path,
    state: RunState,
    position: Position,
    config: Mapping[str, Any],
    run_id: str,
    previous: Saved | None = None,
) -> Saved:
    """Saves a state as the checkpoint of a run in the folder, with its configuration and the position in its tables.

    Raises ValueError for JSON values whose keys are no texts: after a resume they would be.
    """
    check_keys(state.data, "state.data")
    data = {
        "run_id": run_id,
        "stage": state.stage,
        "round": state.round,
        "simulated_s": state.simulated_s,
        "data": state.data,
        "position": dict(position),
        "config": config,
    }
    return save_checkpoint(folder, state.groups, data, previous)


def restored_state(checkpoint_data: dict[str, Any], groups: dict[str, Any]) -> RunState:
    """The state from a checkpoint of `save_state`."""
    names = ("stage", "round", "simulated_s", "data")
    return RunState(groups=groups, **{name: checkpoint_data[name] for name in names})
