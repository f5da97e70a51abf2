"""The rules of the house that no type checker sees: the standard `platform` module, and who may import whom."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "experiments" / "examples"
TEMPLATE = ROOT / "experiments" / "template"
"""What `fedloom new` writes: files of a project of its own."""
TOP = ROOT / "experiments" / "fedloom" / "__init__.py"
"""The package `fedloom` itself, which lies above all folders."""
MAY_IMPORT = {
    "tiers": {"tiers"},
    "platform": {"tiers", "platform"},
    "actors": {"tiers", "platform", "actors"},
    "experiments": {"tiers", "platform", "actors", "experiments"},
}


TOP_LEVEL = {
    "tiers",
    "platform",
    "actors",
    "experiments",
    "docs",
    "tests",
    "pyproject.toml",
    "mkdocs.yml",
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "Makefile",
    "Dockerfile",
    "compose.yaml",
    "LICENSE",
}


def test_nothing_else_lies_at_the_top() -> None:
    """A test that wrote into the folder it was started from left results there once."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = {line.partition("/")[0].strip('"') for line in listed.stdout.splitlines()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


def imported_modules(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found.add(node.module or "")
    return found


def source_files(folder: str) -> list[Path]:
    return sorted(file for file in (ROOT / folder).rglob("*.py") if TEMPLATE not in file.parents)


def test_the_standard_platform_module_wins_with_the_root_on_the_path() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import platform; print(platform.system())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "Linux" or sys.platform != "linux"


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_folders_import_only_what_lies_below_them(folder: str) -> None:
    for file in source_files(folder):
        for module in imported_modules(file):
            top, _, rest = module.partition(".")
            assert top not in MAY_IMPORT or top == "platform", f"{file} imports {module}: use fedloom.{module}"
            if top == "fedloom":
                assert rest.split(".")[0] in MAY_IMPORT[folder], f"{file} imports {module}"
            if top == "ray":
                assert folder in {"actors", "experiments"}, f"{file} imports ray"
            if top == "torchvision":
                assert file.parent.name == "data", f"{file} imports torchvision outside data preparation"


def test_the_import_rule_sees_a_violation(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import ray.util\nfrom fedloom.actors import pool\n")
    assert imported_modules(bad) == {"ray.util", "fedloom.actors"}


def imported_files(file: Path) -> set[Path]:
    """The modules of fedloom that a module of it imports, wherever in it, be it for type checkers alone."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedloom."):
            base = ROOT.joinpath(*(node.module or "").split(".")[1:])
            for alias in node.names:
                inside = (base / f"{alias.name}.py", base / alias.name / "__init__.py")
                places = (*inside, base.with_suffix(".py"), base / "__init__.py")
                found.add(next(place for place in places if place.exists()))
    return found


def circle(imports: dict[Path, set[Path]]) -> list[Path]:
    """The first circle of imports that is found; empty if there is none."""
    free: set[Path] = set()

    def search(at: Path, way: list[Path]) -> list[Path]:
        if at in way:
            return way[way.index(at) :]
        for other in sorted(imports.get(at, ())) if at not in free else ():
            if found := search(other, [*way, at]):
                return found
        free.add(at)
        return []

    return next((found for place in sorted(imports) if (found := search(place, []))), [])


@pytest.fixture(scope="module")
def modules() -> dict[Path, set[Path]]:
    """Every module of fedloom with those that it imports."""
    files = [file for folder in MAY_IMPORT for file in source_files(folder) if EXAMPLES not in file.parents]
    files.remove(TOP)
    return {file: imported_files(file) for file in files}


def test_no_modules_and_no_folders_import_each_other_in_a_circle(modules: dict[Path, set[Path]]) -> None:
    """The commands at the root of `experiments/` may import everything, and no folder imports them."""
    folders: dict[Path, set[Path]] = {}
    for file, others in modules.items():
        folders.setdefault(file.parent, set()).update(other.parent for other in others if other.parent != file.parent)
    assert circle(modules) == []
    assert circle(folders) == []
    assert [folder for folder, others in folders.items() if ROOT / "experiments" in others] == []
    assert circle({Path("a"): {Path("b")}, Path("b"): {Path("c")}, Path("c"): {Path("b")}}) == [Path("b"), Path("c")]


def test_no_lower_layer_names_the_methods() -> None:
    """Built-in rules register themselves from `methods/`."""
    lower = [f for folder in ("averaging", "clients", "federation") for f in source_files(f"platform/{folder}")]
    assert len(lower) > 20
    assert [f for f in lower if "platform.methods" in f.read_text()] == []


def test_hardly_anything_asks_which_class_a_space_is() -> None:
    """A space says what it can do, so that a user's own takes part wherever it offers what is needed."""
    asked = re.compile(r"isinstance\([^()]*Space\b|cast\(\"?\w*Space\b")
    places = [line for folder in MAY_IMPORT for f in source_files(folder) for line in asked.findall(f.read_text())]
    assert len(places) <= 6, places


def test_a_method_is_imported_with_little_else_and_the_platform_without_ray() -> None:
    """FedAvg once pulled in 83 modules of fedloom, all spaces and data sets among them."""
    modules = [
        "fedloom." + f.relative_to(ROOT).as_posix().removesuffix(".py").replace("/", ".")
        for folder in ("tiers", "platform")
        for f in source_files(folder)
        if f.name != "__init__.py"
    ]
    code = (
        "import importlib, sys, fedloom.platform.methods.fedavg\n"
        "files = [getattr(m, '__file__', None) or '' for n, m in sys.modules.items() if n.startswith('fedloom.')]\n"
        "print(sum(f.endswith('.py') and not f.endswith('__init__.py') for f in files))\n"
        f"for m in {modules!r}: importlib.import_module(m)\n"
        "assert 'ray' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert 10 < int(run.stdout) <= 33


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the wheel of this tree was installed, without what it requires."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("fedloom-*.whl")
    site = folder / "site"
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)], check=True)
    return site


