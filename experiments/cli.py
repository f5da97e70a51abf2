"""The `fedloom` command: one function per subcommand."""

import argparse
import atexit
import gc
import json
import logging
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from fedloom.experiments.arguments import AFTER_DEMO, DEMO, Handler, build_parser, check_typed, parse
from fedloom.experiments.runs.overrides import last_values
from fedloom.experiments.terminal import (
    CONFIGURATION,
    EXPLAINED,
    INTERRUPTED,
    OK,
    RUN_THREAD,
    complain,
    explained,
    of_run_end,
    stop_printing,
    tell_at_once,
    while_read,
)
from fedloom.platform.plugins import blaming_own
from fedloom.platform.words import PrintableFormatter, naming


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, runs the command and exits with its code."""
    # The working directory holds a user's own rules and spaces; Ray's workers use the driver's path as well.
    sys.path.append(os.getcwd())
    # Makes torch allocate large tensors in huge pages, also in the workers that this process starts: a supernet of
    # 300 MB has 70 000 small pages, whose first access costs more than averaging does.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        args = parse(build_parser(HANDLERS), arguments)
        signal.signal(signal.SIGTERM, _interrupt)
        if args.quiet:
            stop_printing()
        handler = _Handler()
        handler.setFormatter(PrintableFormatter("fedloom: %(message)s"))
        logging.basicConfig(level=logging.ERROR if args.quiet else logging.WARNING, handlers=[handler])
        check_typed(args)
        with blaming_own(), naming(getattr(args, "out", None) or getattr(args, "results", None) or "."):
            code = args.command(args)
    except BrokenPipeError:
        stop_printing()
        code = OK
    except EXPLAINED as error:
        explanation = explained(error)
        if explanation is None or (
            isinstance(error, ValueError | RecursionError) and os.environ.get("FEDLOOM_TRACEBACK")
        ):
            raise
        code, line = explanation
        complain(line)
    except KeyboardInterrupt:
        complain("interrupted")
        code = INTERRUPTED
    atexit.register(gc.freeze)  # otherwise a last collection scans all of torch: a sixth of a refused command's time
    # Registered last and so called first: a second Ctrl-C while Ray ends would print a traceback.
    for number in (signal.SIGINT, signal.SIGTERM):
        atexit.register(signal.signal, number, signal.SIG_IGN)
    if any(thread.name == RUN_THREAD for thread in threading.enumerate()):
        # It is in a round that nobody waits for, and torch aborts a process that ends while its threads compute.
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


class _Handler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, so that warnings appear above a view while one is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _interrupt(_signal: int, _frame: Any) -> None:
    # Slurm, Kubernetes and docker stop a run with SIGTERM; it ends as after Ctrl-C.
    raise KeyboardInterrupt


class _WhileRead:
    """Shows a run while its output has a reader; afterwards the run continues without output (`fedloom run | head`)."""

    def __init__(self, view: Any) -> None:
        self._view = view

    def doing(self, what: str) -> None:
        while_read(self._view.doing, what)

    def stages(self, names: Sequence[str]) -> None:
        while_read(self._view.stages, names)

    def started(self, run_id: str, supernet_of: str) -> None:
        while_read(self._view.started, run_id, supernet_of)

    def round(self, progress: Any) -> None:
        while_read(self._view.round, progress)

    def waiting(self, message: str) -> None:
        while_read(self._view.waiting, message)

    def end(self, end: Any, results: str) -> None:
        while_read(self._view.end, end, results)

    def finished(self, run_id: str, results: str, renamed: Any) -> None:
        while_read(self._view.finished, run_id, results, renamed)


@contextmanager
def _run_view(args: argparse.Namespace, doing: str) -> Iterator[_WhileRead]:
    """Shows a run's view, starting before torch is imported; restores the terminal afterwards, even after an error."""
    from fedloom.experiments.show import RunView

    with RunView(as_json=args.json) as view:
        watched = _WhileRead(view)
        watched.doing(doing)
        yield watched


