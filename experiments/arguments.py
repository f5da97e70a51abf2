"""The command line: commands, arguments and help texts."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args

from annotated_types import Interval

from fedloom.experiments.runs.overrides import last_values
from fedloom.experiments.terminal import CONFIGURATION
from fedloom.platform.search.base import Metric
from fedloom.platform.settings import PATH, POSITIVE, UP_TO_A_MILLION, Setting, is_path
from fedloom.platform.words import MOST_SAID, shown

Handler = Callable[[argparse.Namespace], int]
"""Executes a command and returns its exit code."""

DESCRIPTION = """Federated architecture search across unequal devices.

  fedloom run experiment=fedoras_digits          a complete run: the demo, about two minutes on two cores
  fedloom run experiment=fedoras_digits seed=2   change one thing: any configuration value, key=value
  fedloom ablate ablation=alpha experiment=fedoras_digits     the same over values and seeds
  fedloom report                                 tables, plots and a page of what was started last
"""


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one line, without its usage."""

    def error(self, message: str) -> NoReturn:
        """Ends with the exit code of a refusal."""
        said = shown(" ".join(message.split()), most=2 * MOST_SAID)
        self.exit(CONFIGURATION, f"fedloom: {said}; {self.prog} --help says what is allowed\n")


def build_parser(handlers: Mapping[str, Handler]) -> argparse.ArgumentParser:
    """Builds the argument parser; `handlers` maps each command's name to the function that executes it."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="fedloom", description=DESCRIPTION, formatter_class=formatter)
    parser.add_argument("--version", action="version", version=f"fedloom {_version()}", help="show the version")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    made = {name: _command(commands, name, handlers[name], *texts) for name, texts in COMMANDS.items()}
    for name, add in ADD.items():
        add(made[name])
    for name in ("resume", "ablate", "report", "reproduce", "search", "export", "status", "verify"):
        made[name].add_argument(
            "--results", type=_results, default=Path("results"), help="results folder or URL (default: results)"
        )
    return parser


def _version() -> str:
    try:
        return metadata.version("fedloom")
    except metadata.PackageNotFoundError:
        return "(not installed)"


MANY = ("overrides", "given", "words", "runs")
"""Where a command keeps the words of which it takes any number."""


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line, on which options may stand between such words, too: argparse stops at the first one."""
    args, left = parser.parse_known_args(arguments)
    many = next((getattr(args, name) for name in MANY if name in args), None)
    if left and (many is None or any(word.startswith("-") for word in left)):
        args.refuse(f"unrecognized arguments: {' '.join(left)}")
    if many is not None:
        many += left
    return args


def _results(given: str) -> str | Path:
    return given if "://" in given else _path(given)


def _path(given: str) -> Path:
    if not given:  # pathlib takes it for the working directory
        raise argparse.ArgumentTypeError("'' is no path")
    return Path(given)


def _number(annotation: Any) -> Callable[[str], float]:
    """Reads a number of an option, so that a refusal names the option as it was typed."""
    setting = Setting("", annotation)

    def read(given: str) -> float:
        from pydantic import ConfigDict, TypeAdapter, ValidationError

        try:
            number: float = TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False)).validate_strings(given)
        except ValidationError as error:
            kind = "a whole number" if setting.kind == "int" else "a number"
            raise argparse.ArgumentTypeError(f"{shown(given)}: must be {kind}, {setting.allowed}") from error
        return number

    return read


OVERRIDES = ("overrides", "given")
"""Where commands keep `key=value`."""
RUNS = ("run", "runs", "resume", "retry_failed")
"""Where commands keep runs and ablations."""


def check_typed(args: argparse.Namespace) -> None:
    """Raises ValueError for an impossible path and a run without a name; of a key given twice the last value stays."""
    values = vars(args)
    for option, given in values.items():
        for path in given if isinstance(given, list) else [given]:
            if isinstance(path, Path) and not is_path(str(path)):
                raise ValueError(f"--{option} {shown(path)}: must be {PATH.meaning}")
    for option in RUNS:
        given = values.get(option)
        if "" in (given if isinstance(given, list) else [given]):
            raise ValueError("'' names no run and no ablation: give an id, the beginning of one, a name or a tag")
    for option in OVERRIDES:
        if option in values:
            setattr(args, option, last_values(values[option]))
    results = values.get("results")
    if isinstance(results, Path) and results.exists() and not results.is_dir():
        raise ValueError(f"--results {results} is not a folder: give the folder that holds the results, or a URL")