@pytest.mark.slow
def test_the_wheel_holds_what_the_folders_hold_and_imports(installed: Path) -> None:
    """All but what one reads in the source alone: pages and examples. A file in no package is missing here."""
    listed = subprocess.run(["git", "ls-files", *MAY_IMPORT], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]
    files = [file for file in files if EXAMPLES not in file.parents]
    files = [file for file in files if file.suffix != ".md" or TEMPLATE in file.parents]
    names = {
        file.name if file.parent == TOP.parent else file.relative_to(ROOT).as_posix()
        for file in files  # the package `fedloom` itself lies in experiments/fedloom/
    }
    package = installed / "fedloom"
    in_wheel = {f.relative_to(package).as_posix() for f in package.rglob("*") if f.is_file() and f.suffix != ".pyc"}
    assert in_wheel == names, "see packages and package-data in pyproject.toml"
    modules = [
        "fedloom." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in sorted(names)
        if name.endswith(".py") and name != "__init__.py" and "/template/" not in name
    ]
    # -I drops the working directory and PYTHONPATH; the editable install's finder is taken out by hand.
    code = (
        "import sys, importlib\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"
        "sys.path_hooks = [h for h in sys.path_hooks if 'editable' not in str(h).lower()]\n"
        f"site = {str(installed)!r}\n"
        "sys.path.insert(0, site)\n"
        f"for m in {modules!r}:\n"
        "    assert importlib.import_module(m).__file__.startswith(site), m\n"
    )
    run = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_the_wheels_command_starts_and_finds_its_files(installed: Path, tmp_path: Path) -> None:
    def fedloom(*words: str) -> str:
        command, own = [str(installed / "bin" / "fedloom"), *words], {**os.environ, "PYTHONPATH": str(installed)}
        return subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=True).stdout

    assert fedloom("--version").startswith("fedloom ")
    assert "fedoras_digits" in fedloom("run", "--help")
    assert "my_preset.yaml" in fedloom("new", "mine")
    assert (tmp_path / "mine" / "my_data.py").read_text() == (TEMPLATE / "my_data.py").read_text()
    assert "space cnn_digits" in " ".join(fedloom("describe", "experiment=fedoras_digits").split())


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("docs/**/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_the_pages_can_be_read_in_an_editor(page: Path) -> None:
    """As wide as the code; tables cannot be folded."""
    lines = enumerate(page.read_text().splitlines(), 1)
    assert [i for i, line in lines if len(line) > 120 and not line.startswith("|")] == []
