"""Plug-ins that are wrong: one line that names the plug-in and says what is wrong, before anything is written."""

import itertools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

import pytest

from fedloom.experiments.cli import main
from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.federation.world import build_world
from fedloom.platform.runs.run import planned_stages

SMALL = ["executor.kind=serial", "results=results", "data.num_clients=8", "tiers.count=1", "tiers.paths=50"]
ROUNDS = ["method.train.rounds=2", "method.train.epochs=1", "method.train.clients_per_round=4"]
DIGITS = [*SMALL, "space.name=cnn_digits", "space.stem_channels=4", "space.stage_layers=[1,1]"]
FEDAVG = ["method=fedavg", *DIGITS, *ROUNDS]
FEDORAS = [
    *("method=fedoras", *DIGITS, *ROUNDS, "method.search.population=4", "method.search.offspring=2"),
    *("method.search.budget=6", "method.finetune.clients_per_round=2", "method.finetune.rounds=0"),
    *("method.rand_init.clients_per_round=2", "method.rand_init.rounds=0"),
]
ELASTIC = [
    *("experiment=superfednas_digits", *SMALL, *ROUNDS, "space.stage_widths=[8,8]", "space.stage_strides=[2,2]"),
    *("space.depths=[1,1]", "space.expansions=[0.5,1.0]", "method.family=[smallest,largest]"),
    *("method.train.evaluate_every=0", "method.search.samples=12", "method.search.min_tau=-1"),
    *("method.search.population=4", "method.search.generations=2"),
]

TRAIN = "method.train.options"


@dataclass(frozen=True)
class Place:
    """Where a plug-in goes, and the body of a function there that is right."""

    key: str
    options: str
    arguments: str
    right: str
    base: list[str]
    imports: str = ""

    def code(
        self, body: str | None = None, arguments: str | None = None, options: str = "strength: float = 1.0"
    ) -> str:
        given = ", ".join(
            part for part in (self.arguments if arguments is None else arguments, f"*, {options}") if part
        )
        return f"{self.imports}def mine({given}):\n{indent(body or self.right, '    ')}\n"


SHARES = "from fedloom.platform.methods.shares import Shares\n"
ARRAYS = """import numpy as np
from fedloom.platform.data.arrays import Arrays
X = np.arange(200 * 64).reshape(200, 8, 8).astype(np.uint8)
Y = np.arange(200) % 10
"""
OBJECTIVE = "from fedloom.platform.clients.objectives import Objective\n"
SEARCHER = """from fedloom.platform.search.generations import RandomSearch
class Like:
    def __init__(self, inner):
        self.inner = inner
    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)
"""
SPACE = """from torch import nn
from fedloom.platform.spaces.operator_choice import Candidate, OperatorChoiceSpace
def conv(inputs=4, outputs=4):
    return Candidate(f"conv{inputs}", lambda: nn.Conv2d(inputs, outputs, 1))
class Fixed(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.stem, self.classifier = nn.Conv2d(1, 4, 1), nn.Linear(4, classes)
    def forward(self, x, layers):
        x = self.stem(x)
        for layer in layers:
            x = layer(x)
        return self.classifier(x.mean(dim=(2, 3)))
def space(layers=((conv(), Candidate("none", nn.Identity)),), fixed=Fixed, shape=(1, 8, 8)):
    return OperatorChoiceSpace(name="own", input_shape=shape, layers=layers, build_fixed=fixed)
"""

PLACES = {
    "selection rule": Place("method.train.selection", TRAIN, "choice", "return choice.draw(choice.size)", FEDAVG),
    "local rule": Place("method.train.local_rule", TRAIN, "client", "return None", FEDAVG),
    "local optimizer": Place(
        "method.train.optimizer", TRAIN, "step", "[p.sub_(strength * step.lr) for p in step.parameters]", FEDAVG
    ),
    "weighting rule": Place(
        "method.train.weighting", TRAIN, "work", "return dict.fromkeys(work.seen_by_tensor, strength)", FEDAVG
    ),
    "server rule": Place("method.train.server", TRAIN, "step", "return step.mean", FEDAVG),
    "distribution heuristic": Place(
        "method.train.distribution.heuristic",
        TRAIN,
        "handout",
        "return [handout.draw(place) for place in range(len(handout.client_ids))]",
        ELASTIC,
    ),
    "shares rule": Place(
        "method.train.shares.rule", TRAIN, "sharing", "return Shares([strength] * 4)", ELASTIC, SHARES
    ),
    "searcher": Place(
        "method.search.searcher", "method.search.options", "problem", "return RandomSearch(problem)", FEDORAS, SEARCHER
    ),
    "predictor": Place(
        "method.search.predictor",
        "method.search.options",
        "features, values, generator",
        "return lambda features: features.sum(axis=1)",
        ELASTIC,
    ),
    "data set": Place("data.dataset", "data.options", "config", "return Arrays((X, Y))", FEDAVG, ARRAYS),
    "augmentation": Place("data.augment", "data.options", "x_B, generator", "return strength * x_B", FEDAVG),
    "objective": Place("objective.name", "objective.options", "", "return Objective()", FEDAVG, OBJECTIVE),
    "space": Place(
        "space.name", "space.options", "config", "return space()", ["method=fedavg", *SMALL, *ROUNDS], SPACE
    ),
    "budget": Place("tiers.budget.kind", "tiers.budget.options", "round, rng", "return strength / 2", FEDAVG),
}