RUN_HELP = """Runs an experiment: a preset, with any configuration value changed by key=value.

  fedloom run experiment=fedoras_digits executor.kind=serial
  fedloom run experiment=fedoras_cifar10 data.alpha=0.1 method.train.weighting=fedavg seed=3
  fedloom run experiment=./mine.yaml method.train.server=my_rules:lion     presets and code of your own

  fedloom run experiment=fedoras_digits name=baseline tags=[paper]         afterwards: fedloom report baseline

`fedloom keys` lists all configuration keys, `fedloom plugins` what can be chosen by name.
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
  figures: [metric_by_axis]        # also macs_by_axis, stages_by_axis, tiers_by_axis, time_by_axis, fronts

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


KEYS_HELP = """Lists configuration keys: type, default, what is allowed, and what they mean.

NaN is never allowed, infinity only where it says so; whole numbers have at most 64 bits,
others the range of 32-bit floats.

  fedloom keys method.train method=fedavg                    all keys that begin so, of a method (else the default)
  fedloom keys data experiment=spider_cifar10                with a preset's values
  fedloom keys method.train.options method.train.server=fedadam     the options of what is chosen
"""


PLUGINS_HELP = """Lists, place by place, what can be chosen by name. Everywhere module:name takes code of your own.

  fedloom plugins server                 the server rules, their options, and how one of your own is called
"""


REPRODUCE_HELP = """Runs what a paper's table or figure needs, and says which of its claims the results show.

  fedloom reproduce --list                            the items, what they need, and how they stand here
  fedloom reproduce fedoras/tab8                      what is counted without training: seconds
  fedloom reproduce fedoras/tab6                      at the small scale: a laptop, less than an hour
  fedloom reproduce fedoras/tab6 scale=paper          what the paper ran; it goes on after Ctrl-C, kill or crash
  fedloom reproduce fedoras/tab6 seeds=[1,2,3,4,5] method.train.rounds=100     changed: not on the scoreboard
  fedloom reproduce --scoreboard --out board          all claims of all papers, also as a page with figures
  fedloom reproduce --scoreboard --recorded           with values kept from earlier runs where nothing is run here
  fedloom reproduce fedoras/tab6 --record             runs it, and keeps the values beside the item

A claim is shown or contradicted if the 95 % interval over seeds says so everywhere it is made, or anywhere; else it is
not shown. Exit code 0: it ran, whatever it found; 2: unknown, or no data, with a line that says which file goes where.
"""

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
`--env NAME` takes the value from here: a value on the command line is seen by all users of this machine.
A cluster that asks for a token: RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (a file) or RAY_AUTH_TOKEN.
"""


VERIFY_HELP = """Checks every file of runs: sizes, hashes, the checkpoint, the journal, the models, the count of rows.

  fedloom verify RUN        exit code 0: all is whole; 2: a line per file that is not
"""


def _add_submit(submit: argparse.ArgumentParser) -> None:
    submit.add_argument("--address", required=True, metavar="URL", help="the cluster's dashboard: http://HOST:8265")
    submit.add_argument(
        "--include",
        type=_path,
        action="append",
        default=[],
        metavar="PATH",
        help="own file or folder to send (not its data, results, tests, hidden entries); may be repeated",
    )
    submit.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="variable for the job, with its value here if none is given, as for secrets; may be repeated",
    )
    submit.add_argument("--no-wait", action="store_true", help="print the job's id and return")
    submit.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="experiment=NAME (and ablation=NAME), results=WHERE and whatever differs",
    )


