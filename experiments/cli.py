"""The `fedloom` command: run, resume, ablate, submit, search, describe, prepare, report, export, status."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from fedloom.experiments.runs.huge_pages import prefer_huge_pages
from fedloom.experiments.terminal.exit_codes import CONFIGURATION, INFRASTRUCTURE, INTERRUPTED, OK, of_run_end
from fedloom.experiments.terminal.reading import stop_printing, while_read

DESCRIPTION = """Federated architecture search across unequal devices.

  fedloom run experiment=fedoras_digits          a complete run: the demo, about two minutes on two cores
  fedloom run experiment=fedoras_digits seed=2   change one thing: any configuration value, key=value
  fedloom ablate ablation=alpha experiment=fedoras_digits     the same over values and seeds
  fedloom report                                 tables, plots and an HTML page of the latest run
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, runs the command and exits with its code."""
    # A user's own rules and spaces lie where the command is started; Ray's workers search the driver's path, too.
    sys.path.append(os.getcwd())
    prefer_huge_pages()
    parser = build_parser()
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="fedloom: %(message)s")
    try:
        code = args.command(args)
    except ValueError as error:
        code = _refuse(error)
    except BrokenPipeError:
        stop_printing()
        code = OK
    except ConnectionError as error:
        sys.stderr.write(f"fedloom: {error}\n")
        code = CONFIGURATION
    except OSError as error:
        sys.stderr.write(f"fedloom: {' '.join(str(error).split())}\n")
        code = INFRASTRUCTURE
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


class _WhileRead:
    """Shows a run for as long as somebody reads it: the run goes on without (`fedloom run | head`)."""

    def __init__(self, view: Any) -> None:
        self._view = view

    def started(self, run_id: str, supernet_of: str) -> None:
        while_read(self._view.started, run_id, supernet_of)

    def round(self, progress: Any) -> None:
        while_read(self._view.round, progress)

    def end(self, end: Any, results: str) -> None:
        while_read(self._view.end, end, results)


def _may_change(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--changed-plugins", action="store_true", help="go on although the source of a plug-in has changed meanwhile"
    )


def _refuse(error: ValueError) -> int:
    if os.environ.get("FEDLOOM_TRACEBACK"):
        raise error
    sys.stderr.write(f"fedloom: {' '.join(str(error).split())}\n")
    return CONFIGURATION


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="fedloom", description=DESCRIPTION, formatter_class=formatter)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    run = _command(commands, "run", _run, "run an experiment to its end", RUN_HELP)
    run.add_argument("overrides", nargs="*", metavar="key=value", help="experiment=NAME and whatever differs from it")
    resume = _command(commands, "resume", _resume, "continue a run from its last checkpoint")
    resume.add_argument("run", help="run id, or its beginning")
    resume.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="executor.*, ray.*, checkpoint.* and where the data is may differ",
    )
    _may_change(resume)
    ablate = _command(commands, "ablate", _ablate, "vary configuration values over seeds, with Ray Tune", ABLATE_HELP)
    _add_ablate(ablate)
    describe = _command(commands, "describe", _describe, "a space's size, costs and tiers")
    describe.add_argument("overrides", nargs="*", metavar="key=value", help="space=NAME (or experiment=NAME), ...")
    prepare = _command(commands, "prepare", _prepare, "prepare a data set and its partition")
    prepare.add_argument("overrides", nargs="*", metavar="key=value", help="dataset=NAME (or experiment=NAME), ...")
    report = _command(commands, "report", _report, "tables, plots and one HTML page of runs, or of an ablation")
    report.add_argument("runs", nargs="*", metavar="RUN", help="run ids, or an ablation's id (default: the latest run)")
    report.add_argument("--out", type=Path, help="folder for the files (default: RESULTS/reports/RUN)")
    search = _command(commands, "search", _search, "the best subnets of a trained supernet for new targets")
    search.add_argument("run", help="run id of a superfednas run, or its beginning")
    search.add_argument("--macs", type=float, action="append", default=[], help="at most so many MACs; may be repeated")
    search.add_argument(
        "--latency-s", type=float, action="append", default=[], help="at most so many seconds on this machine"
    )
    search.add_argument("--samples", type=int, help="subnets to measure, if more than the run did")
    search.add_argument("--min-tau", type=float, help="what Kendall's tau the predictors must reach")
    status = _command(commands, "status", _status, "which runs there are and how they stand")
    status.add_argument("runs", nargs="*", metavar="RUN", help="run ids or their beginnings; all if none is given")
    export = _command(commands, "export", _export, "a trained model as files that run without fedloom", EXPORT_HELP)
    _add_export(export)
    submit = _command(commands, "submit", _submit, "run an experiment or an ablation on a Ray cluster", SUBMIT_HELP)
    _add_submit(submit)
    for command in (resume, ablate, report, search, export, status):
        command.add_argument(
            "--results", type=_results, default=Path("results"), help="results folder or URL (default: results)"
        )
    return parser


def _results(given: str) -> str | Path:
    return given if "://" in given else Path(given)


def _here(args: argparse.Namespace, runs: Sequence[str] | None, *, tensors: bool) -> Path:
    """The results folder on this machine; of results at a URL, the runs are brought there."""
    if isinstance(args.results, Path):
        return args.results
    from fedloom.platform.results.remote import fetch

    return fetch(args.results, runs, tensors=tensors, ablations=True)


RUN_HELP = """Runs an experiment: a preset, with any configuration value changed by key=value.

  fedloom run experiment=fedoras_digits executor.kind=serial
  fedloom run experiment=fedoras_cifar10 data.alpha=0.1 method.train.weighting=fedavg seed=3
