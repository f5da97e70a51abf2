"""Nothing that is read executes, names stay in their folders, and secrets are written nowhere."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.experiments.report.pages.runs import write_report
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.results.models import save_model
from fedloom.platform.results.paths import find_run, run_paths
from fedloom.platform.runs.run import Label, start_run
from fedloom.platform.runs.serial import make_serial

ROOT = Path(__file__).resolve().parent.parent
EXECUTING = {
    "torch.load",
    "torch.jit.load",
    "np.load",
    "numpy.load",
    "pickle.load",
    "pickle.loads",
    "yaml.load",
    "yaml.unsafe_load",
    "pd.read_pickle",
    "marshal.loads",
    "shelve.open",
    "joblib.load",
    "eval",
    "exec",
}
"""What may execute what it reads."""
OWN = ("plugins.py", "eval(annotation, names)")
"""Types that a user's own code, which is being imported, has written as text."""


def calls(path: Path) -> list[tuple[str, str]]:
    """The names and sources of the calls in a file."""
    tree = ast.parse(path.read_text())
    return [(ast.unparse(n.func), ast.unparse(n)) for n in ast.walk(tree) if isinstance(n, ast.Call)]


def test_nothing_that_is_read_can_execute() -> None:
    """The only unpickler is the restricted one of the published CIFAR files."""
    files = [p for part in ("platform", "actors", "experiments", "tiers") for p in (ROOT / part).rglob("*.py")]
    assert len(files) > 300
    found = [(p.name, source) for p in files for name, source in calls(p) if name in EXECUTING]
    assert [(name, source) for name, source in found if "allow_pickle=False" not in source] == [OWN]
    unpicklers = [p.name for p in files if "import pickle" in p.read_text()]
    assert unpicklers == ["cifar_pickle.py"]


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc/x", "..", ".", "", "a\0b", ".hidden", "a\nb", "x" * 300])
def test_names_cannot_leave_their_folder(
    name: str, tmp_path: Path, tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"cannot be a file name|must be"):
        run_paths(tmp_path, name, "r1")
    with pytest.raises(ValueError, match="cannot be a file name"):
        run_paths(tmp_path, "demo", name)
    with pytest.raises(ValueError, match="cannot be a file name"):
        save_model(run_paths(tmp_path, "demo", "r1"), name, {}, {})
    if name:
        with pytest.raises(ValueError, match=r"no run|cannot|could be"):
            find_run(tmp_path, name)
    config = tiny_config()
    with pytest.raises(ValueError, match="cannot be a file name"):
        start_run(config, make_serial, label=Label(run_id=name or "/"))
    assert sorted(tmp_path.rglob("*")) == before


def test_secrets_are_written_nowhere(
    tmp_path: Path, tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "correct-horse-battery-staple"
    for name in ("AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, secret)
    config = tiny_config()
    run_id = start_run(config, make_serial)
    write_report(Path(config.results), [run_id])
    files = [p for p in Path(config.results).rglob("*") if p.is_file()]
    assert len(files) > 20
    assert [p for p in files if secret.encode() in p.read_bytes()] == []
