"""The command line: commands, arguments and help texts."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args

from annotated_types import Interval

from fedloom.experiments.runs.overrides import last_values
from fedloom.experiments.terminal import CONFIGURATION
from fedloom.platform.search.base import Metric
from fedloom.platform.settings import ONE_OR_MORE, PATH, POSITIVE, SHARE, UP_TO_A_MILLION, Setting, is_path
from fedloom.platform.words import MOST_SAID, shown

Handler = Callable[[argparse.Namespace], int]
"""Executes a command and returns its exit code."""

MANY = ("overrides", "given", "words", "runs")
"""Where a command keeps the words of which it takes any number."""
OVERRIDES = ("overrides", "given")
"""Where commands keep `key=value`."""
RUNS = ("run", "runs", "resume", "retry_failed")
"""Where commands keep runs and ablations."""


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one line, without its usage."""

    def error(self, message: str) -> NoReturn:
        """Ends with the exit code of a refusal."""
        text = shown(" ".join(message.split()), most=2 * MOST_SAID)
        self.exit(CONFIGURATION, f"fedloom: {text}; {self.prog} --help says what is allowed\n")


def build_parser(handlers: Mapping[str, Handler]) -> argparse.ArgumentParser:
    """Builds the argument parser; `handlers` maps each command's name to the function that executes it."""
    try:
        version = metadata.version("fedloom")
    except metadata.PackageNotFoundError:
        version = "(not installed)"
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="fedloom", description=DESCRIPTION, formatter_class=formatter)
    parser.add_argument("--version", action="version", version=f"fedloom {version}", help="show the version")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        description = (command.help or command.text[0].upper() + command.text[1:] + ".") + _presets(name)
        sub = subparsers.add_parser(name, help=command.text, description=description, formatter_class=formatter)
        sub.set_defaults(command=handlers[name], refuse=sub.error)
        for argument in (PRINTED, *command.arguments):
            if isinstance(argument, Argument):
                sub.add_argument(*argument.names, **argument.options)
            else:
                group = sub.add_mutually_exclusive_group()
                for alternative in argument:
                    group.add_argument(*alternative.names, **alternative.options)
    return parser


def _presets(command: str) -> str:
    from fedloom.experiments.runs.presets import ablations, experiments

    if command == "ablate":
        return "\nAblations: " + ", ".join(ablations()) + " (docs/how-to/ablations.md says which method each is for).\n"
    return "\nPresets: " + ", ".join(experiments()) + ".\n" if command == "run" else ""


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line, on which options may stand between such words, too: argparse stops at the first one."""
    args, left = parser.parse_known_args(arguments)
    many = next((getattr(args, name) for name in MANY if name in args), None)
    if left and (many is None or any(word.startswith("-") for word in left)):
        args.refuse(f"unrecognized arguments: {' '.join(left)}")
    if many is not None:
        many += left
    return args


def _path(text: str) -> Path:
    if not text:  # pathlib takes it for the working directory
        raise argparse.ArgumentTypeError("'' is no path")
    return Path(os.path.expanduser(text))  # the shell leaves the ~ of --results=~/x


def _path_or_url(text: str) -> str | Path:
    return text if "://" in text else _path(text)


def _number(annotation: Any) -> Callable[[str], float]:
    """Reads a number of an option, so that a refusal names the option as it was typed."""
    setting = Setting("", annotation)

    def read(text: str) -> float:
        from pydantic import ConfigDict, TypeAdapter, ValidationError

        try:
            number: float = TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False)).validate_strings(text)
        except ValidationError as error:
            kind = "a whole number" if setting.kind == "int" else "a number"
            raise argparse.ArgumentTypeError(f"{shown(text)}: must be {kind}, {setting.allowed}") from error
        return number

    return read


def _target(text: str) -> tuple[str, float]:
    """Reads a target of scores on validation data: an accuracy, or a metric with its value."""
    metric, _, value = text.rpartition("=")
    if metric not in ("", *get_args(Metric)):
        raise argparse.ArgumentTypeError(f"{shown(text)}: the metric must be {' or '.join(get_args(Metric))}")
    is_share = metric != "loss"
    return metric or "accuracy", _number(Annotated[float, SHARE] if is_share else Annotated[float, POSITIVE])(value)


def check_typed(args: argparse.Namespace) -> None:
    """Raises ValueError for an impossible path and a run without a name; of a key given twice the last value stays."""
    values = vars(args)
    for option, value in values.items():
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, Path) and not is_path(str(path)):
                raise ValueError(f"--{option} {shown(path)}: must be {PATH.meaning}")
    for option in RUNS:
        value = values.get(option)
        if "" in (value if isinstance(value, list) else [value]):
            raise ValueError("'' names no run and no ablation: give an id, the beginning of one, a name or a tag")
    for option in OVERRIDES:
        if option in values:
            setattr(args, option, last_values(values[option]))
    results = values.get("results")
    if isinstance(results, Path) and results.exists() and not results.is_dir():
        raise ValueError(f"--results {results} is not a folder: give the folder that holds the results, or a URL")


# -- help texts --------------------------------------------------------------------------------------------------------

DESCRIPTION = """Federated architecture search across unequal devices.

  fedloom demo                                   a complete run, about two minutes on two cores
  fedloom run experiment=fedoras_digits seed=2   change one thing: any configuration value, key=value
  fedloom ablate ablation=alpha experiment=fedoras_digits     the same over values and seeds
  fedloom report                                 tables, plots and a page of the last run