def _here(args: argparse.Namespace, runs: Sequence[str] | None, *, tensors: bool) -> Path:
    """The results folder on this machine; for results at a URL, downloads the runs first."""
    if isinstance(args.results, Path):
        return args.results
    from fedloom.platform.results.copies import fetch

    return fetch(args.results, runs, tensors=tensors, ablations=True)


# The commands import torch and Ray themselves, so that `fedloom --help` answers at once.


def _run(args: argparse.Namespace) -> int:
    with _run_view(args, "loading torch and the configuration") as view:
        gc.disable()  # importing torch takes a sixth less time without garbage collection
        try:
            from fedloom.experiments.runs.configuration import compose_config, tell_of_attack

            config = compose_config(args.overrides)
            tell_of_attack(config, args.overrides)
        finally:
            gc.enable()
        return _execute(view, config, None)


def _resume(args: argparse.Namespace) -> int:
    with _run_view(args, "looking up the run") as view:
        return _resumed(args, view)


def _resumed(args: argparse.Namespace, view: _WhileRead) -> int:
    from fedloom.experiments.runs.configuration import change_stored, stored_config

    run_id, stored = stored_config(args.results, args.run, args.overrides)
    config = change_stored(stored, args.overrides)
    from fedloom.platform.runs.resuming import is_finished, leave_finished

    if is_finished(config, run_id):
        view.finished(run_id, config.results, leave_finished(config, run_id, take_over=args.take_over))
        return OK
    from fedloom.platform.runs.run import Resume

    return _execute(view, config, Resume(run_id, args.changed_plugins, args.take_over))


def _execute(view: _WhileRead, config: Any, resume: Any) -> int:
    from fedloom.actors.address import before_ray

    before_ray(config.ray.address)
    view.doing("loading Ray")
    from fedloom.experiments.runs.launch import launch

    with naming(config.results):
        end = launch(config, view, resume)
    view.end(end, config.results)
    return of_run_end(end.kind)


def _attach(args: argparse.Namespace) -> int:
    with _run_view(args, "looking up the run") as view:
        from fedloom.actors.address import before_ray
        from fedloom.platform.results.paths import find_run

        paths = find_run(_here(args, [args.run], tensors=False), args.run)
        before_ray(args.address)
        from fedloom.experiments.runs.launch import attach

        end = attach(args.results, paths, args.address, view, stop=args.stop)
        view.end(end, args.results)
        return of_run_end(end.kind)


def _ablate(args: argparse.Namespace) -> int:
    ablation_id = args.resume if args.resume is not None else args.retry_failed
    if not args.json:
        tell_at_once("loading torch and planning the trials")
    from fedloom.actors.address import before_ray
    from fedloom.experiments.ablation.plan import plan_ablation
    from fedloom.experiments.runs.overrides import override_text
    from fedloom.experiments.store.ablations import Ablation

    ablation: Ablation
    if ablation_id is not None:
        from fedloom.experiments.ablation.plan import planned_ablation

        ablation = planned_ablation(_here(args, [], tensors=False), ablation_id, args.overrides)
    else:
        # --results works as in the other commands; results=FOLDER overrides it.
        results = [] if args.results == Path("results") else [f"results={override_text(str(args.results))}"]
        ablation = plan_ablation([*results, *args.overrides])
    before_ray(ablation.trials[0].config["ray"]["address"])
    from fedloom.experiments.ablation.command import run_command

    return run_command(ablation, args)


def _demo(args: argparse.Namespace) -> int:
    args.overrides = last_values([f"experiment={DEMO}", *args.overrides])
    code = _run(args)
    if code == OK and not args.json:
        while_read(print, AFTER_DEMO)
    return code


def _new(args: argparse.Namespace) -> int:
    from fedloom.experiments.new_project import new_project
    from fedloom.experiments.terminal import write_json

    files = new_project(args.folder)
    if args.json:
        write_json({"folder": str(args.folder), "files": [str(file) for file in files]})
    else:
        sys.stdout.writelines(f"{file}\n" for file in files)
        sys.stdout.write(f"next: cd {shlex.quote(str(args.folder))}; fedloom run experiment=my_preset.yaml\n")
    return OK


