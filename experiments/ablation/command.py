"""`fedloom ablate`: from the planned ablation to its end, its table and its exit code."""

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fedloom.experiments.ablation.launch import AblationEnd, resume_ablation, retry_failed, start_ablation
from fedloom.experiments.ablation.store import Ablation, TrialState
from fedloom.experiments.ablation.view import AblationView
from fedloom.experiments.exit_codes import OK, of_run_end
from fedloom.experiments.show import console, where, write_json
from fedloom.platform.results.target import is_remote


def run_command(ablation: Ablation, args: Namespace) -> int:
    """Runs, resumes, retries or only shows the plan, as the command line asks; the exit code."""
    if args.plan:
        _show_plan(ablation, args.json)
        return OK
    stored = args.resume if args.resume is not None else args.retry_failed
    given = str(ablation.trials[0].config["results"])
    results = args.results if stored is not None else given if is_remote(given) else Path(given)
    go = resume_ablation if args.resume is not None else retry_failed if stored is not None else start_ablation
    view = AblationView(quiet=args.json)
    try:
        end = go(ablation, results, view)
    finally:
        view.close()
    _show_end(end, results, args.json)
    return of_run_end(end.kind)


def _show_plan(ablation: Ablation, as_json: bool) -> None:
    if as_json:
        write_json({"ablation_id": ablation.ablation_id, "trials": [_planned(t) for t in ablation.trials]})
        return
    table = Table("trial", *ablation.axes, "seed", box=None)
    for trial in ablation.trials:
        table.add_row(str(trial.index), *(str(trial.setting[axis]) for axis in ablation.axes), str(trial.seed))
    screen = console()
    screen.print(table)
    screen.print(f"{len(ablation.trials)} trials of {ablation.experiment}; leave out --plan to run them")


def _planned(trial: Any) -> dict[str, Any]:
    return {"index": trial.index, "seed": trial.seed, "setting": dict(trial.setting), "overrides": trial.overrides}


def _show_end(end: AblationEnd, results: str | Path, as_json: bool) -> None:
    counts = Counter(state.state for state in end.states)
    if as_json:
        trials = [
            {"index": s.trial.index, "run_id": s.trial.run_id, "seed": s.trial.seed, "setting": dict(s.trial.setting),
             "state": s.state, "message": s.message}
            for s in end.states
        ]  # fmt: skip
        write_json({"ablation_id": end.ablation_id, "status": end.kind, "counts": dict(counts), "trials": trials})
        return
    said = ", ".join(f"{number} {state}" for state, number in counts.items())
    here = where(results)
    if end.kind == "done":
        report = f"fedloom report {end.ablation_id}{here}"
        console().print(f"finished: {end.ablation_id} ({said}); tables, figures and page: {report}")
        return
    for line in _unfinished(end.states):
        sys.stderr.write(f"fedloom: {line}\n")
    sys.stderr.write(f"fedloom: ablation {end.kind} ({said}); {_what_to_do(end, here)}\n")


def _unfinished(states: Sequence[TrialState], most: int = 10) -> list[str]:
    bad = [s for s in states if s.state in ("failed", "refused", "died")]
    lines = [f"trial {s.trial.index} ({s.trial.label()}) {s.state}: {s.message}" for s in bad[:most]]
    return [*lines, f"and {len(bad) - most} more"] if len(bad) > most else lines


def _what_to_do(end: AblationEnd, here: str) -> str:
    again = "--resume" if end.kind == "interrupted" else "--retry-failed"
    return f"go on with: fedloom ablate {again} {end.ablation_id}{here}"