"""


ABLATE_HELP = """Runs every point of an ablation's axes with every seed, as many trials at once as the cluster holds.

  fedloom ablate ablation=beta_schedule experiment=superfednas_digits
  fedloom ablate ablation=alpha experiment=fedoras_digits ablation.seeds=[1,2,3] method.train.rounds=20
  fedloom ablate ablation=mine.yaml experiment=fedoras_digits --plan     what would be run; nothing is started
  fedloom ablate --resume ABLATION                                       go on after Ctrl-C, a crash or a move
  fedloom ablate --retry-failed ABLATION                                 run exactly those again that failed

An ablation of your own is a YAML file:

  axes:
    lr: {key: method.train.lr, values: [0.1, 0.03]}
    averaging: {settings: {OPA: {method.train.weighting: opa}, FedAvg: {method.train.weighting: fedavg}}}
  seeds: [1, 2, 3]
  figures: [metric_by_axis]        # also macs_by_axis, stages_by_axis, tiers_by_axis

ablation.search.kind=random ablation.search.samples=20 draws points (an axis may be uniform, log_uniform or integers:
[least, greatest]); ablation.scheduler.kind=asha stops trials that fall behind; ablation.attempts and .concurrent limit
retries and trials at once. Exit code 0: all trials are done; 3: some failed; 4: processes died; 130: interrupted.
"""


def _add_ablate(ablate: argparse.ArgumentParser) -> None:
    ablate.add_argument(
        "overrides", nargs="*", metavar="key=value", help="ablation=NAME experiment=NAME and whatever differs from them"
    )
    which = ablate.add_mutually_exclusive_group()
    which.add_argument("--plan", action="store_true", help="show the trials and start nothing")
    which.add_argument("--resume", metavar="ABLATION", help="continue an ablation, by its id or the id's beginning")
    which.add_argument("--retry-failed", metavar="ABLATION", help="run an ablation's failed trials again")
    _may_change(ablate)


EXPORT_HELP = """Writes a trained model as safetensors, torch.export and ONNX files, with a card that says what it is.

  fedloom export RUN --tier tier1                        what the run found for a tier
  fedloom export RUN --target macs=1e9                    what it found for a target
  fedloom export RUN --architecture "d=1,0,2,1 e=.14"     any subnet, cut from the run's supernet
"""


SUBMIT_HELP = """Sends a run, or an ablation, to a Ray cluster as a job, shows its output and ends with its exit code.

  fedloom submit --address http://HOST:8265 experiment=fedoras_cifar10 results=/shared/results
  fedloom submit --address http://HOST:8265 ablation=alpha experiment=fedoras_digits results=s3://bucket/results
  fedloom submit --address http://HOST:8265 --include my_rules.py --env FEDLOOM_DATA=/shared/data \\
      experiment=fedoras_cifar10 method.train.weighting=my_rules:mine results=/shared/results