def _completion(args: argparse.Namespace) -> int:
    from fedloom.experiments.completion import script
    from fedloom.experiments.terminal import write_json

    text = script(args.shell)
    if args.json:
        write_json({"shell": args.shell, "script": text})
    else:
        sys.stdout.write(text)
    return OK


def _describe(args: argparse.Namespace) -> int:
    from fedloom.experiments.runs.describe import describe
    from fedloom.experiments.terminal import show_facts

    show_facts(describe(args.overrides), as_json=args.json)
    return OK


def _calibrate(args: argparse.Namespace) -> int:
    from fedloom.experiments.runs.calibrate import calibrate
    from fedloom.experiments.terminal import show_facts

    options = ("architecture", "samples", "epochs", "seconds", "measured", "out")
    show_facts(calibrate(args.overrides, **{name: getattr(args, name) for name in options}), as_json=args.json)
    return OK


def _keys(args: argparse.Namespace) -> int:
    from fedloom.experiments.catalogue import known_keys, show_keys, whose_keys

    keys = known_keys(args.given)
    show_keys(keys, as_json=args.json, whose=whose_keys(args.given, keys))
    return OK


def _plugins(args: argparse.Namespace) -> int:
    from fedloom.experiments.catalogue import known_code, show_code

    show_code(known_code(args.words), as_json=args.json)
    return OK


def _tables(args: argparse.Namespace) -> int:
    from fedloom.experiments.show import described_tables, show_tables

    show_tables(described_tables(args.words), as_json=args.json)
    return OK


def _prepare(args: argparse.Namespace) -> int:
    from fedloom.experiments.runs.describe import prepare
    from fedloom.experiments.terminal import show_facts

    if args.picture is None:
        show_facts(prepare(args.overrides), as_json=args.json)
        return OK
    from fedloom.experiments.report.partition import check_picture, write_picture

    check_picture(args.picture)
    facts = prepare(args.overrides, partial(write_picture, args.picture))
    show_facts({**facts, "picture": str(args.picture)}, as_json=args.json)
    return OK


def _report(args: argparse.Namespace) -> int:
    from fedloom.experiments.report import ablation as of_ablation
    from fedloom.experiments.report.runs import report_json, summary_table, write_report
    from fedloom.experiments.show import show_report

    results = _here(args, args.runs or None, tensors=False)
    ablation = of_ablation.chosen_ablation(results, args.runs)
    if ablation is not None:
        files = _written(args, lambda _: of_ablation.write_ablation_report(results, ablation, args.out, args.target))
        figures = of_ablation.ablation_json(results, ablation, args.target) if args.json else {}
        show_report(files, of_ablation.ablation_table(results, ablation, args.target), figures, as_json=args.json)
        return OK
    files = _written(args, lambda run_ids: write_report(results, run_ids or args.runs or None, args.out, args.target))
    figures = report_json(results, files.run_ids, args.target) if args.json else {}
    # The report itself says what is missing.
    table = summary_table(results, files.run_ids, missing=False, targets=args.target)
    show_report(files, table, figures, as_json=args.json)
    return OK


def _reproduce(args: argparse.Namespace) -> int:
    if isinstance(args.results, str):
        raise ValueError(f"--results {args.results}: fedloom reproduce needs a folder on this machine")
    from fedloom.experiments.reproduce.command import run_command

    return run_command(args)


def _written(args: argparse.Namespace, write: Callable[[Sequence[str]], Any]) -> Any:
    """Writes the report; with --follow, rewrites it until its runs have ended, for the page that reloads itself.

    `write` gets the ids of the runs that the report was of before, of which the latest is no longer the same.
    """
    from fedloom.experiments.report.content import REFRESH_S

    files = write(())
    if args.follow and files.is_live and not args.json:
        sys.stdout.write(f"{files.html}: open it in a browser; it is rewritten every {REFRESH_S} s until the end\n")
        sys.stdout.flush()
    while args.follow and files.is_live:
        time.sleep(REFRESH_S)
        _here(args, args.runs or None, tensors=False)
        files = write(getattr(files, "run_ids", ()))
    return files