"""

RUN_HELP = """Runs an experiment: a preset, with any configuration value changed by key=value.

  fedloom run experiment=fedoras_digits executor.kind=serial
  fedloom run experiment=fedoras_cifar10 data.alpha=0.1 method.train.weighting=fedavg seed=3
  fedloom run experiment=./mine.yaml method.train.server=my_rules:lion     presets and code of your own

  fedloom run experiment=fedoras_digits name=baseline tags=[paper]         afterwards: fedloom report baseline

Without experiment= and method= it is FedorAS on digits for 500 rounds. `fedloom keys` lists all configuration keys,
`fedloom plugins` everything that can be chosen by name.
"""

DEMO = "fedoras_digits"
"""The preset of the demo."""
DEMO_HELP = f"""Runs {DEMO}: FedorAS on digits, four tiers and forty clients, about two minutes on two cores.

  fedloom demo                                   needs neither data nor a checkout, and writes to ./results
  fedloom demo executor.kind=serial seed=2       any configuration value can be changed, as in `fedloom run`
"""
AFTER_DEMO = f"""
next:
  fedloom report                                  tables, plots and a page of this run
  fedloom run experiment={DEMO} seed=2    change one thing; fedloom keys lists them all
  fedloom ablate ablation=alpha experiment={DEMO} --plan
  fedloom new my_project                          a data set, a method and a test of your own"""

NEW_HELP = """Writes a project that runs as it is: a data set, a network, a server rule, a preset, a test and a README.

  fedloom new my_project
  cd my_project; fedloom run experiment=my_preset.yaml
"""

COMPLETION_HELP = """Prints a completion script: the shell then completes commands, keys, presets, names and runs.

  fedloom completion bash > ~/.local/share/bash-completion/completions/fedloom
  fedloom completion zsh > ~/.zfunc/_fedloom              a folder of $fpath
  fedloom completion fish > ~/.config/fish/completions/fedloom.fish
"""

ABLATE_HELP = """Runs every point of an ablation's axes with every seed, as many trials at once as the cluster holds.

  fedloom ablate ablation=beta_schedule experiment=superfednas_digits
  fedloom ablate ablation=alpha experiment=fedoras_digits ablation.seeds=[1,2,3] method.train.rounds=20
  fedloom ablate ablation=mine.yaml experiment=fedoras_digits --plan     what would be run; nothing is started
  fedloom ablate --resume ABLATION                                       continue after Ctrl-C, a crash or a move
  fedloom ablate --retry-failed ABLATION                                 run only the failed trials again

An ablation of your own is a YAML file:

  axes:
    lr: {key: method.train.lr, values: [0.1, 0.03]}
    averaging: {settings: {OPA: {method.train.weighting: opa}, FedAvg: {method.train.weighting: fedavg}}}
  seeds: [1, 2, 3]
  figures: [metric_by_axis]        # also metric_by_axes; macs_, stages_, tiers_, time_, bytes_by_axis; fronts