Only fedloom's own source and what --include names is sent, at most 50 MiB. Torch and Ray are the cluster's own.
A cluster that asks for a token: RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (a file) or RAY_AUTH_TOKEN.
"""


def _add_submit(submit: argparse.ArgumentParser) -> None:
    submit.add_argument("--address", required=True, metavar="URL", help="the cluster's dashboard: http://HOST:8265")
    submit.add_argument(
        "--include",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="own file or folder to send (not its data, results, tests, hidden entries); may be repeated",
    )
    submit.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="variable for the job; may be repeated"
    )
    submit.add_argument("--no-wait", action="store_true", help="print the job's id and return")
    submit.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="experiment=NAME (and ablation=NAME), results=WHERE and whatever differs",
    )


def _add_export(export: argparse.ArgumentParser) -> None:
    export.add_argument("run", metavar="RUN", help="run id, or its beginning")
    export.add_argument("--tier", help="the model of this tier")
    export.add_argument("--target", metavar="MEASURE=LIMIT", help="the model of a searched target, such as macs=1e9")
    export.add_argument("--architecture", metavar="TEXT", help="smallest, largest, d=1,0,2,1 e=.14 or 3-1-8-0")
    export.add_argument(
        "--model", metavar="NAME", help="one of the run's kept models (with --tier: supernet_init, ...)"
    )
    export.add_argument("--out", type=Path, help="folder for the files (default: RESULTS/exports/RUN)")
    export.add_argument(
        "--formats", default="safetensors,pt2", help="any of safetensors,pt2,onnx (default: safetensors,pt2)"
    )


def _command(
    commands: Any, name: str, handler: Callable[[argparse.Namespace], int], text: str, description: str = ""
) -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    description = (description or text[0].upper() + text[1:] + ".") + _presets(name)
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=description, formatter_class=formatter
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    command.set_defaults(command=handler)
    return command


def _presets(command: str) -> str:
    from fedloom.experiments.runs.presets import ablations, experiments

    if command == "ablate":
        return "\nAblations: " + ", ".join(ablations()) + " (the README says which method each is for).\n"
    return "\nPresets: " + ", ".join(experiments()) + ".\n" if command == "run" else ""


# The heavy imports (torch, ray) wait until a command needs them: `fedloom --help` answers at once.


def _run(args: argparse.Namespace) -> int:
    from fedloom.experiments.runs.configuration import compose_config

    return _execute(args, compose_config(args.overrides), None)


def _resume(args: argparse.Namespace) -> int:
    from fedloom.experiments.runs.configuration import change_stored, stored_config

    run_id, config = stored_config(args.results, args.run)
    from fedloom.platform.runs.ending import Resume

    return _execute(args, change_stored(config, args.overrides), Resume(run_id, args.changed_plugins))


def _execute(args: argparse.Namespace, config: Any, resume: Any) -> int:
    from fedloom.actors.address import stay_on_loopback

    stay_on_loopback(config.ray.address)
    from fedloom.experiments.runs.launch import launch
    from fedloom.experiments.show import RunView

    view = _WhileRead(RunView(quiet=args.json))
    end = launch(config, view, resume)
    view.end(end, config.results)
    return of_run_end(end.kind)


def _ablate(args: argparse.Namespace) -> int:
    from fedloom.actors.address import stay_on_loopback
    from fedloom.experiments.ablation.plan import override_text, plan_ablation
    from fedloom.experiments.store.ablations import Ablation

    given = args.resume if args.resume is not None else args.retry_failed
    ablation: Ablation
    if given is not None:
        from fedloom.experiments.ablation.plan import planned_ablation

        ablation = planned_ablation(_here(args, [], tensors=False), given, args.overrides)
    else:
        # As of the other commands; what is given as results=FOLDER goes before.
        place = [] if args.results == Path("results") else [f"results={override_text(str(args.results))}"]
        ablation = plan_ablation([*place, *args.overrides])
    stay_on_loopback(ablation.trials[0].config["ray"]["address"])
    from fedloom.experiments.ablation.command import run_command

    return run_command(ablation, args)


def _describe(args: argparse.Namespace) -> int:
    from fedloom.experiments.describe import describe
    from fedloom.experiments.terminal.output import show_facts

    show_facts(describe(args.overrides), as_json=args.json)
    return OK


def _prepare(args: argparse.Namespace) -> int:
    from fedloom.experiments.prepare import prepare
    from fedloom.experiments.terminal.output import show_facts

    show_facts(prepare(args.overrides), as_json=args.json)
    return OK


def _report(args: argparse.Namespace) -> int:
    from fedloom.experiments.report.pages import ablation as of_ablation
    from fedloom.experiments.report.pages.runs import summary_table, write_report
    from fedloom.experiments.report.pages.values import report_json
    from fedloom.experiments.show import show_report

    results = _here(args, args.runs or None, tensors=False)
    ablation = of_ablation.chosen_ablation(results, args.runs)
    if ablation is not None:
        files = of_ablation.write_ablation_report(results, ablation, args.out)
        figures = of_ablation.ablation_json(results, ablation) if args.json else {}
        show_report(files, of_ablation.ablation_table(results, ablation), figures, as_json=args.json)
        return OK
    files = write_report(results, args.runs or None, args.out)
    figures = report_json(results, files.run_ids) if args.json else {}
    show_report(files, summary_table(results, files.run_ids), figures, as_json=args.json)
    return OK


def _export(args: argparse.Namespace) -> int:
    from fedloom.experiments.export.export import export
    from fedloom.experiments.export.selection import Wanted
    from fedloom.experiments.terminal.output import show_facts

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
    # The last line of the output is the JSON object alone: what the job says goes beside it.
    end = submit(submission, _teller(sys.stderr if args.json else sys.stdout))
    if end.message:
        sys.stderr.write(f"fedloom: {end.message}\n")
    if args.json:
        sys.stdout.write(json.dumps(asdict(end)) + "\n")
    return end.exit_code


def _teller(stream: TextIO) -> Callable[[str], None]:
    """Writes text as it comes; a job goes on and is followed to its end when nobody reads any more."""

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
    trained = load_trained(results, args.run).changed(samples=args.samples, min_tau=args.min_tau)
    found = search_trained(trained, args.macs, args.latency_s)
    show(trained, found, len(args.macs) + len(args.latency_s), as_json=args.json)
    return OK


def _status(args: argparse.Namespace) -> int:
    from fedloom.experiments.show import show_status

    show_status(_here(args, args.runs or None, tensors=False), args.runs, as_json=args.json)
    return OK


if __name__ == "__main__":
    main()