def _add_export(export: argparse.ArgumentParser) -> None:
    export.add_argument("run", metavar="RUN", help=RUN_WORDS)
    export.add_argument("--tier", help="the model of this tier")
    export.add_argument("--target", metavar="MEASURE=LIMIT", help="the model of a searched target, such as macs=1e9")
    export.add_argument("--architecture", metavar="TEXT", help="smallest, largest, d=1,0,2,1 e=.14 or 3-1-8-0")
    export.add_argument(
        "--model", metavar="NAME", help="one of the run's kept models (with --tier: supernet_init, ...)"
    )
    export.add_argument("--out", type=_path, help="folder for the files (default: RESULTS/exports/RUN)")
    export.add_argument(
        "--formats", default="safetensors,pt2", help="any of safetensors,pt2,onnx (default: safetensors,pt2)"
    )


def _may_change(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--changed-plugins", action="store_true", help="go on although the source of a plug-in has changed meanwhile"
    )
    command.add_argument(
        "--take-over",
        action="store_true",
        help="go on with results at a URL whose last process ended without saying so",
    )


def _overrides(command: argparse.ArgumentParser, text: str) -> None:
    command.add_argument("overrides", nargs="*", metavar="key=value", help=text)


def _add_run(run: argparse.ArgumentParser) -> None:
    _overrides(run, "experiment=NAME (or a YAML file of your own) and whatever differs from it")


RESUME_HELP = """Continues a run from its last checkpoint, to the same results; of a run that is done it says so.

  fedloom resume RUN                                     RUN: an id, its beginning, a name, or the tag of one run
  fedloom resume RUN executor.actors=8 ray.address=HEAD:6379
  fedloom resume RUN name=baseline tags=[paper,cifar]

What is computed cannot change. These keys may: name, tags, executor.kind, executor.actors, executor.client_timeout_s,
executor.failures.*, ray.*, checkpoint.*, data.root, data.cache, data.download, reuse_supernet, tensorboard.
"""

RUN_WORDS = "run id, its beginning, or the run's name or tag"


def _add_resume(resume: argparse.ArgumentParser) -> None:
    resume.add_argument("run", metavar="RUN", help=RUN_WORDS)
    _overrides(resume, "one of the keys above")
    _may_change(resume)


def _add_describe(describe: argparse.ArgumentParser) -> None:
    _overrides(describe, "space=NAME (or experiment=NAME), ...")


def _add_prepare(prepare: argparse.ArgumentParser) -> None:
    _overrides(prepare, "dataset=NAME (or experiment=NAME), ...")


def _add_keys(keys: argparse.ArgumentParser) -> None:
    keys.add_argument(
        "given", nargs="*", metavar="PREFIX or key=value", help="method.train, or experiment=NAME, method=NAME, ..."
    )


def _add_plugins(plugins: argparse.ArgumentParser) -> None:
    plugins.add_argument("words", nargs="*", metavar="WORD", help="what to look for, such as server or data")


def _add_tables(tables: argparse.ArgumentParser) -> None:
    tables.add_argument("words", nargs="*", metavar="TABLE", help="runs, rounds, clients, ...; all if none is given")


def _add_report(report: argparse.ArgumentParser) -> None:
    report.add_argument(
        "runs", nargs="*", metavar="RUN", help="ids, names or tags; or an ablation (default: what was started last)"
    )
    report.add_argument("--out", type=_path, help="folder for the files (default: RESULTS/reports/RUN)")
    report.add_argument(
        "--follow", action="store_true", help="write it again every 30 s until the runs end; the page follows by itself"
    )


def _add_reproduce(reproduce: argparse.ArgumentParser) -> None:
    reproduce.add_argument(
        "overrides", nargs="*", metavar="ITEM or key=value", help="fedoras/tab6 (or ./mine/tab1.yaml), scale=small, ..."
    )
    which = reproduce.add_mutually_exclusive_group()
    which.add_argument("--list", action="store_true", help="all items: what they need, and how they stand here")
    which.add_argument("--scoreboard", action="store_true", help="all claims of all papers, with their states")
    which.add_argument("--show", action="store_true", help="the item's table from what was run so far; runs nothing")
    reproduce.add_argument(
        "--recorded", action="store_true", help="values kept from earlier runs where nothing is run here"
    )
    reproduce.add_argument("--record", action="store_true", help="keep the values of the item's runs beside the item")
    reproduce.add_argument("--out", type=_path, help="with --scoreboard: a page with figures in this folder")