ablation.search.kind=random ablation.search.samples=20 draws points at random; kind=bayesian suggests them from the
validation scores of earlier ones (with Optuna; an axis may be uniform, log_uniform or integers: [least, greatest]);
ablation.scheduler.kind=asha stops trials that fall behind; ablation.attempts and .concurrent limit retries and trials
at once. Exit code 0: all trials are done; 3: some failed; 4: processes died; 130: interrupted.
"""

KEYS_HELP = """Lists configuration keys: type, default, what is allowed, and what they mean.

NaN is never allowed, infinity only where the key says so; integers have at most 64 bits,
other numbers the range of 32-bit floats.

  fedloom keys method.train method=fedavg                    all keys with this prefix, for this method
  fedloom keys data experiment=spider_cifar10                with a preset's values
  fedloom keys method.train.options method.train.server=fedadam     the options of that choice
"""

CALIBRATE_HELP = """Computes how many MACs per second a device does, for devices.macs_per_s or a device table.

  fedloom calibrate experiment=fedavg_digits                                     this machine's CPU, timed now
  fedloom calibrate experiment=fedoras_cifar10 --samples 500 --seconds 41        your device: one pass over 500 samples
  fedloom calibrate experiment=fedoras_cifar10 --measured phones.csv --out devices.csv

A file has the columns device_id, samples, epochs and seconds (CSV or Parquet), several rows of one device are pooled.
The rate is 3 x MACs of the forward passes / seconds, so that the simulated clock reproduces the measured time. Seconds
are those of training alone, without transfers, for --architecture in the experiment's space.
"""

PLUGINS_HELP = """Lists what can be chosen by name, for each configuration key. Your own code goes in as module:name.

  fedloom plugins server                 the server rules, their options, and how one of your own is called
"""


REPRODUCE_HELP = """Runs what a paper's table or figure needs, and says which of its claims the results show.

  fedloom reproduce --list                            the items, what they need, and their state here
  fedloom reproduce fedoras/tab8                      counted without training, in seconds
  fedloom reproduce fedoras/tab6                      at the small scale: less than an hour on a laptop
  fedloom reproduce fedoras/tab6 scale=paper          what the paper ran; continues after Ctrl-C, kill or crash
  fedloom reproduce fedoras/tab6 seeds=[1,2,3,4,5] method.train.rounds=100     changed: not on the scoreboard
  fedloom reproduce --scoreboard --out board          all claims of all papers, also as a page with figures
  fedloom reproduce --scoreboard --recorded           with recorded values for items that have not been run here
  fedloom reproduce fedoras/tab6 --record             run it, and record the values beside the item

A claim is shown if the 95 % interval over seeds says so at every place where it is made, contradicted if the interval
excludes it at any (corrected for their number), and not shown otherwise. Exit code 0: it ran, whatever the outcome; 2:
unknown item or missing data, with a line that says which file goes where.
"""

EXPORT_HELP = """Writes a trained model as safetensors, torch.export and ONNX files, with a model card.

  fedloom export RUN --tier tier1                        the model that the run found for a tier
  fedloom export RUN --target macs=1e9                    the one for a target
  fedloom export RUN --architecture "d=1,0,2,1 e=.14"     any subnet, cut from the run's supernet
"""

SUBMIT_HELP = """Submits a run, or an ablation, to a Ray cluster as a job, shows its output and returns its exit code.

  fedloom submit --address http://HOST:8265 experiment=fedoras_cifar10 results=/shared/results
  fedloom submit --address http://HOST:8265 ablation=alpha experiment=fedoras_digits results=s3://bucket/results
  fedloom submit --address http://HOST:8265 --include my_rules.py --env FEDLOOM_DATA=/shared/data \\
      experiment=fedoras_cifar10 method.train.weighting=my_rules:mine results=/shared/results

Only fedloom's own source and what --include names are sent, at most 50 MiB. Torch and Ray are the cluster's own.
`--env NAME` takes the value from this environment, since all users of a machine can see its command lines.
A cluster that asks for a token: RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (a file) or RAY_AUTH_TOKEN.
"""

VERIFY_HELP = """Checks every file of a run: sizes, hashes, the checkpoint, the journal, the models, the number of rows.

  fedloom verify RUN        exit code 0: everything is intact; 2: one line per damaged file
