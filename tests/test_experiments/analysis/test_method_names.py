"""Analysis, reports and exports know kinds of methods, and no method by its name."""

import ast
from pathlib import Path

from fedloom.platform.methods.registry import METHODS
from fedloom.platform.methods.silos import SiloTrainingConfig

EXPERIMENTS = Path(__file__).resolve().parents[3] / "experiments"


def test_no_module_knows_methods_by_their_names() -> None:
    named = {
        file.relative_to(EXPERIMENTS).as_posix()
        for folder in ("analysis", "report", "export")
        for file in (EXPERIMENTS / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in METHODS
    }
    assert named == {"report/wording.py"}, "how a model of that name is written"


def test_the_methods_for_silos_are_those_that_train_silos() -> None:
    trained = {name: getattr(method.config(), "train", None) for name, method in METHODS.items()}
    of_silos = {name for name, train in trained.items() if isinstance(train, SiloTrainingConfig)}
    assert {name for name, method in METHODS.items() if method.kind == "silos"} == of_silos