def _add_search(search: argparse.ArgumentParser) -> None:
    search.add_argument("run", metavar="RUN", help=f"{RUN_WORDS}; a run of superfednas")
    limit = _number(Annotated[float, POSITIVE])
    search.add_argument("--macs", type=limit, action="append", default=[], help="at most so many MACs; may be repeated")
    search.add_argument(
        "--latency-s", type=limit, action="append", default=[], help="at most so many seconds on this machine"
    )
    samples = _number(Annotated[int, UP_TO_A_MILLION])
    search.add_argument("--samples", type=samples, help="subnets to measure, if more than the run did")
    tau = _number(Annotated[float, Interval(ge=-1, le=1)])
    search.add_argument("--metric", choices=get_args(Metric), help="what subnets are ranked by, if not as in the run")
    search.add_argument("--min-tau", type=tau, help="what Kendall's tau the predictors must reach")


def _add_status(status: argparse.ArgumentParser) -> None:
    status.add_argument(
        "--clean", action="store_true", help="end the processes that dead runs left behind on this machine"
    )
    status.add_argument(
        "runs", nargs="*", metavar="RUN", help="ids, their beginnings, names or tags (default: the newest 50)"
    )
    status.add_argument("--all", action="store_true", help="all runs and ablations, not only the newest 50 of each")


def _add_verify(verify: argparse.ArgumentParser) -> None:
    verify.add_argument("runs", nargs="+", metavar="RUN", help="ids, their beginnings, names or tags")


def _command(commands: Any, name: str, handler: Handler, text: str, description: str = "") -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    description = (description or text[0].upper() + text[1:] + ".") + _presets(name)
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=description, formatter_class=formatter
    )
    printed = command.add_mutually_exclusive_group()
    printed.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    printed.add_argument("--quiet", action="store_true", help="print nothing but errors")
    command.set_defaults(command=handler, refuse=command.error)
    return command


def _presets(command: str) -> str:
    from fedloom.experiments.runs.presets import ablations, experiments

    if command == "ablate":
        return "\nAblations: " + ", ".join(ablations()) + " (experiments/README.md says which method each is for).\n"
    return "\nPresets: " + ", ".join(experiments()) + ".\n" if command == "run" else ""


COMMANDS: Mapping[str, tuple[str, ...]] = {
    "run": ("run an experiment to its end", RUN_HELP),
    "resume": ("continue a run from its last checkpoint", RESUME_HELP),
    "ablate": ("vary configuration values over seeds, with Ray Tune", ABLATE_HELP),
    "describe": ("a space's size, costs and tiers",),
    "keys": ("every configuration key with its type, default, range and meaning", KEYS_HELP),
    "plugins": ("what can be chosen by name, and where code of your own goes", PLUGINS_HELP),
    "tables": ("the columns of the result tables: type, unit and meaning",),
    "prepare": ("prepare a data set and its partition",),
    "report": ("tables, plots and one HTML page of runs, or of an ablation",),
    "reproduce": ("the tables and figures of the papers: run them, and check their claims", REPRODUCE_HELP),
    "search": ("the best subnets of a trained supernet for new targets",),
    "status": ("which runs there are and how they stand",),
    "export": ("a trained model as files that run without fedloom", EXPORT_HELP),
    "submit": ("run an experiment or an ablation on a Ray cluster", SUBMIT_HELP),
    "verify": ("whether all files of runs are what fedloom wrote", VERIFY_HELP),
}
"""By command: a line for the list of commands and, optionally, the beginning of the command's own help."""

ADD: Mapping[str, Callable[[argparse.ArgumentParser], None]] = {
    "run": _add_run,
    "resume": _add_resume,
    "ablate": _add_ablate,
    "describe": _add_describe,
    "keys": _add_keys,
    "plugins": _add_plugins,
    "tables": _add_tables,
    "prepare": _add_prepare,
    "report": _add_report,
    "reproduce": _add_reproduce,
    "search": _add_search,
    "status": _add_status,
    "export": _add_export,
    "submit": _add_submit,
    "verify": _add_verify,
}