_numbers = itertools.count()


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that the command is started from."""
    folder = tmp_path_factory.mktemp("beside")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(sys, "path", [*sys.path, str(folder)])
        yield folder
    for name in [name for name in sys.modules if name.startswith("wrong_")]:
        del sys.modules[name]


def written(beside: Path, code: str | None) -> str:
    """The name of a module with this code; of none, if there is none."""
    module = f"wrong_{next(_numbers)}"
    if code is not None:
        (beside / f"{module}.py").write_text(code)
    return module


Refuse = Callable[..., str]


@pytest.fixture
def refused(beside: Path, capfd: pytest.CaptureFixture[str]) -> Refuse:
    """Runs `fedloom run ARGUMENTS`, which must be refused; gives the line."""

    def run(*arguments: str) -> str:
        once = {argument.partition("=")[0]: argument for argument in arguments}.values()  # the last one counts
        with pytest.raises(SystemExit) as ending:
            main(("run", *once))
        out, err = capfd.readouterr()
        assert ending.value.code == 2, out
        assert (out, err.count("\n"), err.startswith("fedloom: ")) == ("", 1, True), out + err
        assert len(err) < 600
        assert not (beside / "results").exists()
        return err.strip()

    return run


# -- the same for every place ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrong:
    """What is wrong with a plug-in, and how that is said: `{path}` is its import path, `{options}` their key."""

    message: str
    code: Callable[[Place], str | None]
    name: str = "mine"
    given: str = ""


WRONG = {
    "no file": Wrong(r"cannot be imported: there is no module '{module}' in .*; give module:name", lambda _: None),
    "no such name": Wrong(r"cannot be imported: .*/{module}.py has no 'mien'; did you mean 'mine'", Place.code, "mien"),
    "fails at import": Wrong(
        r"cannot be imported: RuntimeError: in two lines \(line 1 of {module}.py\)",
        lambda place: "raise RuntimeError('in two\\nlines')\n" + place.code(),
    ),
    "a number": Wrong(r"is an int, not a (function|class) of ", lambda _: "mine = 3\n"),
    "parameters": Wrong(
        r"has the wrong parameters \(mine\(one, .*missing a required argument: .*; give a (function|class) of ",
        lambda place: place.code(arguments="one, two, three, four"),
    ),
    "fails": Wrong(
        r"fails: RuntimeError: no way \(line \d+ of {module}.py\)", lambda p: p.code("raise RuntimeError('no way')")
    ),
}

WRONG_OPTIONS = {
    "unknown": Wrong(
        r"{options}.strenght: not an option of .*{kind} {path}.*; the options are strength; did you mean 'strength'",
        Place.code,
        given="strenght=2.0",
    ),
    "of another type": Wrong(
        r"{options}.strength=much: must be a float \(an option of {kind} {path}\)", Place.code, given="strength=much"
    ),
    "missing": Wrong(
        r"{options}.strength is missing: give a float .an option of {kind} {path}",
        lambda place: place.code(options="strength: float"),
    ),
}


def expected(message: str, kind: str, module: str) -> str:
    path, options = f"{module}:mine", PLACES[kind].options
    return message.format(module=module, path=path, kind=kind, options=options)


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("wrong", WRONG)
def test_code_that_cannot_be_used(kind: str, wrong: str, beside: Path, refused: Refuse) -> None:
    place, case = PLACES[kind], WRONG[wrong]
    module = written(beside, case.code(place))
    line = refused(*place.base, f"{place.key}={module}:{case.name}")
    assert re.search(f"{kind} '{module}:{case.name}' {expected(case.message, kind, module)}", line), line


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("wrong", WRONG_OPTIONS)
def test_options_that_cannot_be_used(kind: str, wrong: str, beside: Path, refused: Refuse) -> None:
    place, case = PLACES[kind], WRONG_OPTIONS[wrong]
    module = written(beside, case.code(place))
    given = [f"{place.options}.{case.given}"] if case.given else []
    line = refused(*place.base, f"{place.key}={module}:mine", *given)
    assert re.search(expected(case.message, kind, module), line), line


@pytest.mark.parametrize("kind", PLACES)
def test_what_is_right_is_welcome(kind: str, beside: Path) -> None:
    """Then what is refused above is refused for what is wrong with it."""
    place = PLACES[kind]
    module = written(beside, place.code())
    config = compose_config([*place.base, f"{place.key}={module}:mine", f"{place.options}.strength=2"])
    assert planned_stages(build_world(config))


# -- what each place asks for ------------------------------------------------------------------------------------------

NAN = "float('nan')"
ONE_EACH = "dict.fromkeys(work.seen_by_tensor, {})".format
A_CLASS = """from fedloom.platform.clients.local_rules import LocalRule
import torch
class mine(LocalRule):
    shared = ("control",)
    def begin(self, client):
        return None
    def end(self, client):
        for name, parameter in client.parameters.items():
            client.send("control", name, parameter)
    def merge(self, step):
        return step.mean
