"""Makes finished rounds safe on disk while the next one is at work.

A round is told of (and counts) when its rows are in the journal and its state in the checkpoint. Both are written by
one thread of the run's one process, in order, and at most one round waits: the clients need not wait for the disk, and
a crash loses nothing that was told of, and no more than the round in progress.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.platform.federation.event_files import Events, NoEvents
from fedloom.platform.federation.stage import KeptModel, Row
from fedloom.platform.federation.state import RunState
from fedloom.platform.results.checkpoint import Saved, save_checkpoint
from fedloom.platform.results.models import save_model
from fedloom.platform.results.writer import RunWriter


@dataclass(frozen=True)
class Record:
    """What a round leaves: its rows and models, and the state after it (None: no checkpoint)."""

    rows: Sequence[Row]
    models: Sequence[tuple[Mapping[str, Any], KeptModel]] = ()
    state: RunState | None = None
    first: Callable[[], None] = lambda: None
    """Called before the state is saved: after a crash in between it is called again."""
    then: Callable[[], None] = lambda: None
    """Called when all of it is safe."""


class Recorder:
    """The one thread that touches a run's writer and checkpoint."""

    def __init__(
        self,
        writer: RunWriter,
        config: Mapping[str, Any] | None = None,
        saved: Saved | None = None,
        events: Events | None = None,
    ) -> None:
        """`config` goes into every checkpoint: it must not be resumed with another."""
        self.events = events or NoEvents()
        self.writer, self.config, self.saved = writer, config or {}, saved
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._waiting: Record | None = None
        self._pending: Future[None] | None = None

    def submit(self, record: Record) -> None:
        """Hands over a round, once the one before it is safe; raises what went wrong with that one."""
        self.wait()
        self._waiting = record

    def start(self) -> None:
        """Begins to write what was handed over.

        Called when the next round's work is on its way: two threads of one interpreter would only hold each other up.
        """
        if self._waiting is not None:
            record, self._waiting = self._waiting, None
            self._pending = self._thread.submit(self._record, record)

    def wait(self) -> None:
        """Returns when everything handed over is safe; raises what went wrong."""
        self.start()
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Waits, and ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self.events.close()

    def _record(self, record: Record) -> None:
        for table, row in record.rows:
            self.writer.add(table, **row)
        for place, model in record.models:
            self.writer.add("models", **place, **self._store(model))
        position = self.writer.commit()
        # Before the state: a round that is done again after a crash takes the place of these events.
        self.events.add(record.rows)
        record.first()
        if record.state is not None:
            self._checkpoint(record.state, position)
        record.then()

    def _store(self, model: KeptModel) -> dict[str, Any]:
        card = {
            "tier": model.tier,
            "architecture": model.architecture,
            "macs": int(model.macs),
            "parameters": model.parameters,
        }
        file = save_model(self.writer.paths, model.name, model.tensors, card)
        return {**card, "file": file.file, "hash": file.hash}

    def _checkpoint(self, state: RunState, position: Mapping[str, int]) -> None:
        self.saved = save_state(self.writer.paths.checkpoint, state, position, self.config, self.saved)


def save_state(
    folder: Path,
    state: RunState,
    position: Mapping[str, int],
    config: Mapping[str, Any],
    previous: Saved | None = None,
) -> Saved:
    """A state as a checkpoint in the folder, with the rows and the configuration that it stands for."""
    data = {
        "stage": state.stage,
        "round": state.round,
        "simulated_s": state.simulated_s,
        "data": state.data,
        "position": dict(position),
        "config": config,
    }
    return save_checkpoint(folder, state.bags, data, previous)


def restored_state(checkpoint_data: dict[str, Any], bags: dict[str, Any]) -> RunState:
    """The state that a recorder saved."""
    names = ("stage", "round", "simulated_s", "data")
    return RunState(bags=bags, **{name: checkpoint_data[name] for name in names})
