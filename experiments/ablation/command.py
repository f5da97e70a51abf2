"""`fedloom ablate`: runs a planned ablation, prints its table and returns its exit code."""

import logging
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ray.exceptions import RayError
from rich.table import Table

from fedloom.experiments.ablation.in_process import is_serial, run_in_process
from fedloom.experiments.ablation.launch import AblationEnd, resume_ablation, retry_failed, start_ablation
from fedloom.experiments.ablation.running import ResultsLocation, kind_of
from fedloom.experiments.ablation.view import TerminalView
from fedloom.experiments.store.ablations import Ablation
from fedloom.experiments.store.trials import FAILED, counted, trial_states
from fedloom.experiments.terminal import INFRASTRUCTURE, OK, complain, console, of_run_end, where, write_json
from fedloom.experiments.terminal.live import is_live
from fedloom.platform.federation.loop import RunFailedError
from fedloom.platform.results.copies import check_results
from fedloom.platform.results.lock import OwnershipLostError
from fedloom.platform.results.store import is_remote


def run_command(ablation: Ablation, args: Namespace) -> int:
    """Runs, resumes, retries or only shows the plan, depending on the arguments; returns the exit code."""
    if args.plan:
        _show_plan(ablation, args.json)
        return OK
    stored = args.resume if args.resume is not None else args.retry_failed
    configured = str(ablation.trials[0].config["results"])
    results = args.results if stored is not None else configured if is_remote(configured) else Path(configured)
    try:
        with TerminalView(quiet=args.json) as view, _repeated_warnings_once():
            view.doing("checking the trials, then starting Ray")
            view.console.print(f"ablation {ablation.ablation_id}: looking at {len(ablation.trials)} trials")
            if stored is None:
                end = start_ablation(ablation, results, view)
            else:
                again = resume_ablation if args.resume is not None else retry_failed
                end = again(ablation, results, view, changed_plugins=args.changed_plugins, take_over=args.take_over)
    except RayError as error:
        cause = " ".join(str(error).split())[:600]
        complain(f"the cluster was lost: {cause}; {_what_to_do(ablation.ablation_id, results)}")
        return INFRASTRUCTURE
    except OwnershipLostError as error:
        complain(str(error))
        return INFRASTRUCTURE
    _show_end(end, results, args.json)
    return of_run_end(end.kind)


class _Once(logging.Filter):
    """Passes a warning that many trials repeat only once."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        new = text not in self._seen
        self._seen.add(text)
        return new


@contextmanager
def _repeated_warnings_once() -> Iterator[None]:
    once, handlers = _Once(), list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(once)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(once)


def _show_plan(ablation: Ablation, as_json: bool) -> None:
    if as_json:
        trials = [
            {"index": t.index, "seed": t.seed, "setting": dict(t.setting), "overrides": t.overrides}
            for t in ablation.trials
        ]
        write_json({"ablation": ablation.name, "experiment": ablation.experiment, "trials": trials})
        return
    table = Table("trial", *ablation.axes, "seed", box=None)
    for trial in ablation.trials:
        table.add_row(str(trial.index), *(str(trial.setting[axis]) for axis in ablation.axes), str(trial.seed))
    screen = console()
    screen.print(table)
    screen.print(f"{len(ablation.trials)} trials of {ablation.experiment}; leave out --plan to run them")


def _show_end(end: AblationEnd, results: str | Path, as_json: bool) -> None:
    if as_json:
        counts = Counter(state.state for state in end.states)
        trials = [
            {"index": s.trial.index, "run_id": s.trial.run_id, "seed": s.trial.seed, "setting": dict(s.trial.setting),
             "state": s.state, "message": s.message}
            for s in end.states
        ]  # fmt: skip
        write_json({"ablation_id": end.ablation_id, "status": end.kind, "counts": dict(counts), "trials": trials})
        return
    if end.kind == "done":
        report, said = f"fedloom report {end.ablation_id}{where(results)}", counted(end.states)
        if is_live(console()):
            console().print(f"finished: {said}; tables, figures and page:\n  {report}")  # unwrapped, to be copied
        else:
            console().print(f"finished: {end.ablation_id} ({said}); tables, figures and page: {report}")
        return
    for line in complaints(end, results):
        complain(line)


def complaints(end: AblationEnd, results: str | Path) -> list[str]:
    """The lines about an ablation that is not done: its first failed trials, and what continues it."""
    bad = [s for s in end.states if s.state in FAILED]
    lines = [f"trial {s.trial.index} ({s.trial.label()}) {s.state}: {s.message}" for s in bad[:MOST_FAILED]]
    if len(bad) > MOST_FAILED:
        lines.append(f"and {len(bad) - MOST_FAILED} more")
    again = _what_to_do(end.ablation_id, results, end.kind)
    return [*lines, f"ablation {WORDS.get(end.kind, end.kind)} ({counted(end.states)}); {again}"]


def run_here(ablation: Ablation, results: str, *, quiet: bool) -> AblationEnd:
    """Runs a new ablation for the Python API and shows its trials: in this process if none has actors, else on Ray.

    Raises ValueError as `start_ablation` does, and RunFailedError if the cluster is lost or another driver takes over.
    """
    try:
        with TerminalView(quiet) as view, _repeated_warnings_once():
            view.doing("checking the trials")
            if not is_serial(ablation) or ablation.scheduler["kind"] != "none":
                return start_ablation(ablation, results, view)
            location = ResultsLocation(results, check_results(results))
            with suppress(KeyboardInterrupt):
                run_in_process(ablation, location, view, is_new=True)
            states = tuple(trial_states(location.root, ablation))
            return AblationEnd(ablation.ablation_id, kind_of(states), states)
    except RayError as error:
        cause = " ".join(str(error).split())[:600]
        raise RunFailedError(f"the cluster was lost: {cause}; {_what_to_do(ablation.ablation_id, results)}") from error
    except OwnershipLostError as error:
        raise RunFailedError(str(error)) from error


MOST_FAILED = 10
"""Maximum number of failed trials that are named at the end."""
WORDS = {"infrastructure": "incomplete"}
"""Replacements for kinds of ends that would be unclear in a sentence."""


def _what_to_do(ablation_id: str, results: str | Path, kind: str = "interrupted") -> str:
    again = "--resume" if kind == "interrupted" else "--retry-failed"
    return f"go on with: fedloom ablate {again} {ablation_id}{where(results)}"