"""
LIKE_RANDOM = "class Searcher(Like):\n    {}\ndef mine(problem):\n    return Searcher(RandomSearch(problem))\n".format


def own_class(before: str, after: str) -> str:
    assert before in A_CLASS
    return A_CLASS.replace(before, after)


def overriding(member: str, answer: str) -> str:
    return f"{OBJECTIVE}class mine(Objective):\n    def {member}(self, *given):\n        return {answer}\n"


ANSWERS: dict[str, list[tuple[str, str]]] = {
    "selection rule": [
        ("return None", "gives None: give the ids of clients, or a Cohort"),
        ("return [0.5, 1.5]", r"gives \[0.5, 1.5\]: give the ids of clients"),
        ("return choice.draw(choice.size + 1)", "gives 5 clients for a round of 4"),
        ("return [99]", "gives client 99, which is not eligible"),
        ("return []", "gives no client, though all are available"),
        ("yield choice.nothing", r"fails: AttributeError: 'Choice' .*\(line 2 of"),
    ],
    "local rule": [
        ("return 'abc'", r"gives 'abc': give a function of \(name, parameter, gradient\), or None"),
        ("return lambda name, parameter, gradient: gradient + 1", "gives something back: change the gradient in place"),
        (f"return lambda name, parameter, gradient: gradient.fill_({NAN})", "makes a gradient that is not finite"),
        ("return lambda gradient: None", r"fails: TypeError: .* takes 1 positional argument but 3 were given"),
        (own_class('("control",)', '"control"'), r"has shared = 'control': give a tuple of names"),
        (own_class("def begin", "def start"), r"has no begin\(client\): write one"),
        (own_class('"control", name, parameter', '"c", name, parameter'), "no shared slot 'c': name it in `shared`"),
        (own_class("name, parameter)", "name, torch.ones(7))"), r"of \(7,\) is sent .*give floats of its shape \(2,\)"),
        (own_class("name, parameter)", f"name, parameter * {NAN})"), "gave values for control/.* not finite"),
        (
            own_class("return step.mean", "return None"),
            "gave None for a region of control/.*give new values",
        ),
        (A_CLASS.replace("(LocalRule)", ""), "is no LocalRule: derive the class from fedloom"),
    ],
    "weighting rule": [
        ("return 1.0", "gives float: give a dictionary of one weight per tensor"),
        (f"return {ONE_EACH(NAN)}", "the weight nan: weights are finite numbers of at least 0"),
        (f"return {ONE_EACH(-1)}", "the weight -1: weights are finite"),
        ("return {}", "gives no weight for layer.weight: give one to every tensor"),
    ],
    "server rule": [
        (
            "return None",
            r"gave None for a region of layer.weight of the shape \(1, 2\): give new values",
        ),
        ("return step.mean.sum()", r"gave the shape \(\) for a region"),
        ("return step.mean.long()", "gave values of torch.int64 for layer.weight: give floats"),
        (f"return step.mean * {NAN}", "gave values for layer.weight that are not finite"),
    ],
    "distribution heuristic": [
        ("return None", "gives None: give an architecture, a tuple, to each client"),
        ("return [0] * 4", r"gives \[0, 0, 0, 0\]: give an architecture"),
        ("return [handout.space.smallest]", "gives 1 subnets to 4 clients"),
        ("return [(9, 9)] * 4", "fails: ValueError: stage 1 of resnet_elastic_small has the options 0 to"),
    ],
    "shares rule": [
        ("return [1.0] * 4", "gives list: give a fedloom.platform.methods.shares.Shares"),
        ("return Shares(None)", "gives None shares to 4 clients: give one per client"),
        (f"return Shares([{NAN}] * 4)", "gives the share nan: shares are finite numbers"),
        ("return Shares([1.0] * 4, {'a': 'b'})", "the schedule a the value 'b': give numbers by their names"),
    ],
    "searcher": [
        ("return 3", "gives int, which has no history, ask, tell, state, restore: see fedloom"),
        (LIKE_RANDOM("def ask(self): return None"), "ask gives None: give a list of architectures"),
        (LIKE_RANDOM("def ask(self): return [(99, 0)]"), r"ask gives \(99, 0\): give tuples of 2 whole numbers"),
        (LIKE_RANDOM("def tell(self, *told): raise KeyError('x')"), r"fails: KeyError: 'x' \(line \d+ of"),
        (LIKE_RANDOM("def state(self): return {'a': object()}"), "its state cannot be written as JSON"),
        (LIKE_RANDOM("def restore(self, state): pass"), "the state that it restores is .*: give "),
    ],
    "predictor": [
        ("return None", "gives None: give a function of features that predicts values"),
        ("return lambda features: features", r"gives \(4, \d+\) for 4 samples: give a finite value for each"),
        (f"return lambda features: features.sum(axis=1) * {NAN}", "gives values that are not finite"),
        ("return lambda features: 'abc'", "fails: ValueError: could not convert string to float"),
    ],
    "data set": [
        ("return None", "returns NoneType: give Arrays"),
        ("return Arrays((X, Y[:199]))", "train has 200 inputs and 199 labels: one for each"),
        ("return Arrays((X, Y - 1))", "has labels -1 to 8: expected 0 to 8"),
        ("return Arrays((X, Y), class_names=['a'])", "has labels 0 to 9: expected 0 to 0"),
        ("return Arrays((X * np.nan, Y))", "train inputs hold NaN or infinity"),
    ],
    "augmentation": [
        ("return None", r"makes None of a batch of \(4, 1, 8, 8\) of torch.float32: it must keep shape and type"),
        ("return x_B[:, :, 1:]", r"makes \(4, 1, 7, 8\) of .* it must keep shape and type"),
        (f"return x_B * {NAN}", "gives values that are not finite"),
    ],
    "objective": [
        ("return None", "is NoneType: derive its class from fedloom.platform.clients.objectives.Objective"),
        (overriding("loss", "given[0].sum(dim=1)"), r"loss gives the shape \(4,\) .*: give one finite number"),
        (overriding("loss", f"given[0].sum() * {NAN}"), "loss gives values that are not finite"),
        (overriding("metric_sum", "1.0"), "metric_sum gives 1.0: give a tensor"),
        (overriding("losses", "given[0].sum()"), "losses gives .*: give finite numbers for each of 4 samples"),
        (overriding("more", "{'mine': given[0]}"), r"more, mine gives the shape \(4, 10\)"),
        (overriding("more", "{'accuracy': given[0].sum()}"), "more gives accuracy, which is measured anyway: give it"),
        (overriding("for_client", "None"), "for_client gives NoneType: give an Objective"),
    ],
    "space": [
        ("return None", "returns NoneType, which has no .*: derive it from fedloom.platform.spaces.base.SearchSpace"),
        ("return space(fixed=lambda: Fixed(7))", r"gives the shape \(2, 7\) for 2 samples: expected \(2, 10\)"),
        ("return space(layers=())", "has no decisions: give options of at least one"),
        ("return space(layers=((conv(), conv(5), conv()),))", "fails: RuntimeError: "),
        ("return space(shape=(1, 7))", "fails: "),
    ],
    "budget": [
        ("return None", "gives None: give a share above 0 and at most 1"),
        ("return 0", "gives 0: give a share above 0"),
        (f"return {NAN}", "gives nan: give a share above 0"),
    ],
}


@pytest.mark.parametrize("case", [f"{kind}, {i}" for kind, cases in ANSWERS.items() for i in range(len(cases))])
def test_an_answer_that_cannot_be_used(case: str, beside: Path, refused: Refuse) -> None:
    kind, _, index = case.partition(", ")
    place, (code, message) = PLACES[kind], ANSWERS[kind][int(index)]
    whole = code if "class mine" in code else place.imports + code if "def mine" in code else place.code(code)
    module = written(beside, whole)
    line = refused(*place.base, f"{place.key}={module}:mine")
    assert re.search(f"^fedloom: ([a-z._]+: )?{kind} '{module}:mine':? .*{message}", line), line
