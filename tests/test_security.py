"""Nothing that is read executes, names stay in their folders, and secrets are written nowhere."""

import ast
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fedloom.actors.address import LOOPBACK_SWITCH
from fedloom.experiments.cli import main
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
SECRET = "correct-horse-battery-staple"
TINY = (
    "experiment=fedavg_digits",
    "data.num_clients=4",
    "tiers.paths=100",
    "method.train.rounds=1",
    "method.train.epochs=1",
    "method.train.clients_per_round=2",
)
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


@pytest.mark.parametrize(
    "command",
    [
        ("run", *TINY, "results={url}"),
        ("ablate", "ablation=alpha", *TINY, "results={url}"),
        ("submit", "--address", "http://127.0.0.1:1", *TINY, "results={url}"),
        ("status", "--results", "{url}"),
        ("report", "--results", "{url}"),
        ("resume", "baseline", "--results", "{url}"),
    ],
    ids=lambda command: command[0],
)
def test_a_secret_in_a_url_is_not_repeated(
    command: Sequence[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(LOOPBACK_SWITCH, "0")
    with pytest.raises(SystemExit) as ended:
        main([word.format(url=f"s3://key:{SECRET}@bucket/results") for word in command])
    said = "".join(capfd.readouterr())
    assert (ended.value.code, said.count("\n")) == (2, 1), said
    assert "secret in the URL" in said
    assert SECRET not in said
    assert list(tmp_path.rglob("*")) == []


READS = '''"""A weighting rule that needs a key, as a rule that asks a service does."""

import os
from pathlib import Path


def mean(work):
    digits = str(len(os.environ["WANDB_API_KEY"]))
    Path(__file__).with_name(f"read-{os.getpid()}").write_text(digits)
    return dict.fromkeys(work.seen_by_tensor, 1.0)
'''


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("no_ray_cluster")
def test_secrets_are_written_nowhere(tmp_path: Path) -> None:
    """The actors of a cluster of the run's own read the secret; no file, no output and no list of processes has it."""
    (tmp_path / "keyed.py").write_text(READS)
    environment = {**os.environ, "FEDLOOM_CACHE": str(tmp_path / "cache"), "PYTHONUNBUFFERED": "1"}
    environment |= dict.fromkeys(("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY"), SECRET)
    cluster = ["executor.kind=ray", "executor.actors=1", "ray.address=local", "ray.num_cpus=1"]
    rule = ["method.train.weighting=keyed:mean", "tensorboard=false", "results=results"]
    commands = [["run", *TINY, *cluster, *rule], ["report"], ["status", "--json"]]
    processes = {line for words in commands for line in _command_lines(words, tmp_path, environment)}
    readers = {path.name for path in tmp_path.glob("read-*")}
    assert {path.read_text() for path in tmp_path.glob("read-*")} == {str(len(SECRET))}
    assert len(readers) > 1, "no actor used the rule"
    assert any("ray::" in line for line in processes), processes
    assert [line for line in processes if SECRET in line] == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def _command_lines(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> set[str]:
    """Runs `fedloom WORDS` to its end, with its output in a file; the command lines of all its processes."""
    found = set[str]()
    with open(folder / f"{words[0]}.out", "wb") as out:
        command = [sys.executable, "-m", "fedloom.experiments.cli", *words]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)
        driver = psutil.Process(process.pid)
        while process.poll() is None:
            with suppress(psutil.Error):
                for each in (driver, *driver.children(recursive=True)):
                    with suppress(psutil.Error):
                        found.add(" ".join(each.cmdline()))
            time.sleep(0.1)
    assert process.returncode == 0, (folder / f"{words[0]}.out").read_text()
    return found
