"""A trial of an ablation: a Tune trainable whose process is the run's server; its placement group holds its clients."""

import json
import os
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import torch
from ray import tune

from fedloom.actors.client import accept_shared_memory
from fedloom.actors.server import metered
from fedloom.experiments.runs.configuration import config_from_dict
from fedloom.experiments.store.trials import UNSENT
from fedloom.experiments.terminal import RUN_THREAD
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import RoundProgress
from fedloom.platform.results.copies import MirrorError, fetch
from fedloom.platform.results.files import ADVICE
from fedloom.platform.results.lock import OwnedError
from fedloom.platform.results.paths import RunPaths, remove_run
from fedloom.platform.results.store import local_root
from fedloom.platform.results.tables import is_done, read_runs
from fedloom.platform.runs.resuming import check_run_unowned, leave_finished
from fedloom.platform.runs.run import Resume, RunIdentity, Watcher, make_serial, run_to_end
from fedloom.platform.runs.run_files import COSTS, has_begun

STEP_S = 1.0
"""Seconds that Tune waits for a round before it checks whether to stop the trial."""

STOP_TIMEOUT_S = 8.0
"""Seconds within which the current round may finish when a trial is stopped; otherwise the round is lost."""

TRIAL = "trial"
END = "end"
MESSAGE = "message"
STAGE_ROUND = "stage_round"
"""Key of a result to Tune: the number of finished rounds in the stage in which a scheduler compares trials."""


@dataclass(frozen=True)
class Job:
    """The task of a trial's process, as plain data.

    Attributes:
        index: the trial's index in the plan.
        stage: the stage whose rounds a scheduler compares; None without a scheduler.
        replay: only report the rounds that the run has finished, for a new scheduler.
        resume: how the run is continued if it has begun.
    """

    index: int
    config: Mapping[str, Any]
    identity: RunIdentity
    stage: str | None = None
    replay: bool = False
    resume: Resume | None = None