"""

RESUME_HELP = """Continues a run from its last checkpoint; the results are the same as without the interruption.

  fedloom resume RUN                                     RUN: an id, its beginning, a name, or the tag of one run
  fedloom resume RUN executor.actors=8 ray.address=HEAD:6379
  fedloom resume RUN name=baseline tags=[paper,cifar]

Keys that would change the results cannot be given. These can: name, tags, executor.kind, executor.actors,
executor.client_timeout_s, executor.failures.*, ray.*, checkpoint.*, data.root, data.cache, data.download,
reuse_supernet, tensorboard, tracking.*.
"""

ATTACH_HELP = """Watches a run that was started with ray.detached=true; output and exit code are those of `fedloom run`.

  fedloom run experiment=fedoras_cifar10 ray.address=HEAD:6379 ray.detached=true
  fedloom attach RUN --address HEAD:6379                 after Ctrl-C, a lost connection, or in another terminal
  fedloom attach RUN --address HEAD:6379 --stop          stops it; fedloom resume RUN continues it

Ctrl-C stops watching, not the run. If the run has ended, attach says how.
"""


BOARD_HELP = """Serves a live web page of the results: runs, curves, ablations, fronts, clients, differences, reports.

  fedloom board                                  for this machine only; open the URL that it prints
  fedloom board --results /shared/results --port 9000
  ssh -L 8270:localhost:8270 HOST                on a remote machine: forward the port, then open http://localhost:8270
  FEDLOOM_BOARD_TOKEN=TOKEN fedloom board --host 0.0.0.0       for others, who need these 16 characters or more

