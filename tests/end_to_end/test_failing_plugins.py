"""Methods of one's own that are wrong, and plug-ins that fail in mid-run: a line or a failed row, never a traceback."""

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import pytest

from fedloom.experiments.cli import main
from fedloom.platform.results.paths import list_runs
from fedloom.platform.results.tables import read_table

SMALL = [
    *("executor.kind=serial", "results=results", "tiers.count=1", "tiers.paths=50"),
    *("data.num_clients=8", "data.train_samples=320", "data.test_samples=80"),
]
SPACE = ["space.name=mixers:mixers", "space.options.channels=4"]
ROUNDS = ["method.train.rounds=2", "method.train.epochs=1", "method.train.clients_per_round=4"]
FEDAVG = ["method=fedavg", *SMALL, *SPACE, *ROUNDS]
FEDORAS = [
    *("method=fedoras", *SMALL, *SPACE, *ROUNDS, "method.search.population=4", "method.search.offspring=2"),
    *("method.search.budget=8", "method.finetune.clients_per_round=2", "method.finetune.rounds=0"),
    *("method.rand_init.clients_per_round=2", "method.rand_init.rounds=0"),
]
MIXERS = Path(__file__).resolve().parent.parent / "plugins" / "mixers.py"

_numbers = itertools.count()


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that the command is started from, with a small space in it."""
    folder = tmp_path_factory.mktemp("beside")
    (folder / "mixers.py").write_text(MIXERS.read_text())
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(sys, "path", [*sys.path, str(folder)])
        yield folder
    for name in [name for name in sys.modules if name == "mixers" or name.startswith("failing_")]:
        del sys.modules[name]


def written(beside: Path, code: str) -> str:
    """The name of a module with this code."""
    module = f"failing_{next(_numbers)}"
    (beside / f"{module}.py").write_text(code)
    return module


def call(*arguments: str) -> int:
    once = {argument.partition("=")[0]: argument for argument in arguments}.values()  # the last one counts
    with pytest.raises(SystemExit) as ending:
        main(("run", *once))
    return int(str(ending.value.code))


# -- methods -----------------------------------------------------------------------------------------------------------

HEAD = """from dataclasses import dataclass
from typing import Annotated
from fedloom.platform.federation.algorithm import RoundUpdate, Plan
from fedloom.platform.federation.method import Stage
from fedloom.platform.federation.method import Method
from fedloom.platform.settings import ONE_OR_MORE

@dataclass
class Config:
    name: str = "own"
    count: Annotated[int, ONE_OR_MORE, "a number"] = 1
"""
STAGE = """
class Own(Stage):
    name = "own"
    def begin(self, state):
        return state.with_group("nothing", {})
    def rounds_left(self, state):
        return 1 - state.round
    def macs_left(self, state):
        return 1.0
    def plan(self, state):
        return Plan([], "nothing")
    def merge(self, state, plan, result):
        return RoundUpdate(state)