class TrialActor(tune.Trainable):
    """Runs or resumes one run in a thread; `step` passes its rounds to Tune."""

    def setup(self, config: dict[str, Any], jobs: Mapping[int, Job] | None = None, folder: str = "") -> None:
        """Relative paths start at `folder`, if it exists here; otherwise at the folder where Ray was started."""
        assert jobs is not None, "given by tune.with_parameters"
        with suppress(OSError):
            os.chdir(folder)
        self._jobs = jobs
        self._start(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Continues with another trial in this process, which saves starting one; the previous trial has ended."""
        self._run.join()
        self._start(new_config)
        return True

    def _start(self, config: Mapping[str, Any]) -> None:
        self._run = RunThread(self._jobs[config[TRIAL]])
        self._run.start()

    def step(self) -> dict[str, Any]:
        return self._run.news()

    def cleanup(self) -> None:
        self._run.stop()


class RunThread:
    """Executes a run in a separate thread; independent of Tune, so that it can be tested without it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.config = config_from_dict(job.config)
        self._news: queue.Queue[dict[str, Any]] = queue.Queue()
        self._told: dict[str, Any] = {}
        """The latest round, which may wait in `_news`."""
        self._last: dict[str, Any] = {}
        """The latest result of `news`."""
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=RUN_THREAD, daemon=True)

    def start(self) -> None:
        """Starts the run."""
        self._thread.start()

    def join(self) -> None:
        """Waits until the run has ended."""
        self._thread.join()

    def stop(self) -> None:
        """Asks the run to end after its current round, and waits up to `STOP_TIMEOUT_S`."""
        self._stop.set()
        self._thread.join(STOP_TIMEOUT_S)

    def news(self) -> dict[str, Any]:
        """The next result of the run, or the last one again if there is none within `STEP_S`.

        The last result has `done` and says how the run ended. Raises the error of a run that crashed, after which its
        process cannot be reused.
        """
        try:
            self._last = self._news.get(timeout=STEP_S)
        except queue.Empty:
            if self._error is not None:
                raise self._error from None
        return dict(self._last)

    def _work(self) -> None:
        try:
            end, message = self._to_the_end()
        except BaseException as error:  # noqa: BLE001 - raised again in Tune's thread
            self._error = error
        else:
            self._news.put({**self._told, "done": True, END: end, MESSAGE: message})

    def _to_the_end(self) -> tuple[str, str]:
        accept_shared_memory()
        torch.set_num_threads(self.config.executor.threads)
        try:
            return self._start_or_resume()
        except MirrorError as error:  # the run ended, but its results were not uploaded
            return UNSENT, str(error)

    def _start_or_resume(self) -> tuple[str, str]:
        run_id = self.job.identity.run_id
        assert run_id is not None, "a trial's id is planned"
        paths = self._paths(run_id)
        if self.job.replay:
            self._tell_history(run_id)
            return "done", ""
        is_half_begun = paths.artifacts.exists() and not (paths.artifacts / COSTS).exists()
        if is_half_begun and (problem := _not_removed(paths)):
            return "refused", problem
        how = self.job.resume or Resume(run_id)
        if is_done(paths):  # an earlier process died before its status said so, or before its upload succeeded
            try:
                leave_finished(self.config, run_id, take_over=how.take_over)
            except OwnedError as error:
                return "refused", str(error)
            return "done", ""
        # A new scheduler first receives the earlier rounds, once the tables have been repaired.
        has_actors = self.config.executor.kind == "ray" and not self.config.dry_run
        make, watch = metered(run_id, self._tell) if has_actors else (make_serial, self._tell)
        watcher = Watcher(self._tell_history, watch, self._stop.is_set)
        end = run_to_end(self.config, make, watcher, how if paths.artifacts.exists() else None, self.job.identity)
        return UNSENT if end.kind == "infrastructure" else end.kind, end.message

    def _paths(self, run_id: str) -> RunPaths:
        try:
            return RunPaths(fetch(self.config.results, [run_id]), self.config.experiment, run_id)
        except ValueError as error:
            # The driver could reach the results, so the error is temporary and the trial may be started again.
            raise ConnectionError(str(error)) from error

    def _tell_history(self, run_id: str, _supernet_of: str = "") -> None:
        if self.job.stage is not None:
            for progress in finished_rounds(self.config, run_id):
                self._tell(progress)

    def _tell(self, progress: RoundProgress) -> None:
        self._told = figures(progress) | self._compared(progress)
        self._news.put(self._told)

    def _compared(self, progress: RoundProgress) -> dict[str, Any]:
        return {STAGE_ROUND: progress.round + 1} if progress.stage == self.job.stage else {}


def _not_removed(paths: RunPaths) -> str:
    """Removes a run that was killed during its first writes; returns the reason if the run stays, else empty text."""
    try:
        check_run_unowned(paths)
    except OwnedError as error:
        return str(error)
    if has_begun(paths):
        return f"{paths.artifacts / COSTS} is missing, which run {paths.run_id} had: {ADVICE}"
    remove_run(paths)
    return ""


def figures(progress: RoundProgress) -> dict[str, Any]:
    """The result of a round for Tune, without missing values."""
    known = {"metric": progress.metric, "loss": progress.loss}
    return {
        "stage": progress.stage,
        "round": progress.round,
        "rounds_total": progress.rounds_total,
        "wall_s": progress.wall_s,
        **{name: value for name, value in known.items() if value is not None},
    }


def finished_rounds(config: RunConfig, run_id: str) -> Iterator[RoundProgress]:
    """The rounds in the tables of a run, in order."""
    paths = RunPaths(local_root(config.results), config.experiment, run_id)
    rows = read_runs([paths], "rounds")
    totals = rows.groupby("stage")["round"].max() + 1
    names = [f.name for f in fields(RoundProgress) if f.name in rows.columns]
    for row in json.loads(rows.to_json(orient="records")):
        yield RoundProgress(rounds_total=int(totals[row["stage"]]), **{name: row[name] for name in names})