It only reads tables and status files, and never writes. The page loads nothing from other hosts.
"""


# -- the commands ------------------------------------------------------------------------------------------------------


class Argument:
    """An argument of a command, as argparse takes it."""

    def __init__(self, *names: str, **options: Any) -> None:
        self.names, self.options = names, options


@dataclass(frozen=True)
class Command:
    """A command: a line for the list of commands, its arguments, and the beginning of its help if that says more.

    Of the arguments in a tuple only one may be given.
    """

    text: str
    arguments: tuple[Argument | tuple[Argument, ...], ...]
    help: str = ""


def _flag(name: str, text: str) -> Argument:
    return Argument(name, action="store_true", help=text)


def _many(name: str, metavar: str, text: str) -> Argument:
    return Argument(name, nargs="*", metavar=metavar, help=text)


def _overrides(text: str, metavar: str = "key=value") -> Argument:
    return _many("overrides", metavar, text)


def _repeated(name: str, kind: Callable[[str], Any], text: str, **options: Any) -> Argument:
    return Argument(name, type=kind, action="append", default=[], help=f"{text}; may be repeated", **options)


PRINTED = (_flag("--json", "print one JSON object instead of text"), _flag("--quiet", "print nothing but errors"))
"""The options of every command."""
RESULTS = Argument(
    "--results", type=_path_or_url, default=Path("results"), help="results folder or URL (default: results)"
)
MAY_CHANGE = (
    _flag("--changed-plugins", "continue although the source of a plug-in has changed since"),
    _flag("--take-over", "take over results at a URL from a process that has died"),
)
RUN_WORDS = "run id, its beginning, or the run's name or tag"

COMMANDS: Mapping[str, Command] = {
    "run": Command(
        "run an experiment to its end",
        (_overrides("experiment=NAME (or a YAML file of your own) and the values to change"),),
        RUN_HELP,
    ),
    "demo": Command("run the demo, two minutes", (_overrides("values to change"),), DEMO_HELP),
    "new": Command(
        "create a project with a data set and a method of your own",
        (Argument("folder", metavar="FOLDER", type=_path, help="a new folder, or an empty one"),),
        NEW_HELP,
    ),
    "completion": Command(
        "print a completion script for the shell",
        (Argument("shell", choices=("bash", "zsh", "fish"), help="the shell"),),
        COMPLETION_HELP,
    ),
    "resume": Command(
        "continue a run from its last checkpoint",
        (Argument("run", metavar="RUN", help=RUN_WORDS), _overrides("one of the keys above"), *MAY_CHANGE, RESULTS),
        RESUME_HELP,
    ),
    "attach": Command(
        "watch a detached run on a cluster, or stop it",
        (
            Argument("run", metavar="RUN", help=RUN_WORDS),
            Argument(
                "--address",
                default="auto",
                metavar="HOST:PORT",
                help="the cluster; default: the one that RAY_ADDRESS names or that runs on this machine",
            ),
            _flag("--stop", "stop the run after the round in progress, or after ten seconds without it"),
            RESULTS,
        ),
        ATTACH_HELP,
    ),
    "ablate": Command(
        "vary configuration values over seeds, with Ray Tune",
        (
            _overrides("ablation=NAME experiment=NAME and the values to change"),
            (
                _flag("--plan", "show the trials and start nothing"),
                Argument("--resume", metavar="ABLATION", help="continue an ablation: its id, or the beginning of it"),
                Argument("--retry-failed", metavar="ABLATION", help="run an ablation's failed trials again"),
            ),
            *MAY_CHANGE,
            RESULTS,
        ),
        ABLATE_HELP,
    ),
    "describe": Command("show a space's size, costs and tiers", (_overrides("space=NAME (or experiment=NAME), ..."),)),
    "calibrate": Command(
        "compute a simulated device's MACs per second from measured training",
        (
            _overrides("experiment=NAME and the values to change"),
            Argument("--architecture", default="largest", help="the network that was trained (default: largest)"),
            (
                Argument("--seconds", type=_number(Annotated[float, POSITIVE]), help="how long the training took"),
                Argument("--measured", metavar="FILE", type=_path, help="measured trainings of many devices"),
            ),
            Argument(
                "--samples", type=_number(Annotated[int, ONE_OR_MORE]), help="number of samples that were trained on"
            ),
            Argument(
                "--epochs", default=1, type=_number(Annotated[int, ONE_OR_MORE]), help="passes over them (default: 1)"
            ),
            Argument("--out", type=_path, help="write the devices of --measured as a table for tiers.device_table"),
        ),
        CALIBRATE_HELP,
    ),
    "keys": Command(
        "list configuration keys with type, default, range and meaning",
        (_many("given", "PREFIX or key=value", "method.train, or experiment=NAME, method=NAME, ..."),),
        KEYS_HELP,
    ),
    "plugins": Command(
        "list what can be chosen by name, and where your own code goes",
        (_many("words", "WORD", "what to look for, such as server or data"),),
        PLUGINS_HELP,
    ),
    "tables": Command(
        "list the columns of the result tables: type, unit and meaning",
        (_many("words", "TABLE", "runs, rounds, clients, ... (default: all)"),),
    ),
    "prepare": Command(
        "prepare a data set and its partition",
        (
            _overrides("dataset=NAME (or experiment=NAME), ..."),
            Argument("--picture", metavar="FILE", type=_path, help="plot which client has which data (.png or .pdf)"),
        ),
    ),
    "report": Command(
        "write tables, plots and an HTML page of runs, or of an ablation",
        (
            _many("runs", "RUN", "ids, names or tags, or an ablation (default: the one started last)"),
            Argument("--out", type=_path, help="folder for the files (default: RESULTS/reports/RUN)"),
            _repeated(
                "--target",
                _target,
                "also report rounds, megabytes and simulated hours to this score on validation data: an accuracy such "
                "as 0.8, or loss=0.5 (default: the runs' stop.target)",
                metavar="SCORE",
            ),
            _flag("--follow", "write it again every 30 s until the runs end; the open page reloads itself"),
            RESULTS,
        ),
    ),
    "reproduce": Command(
        "run the tables and figures of the papers, and check their claims",
        (
            _overrides("fedoras/tab6 (or ./mine/tab1.yaml), scale=small, ...", "ITEM or key=value"),
            (
                _flag("--list", "all items: what they need, and their state here"),
                _flag("--scoreboard", "all claims of all papers, with their states"),
                _flag("--show", "the item's table from the runs so far; runs nothing"),
            ),
            _flag("--recorded", "use recorded values for items that have not been run here"),
            _flag("--record", "record the values of the item's runs beside the item"),
            Argument("--out", type=_path, help="with --scoreboard: write a page with figures to this folder"),
            RESULTS,
        ),
        REPRODUCE_HELP,
    ),
    "search": Command(
        "find the best subnets of a trained supernet for new targets",
        (
            Argument("run", metavar="RUN", help=f"{RUN_WORDS}; a run of superfednas"),
            _repeated("--macs", _number(Annotated[float, POSITIVE]), "upper limit of MACs"),
            _repeated(
                "--latency-s", _number(Annotated[float, POSITIVE]), "upper limit of latency on this machine, in seconds"
            ),
            Argument(
                "--samples",
                type=_number(Annotated[int, UP_TO_A_MILLION]),
                help="number of subnets to measure (default: as in the run)",
            ),
            Argument("--metric", choices=get_args(Metric), help="what subnets are ranked by (default: as in the run)"),
            Argument(
                "--min-tau",
                type=_number(Annotated[float, Interval(ge=-1, le=1)]),
                help="Kendall's tau that the predictors must reach",
            ),
            Argument(
                "--tolerance",
                type=_number(Annotated[float, Interval(gt=0, lt=1)]),
                help="share by which a subnet may cost less than its target (default: as in the run)",
            ),
            RESULTS,
        ),
    ),
    "status": Command(
        "list runs and ablations with their state",
        (
            _flag("--clean", "stop the processes that dead runs left behind on this machine"),
            _many("runs", "RUN", "ids, their beginnings, names or tags (default: the newest 50)"),
            _flag("--all", "all runs and ablations, not only the newest 50 of each"),
            RESULTS,
        ),
    ),
    "board": Command(
        "serve a live web page of runs and ablations",
        (
            Argument("--host", default="127.0.0.1", help="interface to serve on (default: 127.0.0.1, this machine)"),
            Argument(
                "--port",
                default=8270,
                type=_number(Annotated[int, Interval(ge=0, le=65535)]),
                help="port to serve on, 0 for any free one (default: 8270)",
            ),
            Argument(
                "--token",
                help="secret that the page asks for; better in FEDLOOM_BOARD_TOKEN, as others see command lines",
            ),
            RESULTS,
        ),
        BOARD_HELP,
    ),
    "export": Command(
        "write a trained model as files that run without fedloom",
        (
            Argument("run", metavar="RUN", help=RUN_WORDS),
            Argument("--tier", help="the model of this tier"),
            Argument("--target", metavar="MEASURE=LIMIT", help="the model of a searched target, such as macs=1e9"),
            Argument("--architecture", metavar="TEXT", help="smallest, largest, d=1,0,2,1 e=.14 or 3-1-8-0"),
            Argument("--model", metavar="NAME", help="one of the run's kept models (with --tier: supernet_init, ...)"),
            Argument("--out", type=_path, help="folder for the files (default: RESULTS/exports/RUN)"),
            Argument(
                "--formats", default="safetensors,pt2", help="any of safetensors,pt2,onnx (default: safetensors,pt2)"
            ),
            RESULTS,
        ),
        EXPORT_HELP,
    ),
    "submit": Command(
        "run an experiment or an ablation on a Ray cluster",
        (
            Argument("--address", required=True, metavar="URL", help="the cluster's dashboard: http://HOST:8265"),
            _repeated(
                "--include",
                _path,
                "file or folder of your own to send (without its data, results, tests and hidden entries)",
                metavar="PATH",
            ),
            _repeated(
                "--env",
                str,
                "environment variable of the job; without a value, as for secrets, the one that it has here",
                metavar="NAME[=VALUE]",
            ),
            _flag("--no-wait", "print the job's id and return"),
            _overrides("experiment=NAME (and ablation=NAME), results=WHERE and the values to change"),
        ),
        SUBMIT_HELP,
    ),
    "verify": Command(
        "check that the files of runs are what fedloom wrote",
        (Argument("runs", nargs="+", metavar="RUN", help="ids, their beginnings, names or tags"), RESULTS),
        VERIFY_HELP,
    ),
}