def _export(args: argparse.Namespace) -> int:
    from fedloom.experiments.export.export import export
    from fedloom.experiments.export.selection import Wanted
    from fedloom.experiments.terminal import show_facts

    wanted = Wanted(tier=args.tier, target=args.target, architecture=args.architecture, model=args.model)
    results = _here(args, [args.run], tensors=True)
    exported = export(results, args.run, wanted, args.out, [kind for kind in args.formats.split(",") if kind])
    paths = {"paths": {kind: str(path) for kind, path in exported.files.items()}}
    show_facts({**exported.card, **paths} if args.json else exported.summary(), as_json=args.json)
    return OK


def _submit(args: argparse.Namespace) -> int:
    from fedloom.experiments.submit import Submission, parse_environment, submit

    environment = parse_environment(args.env)
    submission = Submission(args.address, tuple(args.overrides), tuple(args.include), environment, not args.no_wait)
    # With --json, standard output holds only the JSON object, and the job's output goes to standard error.
    end = submit(submission, _teller(sys.stderr if args.json else sys.stdout))
    if end.message:
        complain(end.message)
    if args.json:
        sys.stdout.write(json.dumps(asdict(end)) + "\n")
    return end.exit_code


def _teller(stream: TextIO) -> Callable[[str], None]:
    """A function that writes text at once; if the reader is gone, it discards output and the job is still followed."""

    def tell(text: str) -> None:
        try:
            stream.write(text)
            stream.flush()
        except BrokenPipeError:
            stop_printing()

    return tell


def _search(args: argparse.Namespace) -> int:
    from fedloom.experiments.runs.search import load_trained, search_trained, show

    results = _here(args, [args.run], tensors=True)
    asked = {name: getattr(args, name) for name in ("samples", "min_tau", "metric", "tolerance")}
    trained = load_trained(results, args.run).changed(**asked)
    winners = search_trained(trained, args.macs, args.latency_s)
    show(trained, winners, len(args.macs) + len(args.latency_s), as_json=args.json)
    return OK


def _verify(args: argparse.Namespace) -> int:
    from fedloom.experiments.verify import show_verified, verified
    from fedloom.platform.results.paths import find_runs

    results = _here(args, args.runs, tensors=True)
    runs = [verified(run) for run in dict.fromkeys(run for word in args.runs for run in find_runs(results, word))]
    show_verified(runs, as_json=args.json)
    return OK if all(run.whole for run in runs) else CONFIGURATION


def _board(args: argparse.Namespace) -> int:
    from fedloom.experiments.board.server import run_board

    token = args.token or os.environ.get("FEDLOOM_BOARD_TOKEN", "")

    def tell(url: str) -> None:
        text = f"the board of {args.results}: {url} (Ctrl-C ends it)"
        sys.stdout.write((json.dumps({"url": url}) if args.json else text) + "\n")
        sys.stdout.flush()

    root = _here(args, None, tensors=False)
    if not root.is_dir():
        complain(f"{args.results} does not exist yet: its runs will be shown")
    run_board(root, args.host, args.port, token, tell)
    return OK


def _status(args: argparse.Namespace) -> int:
    from fedloom.experiments.status import clean_leftovers, hint_at_leftovers, show_status

    if args.clean and (args.runs or args.all):
        raise ValueError("--clean ends the processes of all dead runs on this machine: give it without RUN and --all")
    if args.clean:
        clean_leftovers(as_json=args.json)
        return OK
    results = _here(args, args.runs or None, tensors=False)
    show_status(results, args.runs, as_json=args.json, everything=args.all)
    hint_at_leftovers()
    return OK


HANDLERS: Mapping[str, Handler] = {
    "run": _run,
    "demo": _demo,
    "new": _new,
    "completion": _completion,
    "resume": _resume,
    "attach": _attach,
    "ablate": _ablate,
    "describe": _describe,
    "calibrate": _calibrate,
    "keys": _keys,
    "plugins": _plugins,
    "tables": _tables,
    "prepare": _prepare,
    "report": _report,
    "reproduce": _reproduce,
    "search": _search,
    "board": _board,
    "status": _status,
    "export": _export,
    "submit": _submit,
    "verify": _verify,
}


if __name__ == "__main__":
    main()