"""


def made(stages: str = "lambda *_: [Own()]", config: str = "Config", more: str = "", kind: str = "shared") -> str:
    return f"{HEAD}{STAGE}METHOD = Method({config}, {stages}, kind={kind!r}{more})\n"


def configured(*fields: str) -> str:
    body = "".join(f"    {field}\n" for field in fields)
    return made(config="Other").replace("METHOD", f"@dataclass\nclass Other:\n{body}METHOD")


METHODS = {
    "a number": ("METHOD = 3\n", r"is an int: give the import path of a Method, see fedloom"),
    "no such name": (made().replace("METHOD", "METHOT"), "has no 'METHOD'; did you mean 'METHOT'"),
    "fails at import": ("raise RuntimeError('no way')\n", r"cannot be imported: RuntimeError: no way \(line 1 of "),
    "wrong arguments": (made(more=", lack=()"), r"cannot be imported: TypeError: .*'lack'.*\(line \d+ of"),
    "no configuration": (made(config="int"), "its config must be a dataclass with a field `name: str`"),
    "a field without a default": (configured("name: str"), "fails: TypeError: .*missing 1 required positional arg"),
    "a field of no type": (configured("name: str = ''", "x: 'X' = 1"), "its config cannot be composed: name 'X' is"),
    "a field of objects": (
        configured("name: str = ''", "x: object = object()"),
        "its config cannot be composed: .*; give ",
    ),
    "a field of paths": (
        "from pathlib import Path\n" + configured("name: str = ''", "x: Path = Path()"),
        "its config cannot be composed: Object of type PosixPath .*; give ",
    ),
    "kind": (made(kind="own"), "its kind is 'own': give one of tiers, subnets, silos, shared"),
    "tables": (made(more=", lacks='runs'"), "its lacks is 'runs': give a tuple of runs, rounds"),
    "traits": (made(more=", searchable=3"), "fails: TypeError"),
    "too few arguments": (made("lambda config: [Own()]"), "fails: TypeError: .*takes 1 positional argument"),
    "no list": (made("lambda *_: None"), "its stages are None: give a list of one or more"),
    "no stages": (made("lambda *_: []"), r"its stages are \[\]: give a list of one or more"),
    "no stage": (made("lambda *_: [3]"), "its stage int has no name, begin, rounds_left, plan, merge, end"),
    "parameters of a member": (
        made().replace("def plan(self, state)", "def plan(self)"),
        r"its stage Own: plan cannot be called with \(state\): too many positional arguments",
    ),
    "no function": (made().replace("1.0", "1.0\n    macs_left = 2"), "its stage Own: macs_left cannot be called with"),
    "one name for two": (made("lambda *_: [Own(), Own()]"), "its stages are called own, own: give each a name of its"),
    "fails": (made("lambda *_: [Own().nothing]"), r"fails: AttributeError: .*\(line \d+ of fail"),
}


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert call(*arguments) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n"), err.startswith("fedloom: ")) == ("", 1, True), out + err
    assert not Path("results").exists()
    return err.strip()


@pytest.mark.parametrize("case", METHODS)
def test_a_method_that_cannot_be_used(case: str, beside: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, message = METHODS[case]
    module = written(beside, code)
    line = refusal(capfd, f"method={module}:METHOD", *SMALL, *SPACE)
    assert re.search(f"method '{module}:METHOD':? {message}|{module}.py {message}", line), line


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("method.coumt=3", "unknown configuration key 'method.coumt'; did you mean 'method.count'"),
        ("method.count=much", "method.count=much: must be an int"),
        ("method.count=0", "method.count=0: must be at least 1"),
    ],
)
def test_a_methods_own_options(given: str, message: str, beside: Path, capfd: pytest.CaptureFixture[str]) -> None:
    module = written(beside, made())
    assert message in refusal(capfd, f"method={module}:METHOD", *SMALL, *SPACE, given)


def test_a_method_that_is_not_there(beside: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = refusal(capfd, "method=nowhere:METHOD", *SMALL)
    assert "method 'nowhere:METHOD' cannot be imported: there is no module 'nowhere' in " in line


def test_a_method_may_do_nothing_at_all(beside: Path) -> None:
    assert call("--json", f"method={written(beside, made())}:METHOD", *SMALL, *SPACE, "results=nothing") == 0


# -- in mid-run --------------------------------------------------------------------------------------------------------

LARGE = "RuntimeError('too large')"
AT_CLIENTS = {
    "a function": (
        "method.train.local_rule",
        f"def mine(client):\n    if client.samples > 2:\n        raise {LARGE}\n",
        "local rule '{path}' fails: RuntimeError: too large (line 3 of {file})",
    ),
    "a correction": (
        "method.train.local_rule",
        "def mine(client):\n    def correct(name, parameter, gradient):\n        if parameter.dim() == 4:\n"
        "            raise KeyError(4)\n    return correct\n",
        "local rule '{path}' fails: KeyError: 4 (line 4 of {file})",
    ),
    "weights": (
        "method.train.weighting",
        "def mine(work):\n    return {'layer.weight': 1.0, 'layer.running_mean': 1.0}\n",
        "weighting rule '{path}' gives no weight for fixed.patches.weight: give one to every tensor",
    ),
    "batches": (
        "data.augment",
        f"def mine(x_B, generator):\n    if len(x_B) > 4:\n        raise {LARGE}\n    return x_B\n",
        "augmentation '{path}' fails: RuntimeError: too large (line 3 of {file})",
    ),
    "a loss": (
        "objective.name",
        "from fedloom.platform.clients.objectives import Objective\nclass mine(Objective):\n"
        f"    def loss(self, outputs, targets):\n        if len(targets) > 4:\n            raise {LARGE}\n"
        "        return super().loss(outputs, targets)\n",
        "RuntimeError: too large (line 5 of {file})",
    ),
}


def failed(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """The run's id and how it says that it failed; nothing else is said."""
    known = {run.run_id for run in list_runs(Path("failed"))} if Path("failed").exists() else set[str]()
    assert call("--json", *arguments, "results=failed") == 3
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    (summary,) = [json.loads(line) for line in out.splitlines()]
    assert (summary["status"], summary["run_id"] in known) == ("failed", False)
    assert "\n" not in summary["message"]
    return summary["run_id"], summary["message"]


