"""What a job is sent: the package wherever it lies, own files, nothing heavy, and only 50 MiB."""

import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from fedloom.experiments.shipping import MIB, PARTS, package_folder, plan_shipment, shipped, target_of
from fedloom.platform.runs.source_code import source_hash

ROOT = Path(__file__).resolve().parents[2]


def names(*include: str) -> set[str]:
    """What is shipped beside the package."""
    files = {str(file.target) for file in plan_shipment([Path(path) for path in include]).files}
    return {name for name in files if not name.startswith("fedloom/")}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, which is the working directory."""
    for name in (
        *("rules.py", "plugins/__init__.py", "plugins/space.py", "plugins/__pycache__/space.pyc", "plugins/old.pyc"),
        *("plugins/data/images.bin", "plugins/.env", "plugins/.git/HEAD", "plugins/results/a/b.parquet"),
        *("code/data/__init__.py", "code/data/loader.py", "env/pyvenv.cfg", "env/lib/torch.so", "tables/devices.csv"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_module_and_preset_of_the_package_is_shipped() -> None:
    files = {str(file.target) for file in plan_shipment().files}
    wanted = {
        f"fedloom/{file.relative_to(ROOT).as_posix()}"
        for part in PARTS
        for pattern in ("*.py", "conf/**/*.yaml")
        for file in (ROOT / part).rglob(pattern)
    }
    assert wanted <= files
    assert {"fedloom/__init__.py", "fedloom/platform/data/config.py"} <= files
    assert not [name for name in files if "__pycache__" in name]
    assert plan_shipment().size_bytes < 5 * MIB


def test_included_paths_keep_their_places_and_leave_the_heavy_behind(project: Path) -> None:
    assert names("rules.py", "plugins") == {"rules.py", "plugins/__init__.py", "plugins/space.py"}
    assert names(str(project / "tables/devices.csv")) == {"tables/devices.csv"}
    assert names("plugins", "./plugins/space.py") == {"plugins/__init__.py", "plugins/space.py"}


def test_a_folder_of_code_may_be_called_data_and_what_is_named_is_sent(project: Path) -> None:
    assert names("code") == {"code/data/__init__.py", "code/data/loader.py"}
    assert names("plugins/data") == {"plugins/data/images.bin"}


def test_the_whole_working_directory_leaves_out_environments(project: Path) -> None:
    assert {name.split("/")[0] for name in names(".")} == {"rules.py", "plugins", "code", "tables"}


def test_a_path_from_elsewhere_lies_at_the_top(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("elsewhere") / "lib"
    other.mkdir()
    (other / "a.py").write_text("")
    assert names(str(other)) == {"lib/a.py"}
    assert target_of(other / ".." / "lib") == PurePosixPath("lib")


def test_links_are_followed_but_not_in_circles(project: Path) -> None:
    (project / "plugins" / "self").symlink_to(project / "plugins")
    (project / "plugins" / "tables").symlink_to(project / "tables")
    assert names("plugins") == {"plugins/__init__.py", "plugins/space.py", "plugins/tables/devices.csv"}


def sparse(path: Path, size_bytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size_bytes)


def test_more_than_50_mib_is_refused_and_the_largest_are_named(project: Path) -> None:
    sparse(project / "plugins" / "weights.bin", 49 * MIB - plan_shipment([Path("plugins")]).size_bytes)
    assert plan_shipment([Path("plugins")]).size_bytes == 49 * MIB
    sparse(project / "plugins" / "more.bin", MIB)
    assert plan_shipment([Path("plugins")]).size_bytes == 50 * MIB
    (project / "plugins" / "one").write_text("!")
    with pytest.raises(ValueError, match=r"50 MiB.*plugins/weights\.bin 4\d\.\d\d MiB.*--include.*FEDLOOM_DATA"):
        plan_shipment([Path("plugins")])


def test_a_checkout_with_300_mib_of_data_ships_small(
    tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders as they lie in a checkout, with data beside and, by mistake, inside."""
    checkout = tmp_path / "checkout"
    for part in PARTS:
        shutil.copytree(ROOT / part, checkout / part, ignore=shutil.ignore_patterns("__pycache__"))
    for place in ("data", "experiments/data", "tiers/results", ".git"):
        sparse(checkout / place / "large.bin", 300 * MIB)
    monkeypatch.setattr("fedloom.experiments.shipping.package_folder", lambda part: checkout / part)
    assert plan_shipment().size_bytes < 5 * MIB
    monkeypatch.chdir(checkout)
    assert plan_shipment([Path(".")]).size_bytes < 10 * MIB


@pytest.mark.parametrize(
    ("include", "message"),
    [
        (["nothing.py"], r"--include nothing\.py: there is no such file"),
        (["fedloom"], r"fedloom/, which holds this package: rename it"),
        (["rules.py", "../rules.py"], r"would both be rules\.py"),
    ],
)
def test_paths_that_cannot_be_shipped(project: Path, include: list[str], message: str) -> None:
    (project / "fedloom").mkdir()
    (project / "fedloom" / "a.py").write_text("")
    (project.parent / "rules.py").write_text("another")
    try:
        with pytest.raises(ValueError, match=message):
            plan_shipment([Path(path) for path in include])
    finally:
        (project.parent / "rules.py").unlink()


def test_the_copy_is_whole_and_gone_afterwards(project: Path) -> None:
    shipment = plan_shipment([Path("rules.py")])
    with shipped(shipment) as folder:
        copied = {PurePosixPath(f.relative_to(folder).as_posix()) for f in folder.rglob("*") if f.is_file()}
        assert copied == {file.target for file in shipment.files}
        assert (folder / "rules.py").read_text() == "rules.py"
        with pytest.raises(RuntimeError), shipped(shipment) as second:
            raise RuntimeError
    assert not folder.exists()
    assert not second.exists()


def test_the_shipped_copy_wins_over_an_editable_install_and_a_wheel(project: Path, tmp_path: Path) -> None:
    """As the job runs it: `python -m` in the shipped folder, an installed copy later on the path."""
    site = tmp_path / "site"
    for part in PARTS:
        shutil.copytree(
            package_folder(part), site / "fedloom" / part, ignore=shutil.ignore_patterns("__pycache__", "conf")
        )
    code = (
        "import sys, pathlib, fedloom.actors.pool, fedloom.experiments.runs.configuration\n"
        "from fedloom.platform.runs.source_code import source_hash\n"
        "own = [m.__file__ for n, m in sys.modules.items() if n.startswith('fedloom.') and getattr(m, '__file__', 0)]\n"
        "print(source_hash(), len(own), all(f.startswith(str(pathlib.Path.cwd())) for f in own))\n"
    )
    with shipped(plan_shipment()) as folder:
        (folder / "witness.py").write_text(code)
        done = subprocess.run(
            [sys.executable, "-m", "witness"],
            cwd=folder,
            env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found_hash, modules, all_shipped = done.stdout.split()
    assert int(modules) > 20
    assert all_shipped == "True"
    assert found_hash == source_hash()