@pytest.mark.parametrize("case", AT_CLIENTS)
def test_what_fails_on_a_client_is_a_failed_row_that_names_it(
    case: str, beside: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    key, code, message = AT_CLIENTS[case]
    module = written(beside, code)
    run_id, said = failed(capfd, *FEDAVG, f"{key}={module}:mine")
    expected = message.format(path=f"{module}:mine", file=f"{module}.py")
    assert re.search(rf"^fedavg, round 1: client \d \(tier1\) failed: {re.escape(expected)}", said), said
    rows = read_table(Path("failed"), "clients", run_id=run_id)
    assert rows["status"].tolist() == ["failed"] * 4
    assert rows["error"].str.startswith(expected).all()


TWICE = """from fedloom.platform.search.generations import RandomSearch
class Twice:
    def __init__(self, inner):
        self.inner = inner
    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)
    def ask(self):
        if len(self.inner.history) > 4:
            raise KeyError("third")
        return self.inner.ask()
def mine(problem):
    return Twice(RandomSearch(problem))
"""

AT_THE_SERVER = {
    "selection": (
        "method.train.selection",
        "def mine(choice):\n    return [len(choice.history) // 4 * 99, *range(1, choice.size)]\n",
        "fedavg, round 2: selection rule '{path}' gives client 99, which is not eligible in this round",
    ),
    "server rule": (
        "method.train.server",
        "def mine(step):\n    return step.mean * (float('nan') if step.mean.dim() == 4 else 1)\n",
        "fedavg, round 1: server rule '{path}' gave values for fixed.patches.weight that are not finite",
    ),
    "searcher": (
        "method.search.searcher",
        TWICE,
        "search/tier1, round 4: searcher '{path}' fails: KeyError: 'third' (line 9 of {file})",
    ),
}


@pytest.mark.parametrize("case", AT_THE_SERVER)
def test_what_fails_at_the_server_ends_the_run_in_a_line_that_names_it(
    case: str, beside: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    key, code, message = AT_THE_SERVER[case]
    module = written(beside, code)
    _, said = failed(capfd, *(FEDORAS if "search" in key else FEDAVG), f"{key}={module}:mine")
    assert said == message.format(path=f"{module}:mine", file=f"{module}.py")


@pytest.mark.parametrize(
    ("member", "body", "message"),
    [
        ("plan", "raise RuntimeError('no\\nway')", "own, round 1: RuntimeError: no way (line {line} of {file})"),
        ("plan", "a, b = [3]", "own, round 1: not enough values to unpack (expected 2, got 1) (line {line} of {file})"),
        ("plan", "return None", "own, round 1: the stage's plan gives None: give a Plan"),
        ("plan", "return Plan([3], 'nothing')", "own, round 1: the stage's plan has 3 among its assignments: give Ass"),
        (
            "plan",
            "return Plan([], 'weights')",
            "own, round 1: the stage's plan names the tensor group 'weights'; there are not",
        ),
        ("begin", "return None", "own, round 1: the stage's begin gives None: give a RunState"),
        ("rounds_left", "return None", "own, round 1: the stage's rounds_left gives None: give an int"),
        ("macs_left", "return 'many'", "own, round 1: macs_left of stage 'own' gives 'many': give a number from 0"),
        ("merge", "return state", "own, round 1: the stage's merge gives RunState("),
    ],
)
def test_what_a_stage_of_ones_own_does_wrong_is_said(
    member: str, body: str, message: str, beside: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = made().splitlines()
    place = next(i for i, line in enumerate(lines) if f"def {member}(" in line) + 1
    lines[place] = f"        {body}"
    module = written(beside, "\n".join(lines))
    _, said = failed(capfd, f"method={module}:METHOD", *SMALL, *SPACE)
    assert said.startswith(message.format(line=place + 1, file=f"{module}.py")), said


ON_FEDAVG = """from dataclasses import dataclass, replace
from fedloom.platform.averaging.processors import Processor
from fedloom.platform.federation.algorithm import RoundTasks
from fedloom.platform.federation.method import Method
from fedloom.platform.methods import fedavg

@dataclass
class Config(fedavg.FedAvgConfig):
    name: str = "own"

class Silent(Processor):
    def {0}(self, *_given):
        pass

def stages(config, world):
    training, *evaluation = fedavg.stages(config, world)
    return [replace(training, {1}), *evaluation]

METHOD = Method(Config, stages, kind="shared")
"""
FORGOTTEN = {
    "after": ("after=lambda *_: None", "", "fedavg, round 1: the stage's after gives None: give a RunState"),
    "tasks": ("tasks=lambda _round: []", "", "fedavg, round 1: the stage's tasks gives []: give a RoundTasks"),
    "few tasks": ("tasks=lambda _: RoundTasks([])", "", "fedavg, round 1: the stage's tasks are 0 for 4 clients: give"),
    "a name": (
        "after=lambda state, *_: state.with_data('history', [])",
        "",
        "fedavg, round 1: 'history' is a JSON value of the stage itself: use another name",
    ),
    "final": ("final=lambda _state: None", "", "fedavg, at its end: the stage's final gives None: give a RunState"),
    "begun": ("", "begun", "fedavg, round 1: Silent.begun gives None: give a Processor"),
    "sums": ("", "on_sums", "fedavg, round 1: Silent.on_sums gives None: give a WeightedSums"),
    "mean": ("", "on_mean", "fedavg, round 1: Silent.on_mean gives None: give an Averaged"),
}
"""A wrong `return`, in an argument of a training stage or a method of a processor, and what is said."""


@pytest.mark.parametrize("case", FORGOTTEN)
def test_a_wrong_return_in_a_training_stage_is_said(case: str, beside: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argument, member, message = FORGOTTEN[case]
    module = written(beside, ON_FEDAVG.format(member or "nothing", argument))
    processors = [f"method.train.processors=[{module}:Silent]"] if member else []
    _, said = failed(capfd, *FEDAVG, f"method={module}:METHOD", *processors, "method.train.rounds=1")
    assert said.startswith(message), said


def test_a_stage_may_copy_the_values_that_are_not_its_own(beside: Path) -> None:
    copied = "after=lambda state, *_: replace(state, data=json.loads(json.dumps(dict(state.data))))"
    module = written(beside, "import json\n" + ON_FEDAVG.format("nothing", copied))
    rules = ["method.train.rounds=2", "method.train.selection=power_of_choice"]
    assert call(*FEDAVG, f"method={module}:METHOD", *rules, "results=copied") == 0


def test_a_value_error_of_the_code_that_makes_the_stages_names_its_line(
    beside: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module = written(beside, made("lambda *_: [int('x')]"))
    assert call(f"method={module}:METHOD", *SMALL, *SPACE) == 2
    line = made().count("\n")
    assert capfd.readouterr().err.splitlines()[-1] == (
        f"fedloom: invalid literal for int() with base 10: 'x' (line {line} of {module}.py)"
    )


# -- whatever it raises ------------------------------------------------------------------------------------------------

RAISED = {
    "an exit": ("raise SystemExit(0)", "SystemExit: 0"),
    "a full disk": ("raise OSError(28, 'No space left on device')", "OSError: .* No space left on device"),
    "a closed pipe": ("raise BrokenPipeError", "BrokenPipeError"),
    "no connection": ("raise ConnectionError('nobody there')", "ConnectionError: nobody there"),
    "no memory": ("raise MemoryError", "MemoryError"),
    "recursion": ("again = lambda: again()\nagain()", "RecursionError: maximum recursion depth exceeded"),
    "a silent one": ("raise type('Own', (BaseException,), {'__str__': lambda _: 1 / 0})", "Own"),
    "a long one": ("raise RuntimeError('x' * 9999)", "RuntimeError: x{300} [.]{3}"),
}
OBJECTIVE = """from fedloom.platform.clients.objectives import Objective
class mine(Objective):
    def loss(self, *given):
"""
ON_CLIENTS = f"""{OBJECTIVE}        if len(given[1]) <= 4:
            return super().loss(*given)
"""
SOURCE = """from fedloom.platform.data.source import Source
class Own(Source):
    scale = 16
    class_names = tuple("0123456789")
    def identity(self):
        return {{"own": 1}}
    def labels(self, part):
{0}
    inputs = labels
def mine(config):
    return Own()
"""
BEFORE = {
    "at import": ("method.train.server", "{0}\ndef mine(step):\n    return step.mean\n", ""),
    "a rule": ("method.train.server", "def mine(step):\n{0}\n", "server rule '{path}' fails: "),
    "a data set": ("data.dataset", "def mine(config):\n{0}\n", "data set '{path}' fails: "),
    "its source": ("data.dataset", SOURCE, "code of your own fails: "),
    "an objective": ("objective.name", OBJECTIVE + "{0}\n", "objective '{path}' fails: "),
}


EVERYWHERE = ("an exit", "a full disk")
"""What is raised in every place; the others in one place of a kind."""


@pytest.mark.parametrize(
    ("place", "raised"), [(place, r) for place in BEFORE for r in (RAISED if place == "a rule" else EVERYWHERE)]
)
def test_whatever_code_raises_before_a_run_is_its_fault(
    place: str, raised: str, beside: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    key, code, blame = BEFORE[place]
    statements, message = RAISED[raised]
    depth = {"at import": "", "its source": " " * 8, "an objective": " " * 8}.get(place, " " * 4)
    module = written(beside, code.format(indent(statements, depth)))
    line = refusal(capfd, *FEDAVG, f"{key}={module}:mine")
    assert len(line) < 600
    assert re.search(rf"{blame.format(path=f'{module}:mine')}{message}.* \(line \d+ of {module}.py\)", line), line


@pytest.mark.parametrize("raised", RAISED)
def test_whatever_code_raises_on_a_client_is_a_failed_row(
    raised: str, beside: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    statements, message = RAISED[raised]
    module = written(beside, ON_CLIENTS + indent(statements, " " * 8))
    run_id, said = failed(capfd, *FEDAVG, f"objective.name={module}:mine")
    assert re.search(rf"client \d \(tier1\) failed: {message.replace('{300} [.]{3}', '+')}", said), said
    assert read_table(Path("failed"), "clients", run_id=run_id)["status"].tolist() == ["failed"] * 4


@pytest.mark.parametrize(
    ("member", "raised"),
    [*itertools.product(["plan"], EVERYWHERE), ("begin", "an exit"), ("merge", "an exit"), ("end", "an exit")],
)
def test_whatever_a_stage_of_ones_own_raises_fails_the_run(
    member: str, raised: str, beside: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    statements, message = RAISED[raised]
    arguments = "self, state, plan, result" if member == "merge" else "self, state"
    stage = f"{STAGE}    def {member}({arguments}):\n{indent(statements, ' ' * 8)}\n"
    module = written(beside, made().replace(STAGE, stage))
    _, said = failed(capfd, f"method={module}:METHOD", *SMALL, *SPACE)
    place = "at its end" if member == "end" else "round 1"
    assert re.search(rf"^own, {place}: {message}.* \(line \d+ of {module}.py\)$", said), said


def test_an_interruption_in_ones_own_code_interrupts(beside: Path) -> None:
    module = written(beside, f"{ON_CLIENTS}        raise KeyboardInterrupt\n")
    assert call("--json", *FEDAVG, f"objective.name={module}:mine", "results=interrupted") == 130


# -- a rule that weighs nothing ----------------------------------------------------------------------------------------

WEIGHTS = "def mine(work):\n    return dict.fromkeys(work.seen_by_tensor, {})\n"


def test_a_weighting_rule_that_weighs_nothing_is_refused(beside: Path, capfd: pytest.CaptureFixture[str]) -> None:
    module = written(beside, WEIGHTS.format("0.0"))
    line = refusal(capfd, *FEDAVG, f"method.train.weighting={module}:mine")
    assert (
        f"weighting rule '{module}:mine' gives all tensors weight 0, for a client with 4 samples and for one with 1000"
        in line
    )


def test_a_round_in_which_nothing_weighs_anything_fails(beside: Path, capfd: pytest.CaptureFixture[str]) -> None:
    module = written(beside, WEIGHTS.format("float(work.samples == 1000)"))
    _, said = failed(capfd, *FEDAVG, f"method.train.weighting={module}:mine")
    assert said == (
        f"fedavg, round 1: all weights of all 4 updates are 0, so that the round trains nothing: weighting rule "
        f"'{module}:mine' must give what is trained a weight above 0"
    )
