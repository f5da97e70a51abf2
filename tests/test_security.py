"""Nothing that is read executes, names stay in their folders, and secrets are written nowhere."""

import ast
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedloom.actors.address import LOOPBACK_SWITCH
from fedloom.experiments.ablation.plan import plan_ablation, planned_ablation
from fedloom.experiments.cli import main
from fedloom.experiments.export.export import export
from fedloom.experiments.export.selection import Wanted
from fedloom.experiments.report.runs import write_report
from fedloom.experiments.runs.configuration import change_stored, compose_config, config_from_dict, stored_config
from fedloom.experiments.runs.search import load_trained
from fedloom.experiments.store.ablations import write_ablation
from fedloom.experiments.verify import verified
from fedloom.platform.federation.config import RayConfig, RunConfig
from fedloom.platform.results.checkpoint import load_checkpoint, load_model, save_checkpoint, save_model
from fedloom.platform.results.files import (
    MOST_TEXT_BYTES,
    from_hashed_json,
    hashed_json,
    opened,
    read_file,
    within,
    write_atomically,
)
from fedloom.platform.results.manifest import Manifest, check_files
from fedloom.platform.results.paths import STATE_FILE, RunPaths, find_run, run_paths
from fedloom.platform.results.store import output_folder
from fedloom.platform.results.tables import TABLES, read_part
from fedloom.platform.results.writer import TableParts
from fedloom.platform.runs.run import RunIdentity, make_serial, resume_run, start_run
from fedloom.platform.runs.source_code import check_code_places
from fedloom.platform.spaces.slices import TensorGroup

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
SAFE_YAML = ("items.py", "yaml.load(text, getattr(yaml, 'CSafeLoader', yaml.SafeLoader))")
"""What `yaml.safe_load` does, by libyaml's parser where there is one: both loaders make nothing but plain values."""
IMPORTING = ("import_module", "__import__", "exec_module", "run_path", "run_module")
IMPORTERS = {"plugins.py", "shipping.py", "tracker_process.py"}
"""Who imports by a name: code that a configuration chooses (whose stored names `check_code_places` looks at), parts of
fedloom, and the packages of trackers, which are listed there."""


def calls(path: Path) -> list[tuple[str, str]]:
    """The names and sources of the calls in a file."""
    tree = ast.parse(path.read_text())
    return [(ast.unparse(n.func), ast.unparse(n)) for n in ast.walk(tree) if isinstance(n, ast.Call)]


def test_nothing_that_is_read_can_execute() -> None:
    """The only unpickler is the restricted one of the published CIFAR files, and YAML is read by safe loaders."""
    files = [p for part in ("platform", "actors", "experiments", "tiers") for p in (ROOT / part).rglob("*.py")]
    assert len(files) > 200
    found = [(p.name, source) for p in files for name, source in calls(p) if name in EXECUTING]
    assert [(name, source) for name, source in found if "allow_pickle=False" not in source] == [OWN, SAFE_YAML]
    unpicklers = [p.name for p in files if "import pickle" in p.read_text()]
    assert unpicklers == ["image_files.py"]
    importers = {p.name for p in files for name, _ in calls(p) if name.rpartition(".")[2] in IMPORTING}
    assert importers == IMPORTERS


EVIL = "from pathlib import Path\nPath(__file__).with_name('executed').touch()\nMETHOD = None\n"
RUN = "20260101-000000-tiny-abcdef"


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a results folder, among the places of modules as for the command line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        if name.partition(".")[0] in ("results", "linked", "mine", "around"):
            del sys.modules[name]


def put(folder: Path, file: str, text: str = EVIL) -> Path:
    """A module of this text."""
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    importlib.invalidate_caches()
    return path


def executed(folder: Path) -> list[Path]:
    return [*folder.rglob("executed")]


def forge(config: RunConfig, changes: Mapping[str, Any], **sections: Mapping[str, Any]) -> RunPaths:
    """A run whose every seal fits, as whoever hands on a results folder can make it, with changes of its method."""
    paths = run_paths(Path(config.results), config.experiment, RUN)
    values = asdict(config)
    for section, changed in {"method": changes, **sections}.items():
        values[section] |= changed
    put(paths.artifacts, "config.json", json.dumps(values))
    manifest = Manifest(paths)
    TableParts(paths.table("runs"), TABLES["runs"], 1, manifest).replace([{"config": json.dumps(values)}])
    manifest.begin()
    return paths


PLACES = {
    "module": ("results.artifacts.{run}.plugins.evil:METHOD", "results/artifacts/{run}/plugins/evil.py"),
    "package": ("results.artifacts.{run}.evil.inner:METHOD", "results/artifacts/{run}/evil/__init__.py"),
    "outermost package": ("results.evil:METHOD", "results/__init__.py"),
    "link": ("linked.evil:METHOD", "results/artifacts/{run}/evil.py"),
}


@pytest.mark.parametrize("place", PLACES)
def test_no_command_executes_code_that_lies_in_the_results(
    place: str, beside: Path, tiny_config: Callable[..., RunConfig]
) -> None:
    name, file = (text.format(run=RUN) for text in PLACES[place])
    evil = put(beside, file)
    (beside / "linked").symlink_to(evil.parent)
    paths = forge(tiny_config(), {"name": name})
    ablation = forged_ablation(paths)
    uses: list[Callable[[], object]] = [
        lambda: stored_config(paths.root, RUN),
        lambda: load_trained(paths.root, RUN),
        lambda: export(paths.root, RUN, Wanted(tier="tier1")),
        lambda: planned_ablation(paths.root, ablation, []),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="lies in the results: nothing in results is executed") as refused:
            use()
        assert "\n" not in str(refused.value)
        assert name in str(refused.value)
    assert not executed(beside)


@pytest.mark.parametrize(
    "where",
    [
        {"method": {"train": {"weighting": "NAME"}}},
        {"space": {"name": "NAME"}},
        {"objective": {"name": "x", "options": {"inner": ["NAME"]}}},
        {"data": {"options": {"NAME": 1}}},
    ],
    ids=str,
)
def test_every_text_of_a_stored_configuration_counts(where: dict[str, Any], beside: Path) -> None:
    put(beside, "results/a/evil.py")
    config = json.loads(json.dumps(where).replace("NAME", "results.a.evil:f"))
    with pytest.raises(ValueError, match=r"results.a.evil:f"):
        check_code_places([config], Path("results"))
    check_code_places([config], Path("others"))
    assert not executed(beside)


def forged_ablation(paths: RunPaths) -> str:
    """The id of an ablation whose last trial has the configuration of a forged run."""
    plan = plan_ablation(
        ["ablation=beta_schedule", "experiment=superfednas_digits", "ablation.seeds=[0]", f"results={paths.root}"]
    )
    last = replace(plan.trials[-1], config=json.loads(paths.config.read_text()))
    write_ablation(paths.root, replace(plan, trials=(*plan.trials[:-1], last)))
    return plan.ablation_id


def test_what_is_stored_is_never_resolved(
    beside: Path, tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resolved value, such as one of the environment, would be written into the next checkpoint."""
    monkeypatch.setenv("SECRET", SECRET)
    paths = forge(tiny_config(), {}, objective={"options": {"x": ["${oc.env:SECRET}"]}})
    ablation = forged_ablation(paths)
    uses: list[Callable[[], object]] = [
        lambda: stored_config(paths.root, RUN),
        lambda: load_trained(paths.root, RUN),
        lambda: export(paths.root, RUN, Wanted(tier="tier1")),
        lambda: [config_from_dict(t.config) for t in planned_ablation(paths.root, ablation, []).trials],
        lambda: compose_config([*TINY, r"objective.options.x='\${oc.env:SECRET}'"]),  # could not be resumed
    ]
    for use in uses:
        with pytest.raises(ValueError, match=r"'\$\{oc.env:SECRET\}' cannot be stored: ") as refused:
            use()
        assert SECRET not in str(refused.value)
    assert not [f for f in beside.rglob("*") if f.is_file() and SECRET.encode() in f.read_bytes()]


def test_addresses_and_folders_are_this_machines_and_those_stored_are_said(
    beside: Path, tiny_config: Callable[..., RunConfig], caplog: pytest.LogCaptureFixture
) -> None:
    theirs = {"root": str(beside / "root"), "cache": str(beside / "cache"), "download": True}
    paths = forge(tiny_config(), {}, data=theirs, ray={"address": "10.9.8.7:6379", "dashboard": True, "num_gpus": 4})
    config = stored_config(paths.root, RUN, ["data.root=mine"])[1]
    ablation = planned_ablation(paths.root, forged_ablation(paths), [])
    for each in (config, config_from_dict(ablation.trials[-1].config)):
        assert each.ray == RayConfig()
        assert (each.data.root, each.data.cache, each.data.download) == (None, None, False)
    assert change_stored(config, ["ray.address=local", "data.cache=here"]).ray.address == "local"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"run {RUN} was made with data.cache=/")
    assert " ray.address=10.9.8.7:6379, not used here: to use it, give it again (resume: the key; " in line
    assert verified(paths).run_id == RUN
    assert not (beside / "cache").exists()


@pytest.mark.parametrize("name", ["antigravity:fly", "os.path:join", "subprocess:run"])
def test_pythons_own_modules_are_no_plug_ins(name: str, tiny_config: Callable[..., RunConfig], beside: Path) -> None:
    """Importing some of them does things: antigravity opens a browser."""
    paths = forge(tiny_config(), {"name": name})
    assert not {"antigravity"} & {*sys.modules}
    with pytest.raises(ValueError, match="which is Python's own"):
        stored_config(paths.root, RUN)
    assert any("which is Python's own" in line for line in verified(paths).problems)
    assert not {"antigravity"} & {*sys.modules}
    assert not executed(beside)


def test_code_outside_the_results_is_found_without_executing_it(beside: Path) -> None:
    put(beside, "mine.py")
    put(beside, "around/__init__.py")
    put(beside, "around/inner.py")
    names = ["mine:f", "around.inner:f", "around.none:f", "nobody:f", "torch.nn:Linear", "__main__:f"]
    texts = [*names, ":f", "s3://bucket/x", "head:6379", "..:f", "a b:c", "results:f"]
    (beside / "results").mkdir()
    check_code_places([dict.fromkeys(texts, 1)], beside / "results")
    assert not executed(beside)


def test_what_is_installed_is_none_of_the_results_also_below_them() -> None:
    check_code_places([dict.fromkeys(["torch.nn:Linear", "fedloom.platform.words:shown"], 1)], Path("/"))


def test_code_of_ones_own_in_the_results_is_refused_before_the_run_not_when_it_is_resumed(
    beside: Path, tiny_config: Callable[..., RunConfig]
) -> None:
    put(beside, "mine.py")
    config = tiny_config()
    config.results, config.method.train.weighting = str(beside), "mine:f"
    before = sorted(beside.rglob("*"))
    with pytest.raises(ValueError, match=r"names 'mine:f', whose code .*mine.py lies in the results"):
        start_run(config, make_serial)
    assert sorted(beside.rglob("*")) == before
    assert not executed(beside)


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
        start_run(config, make_serial, identity=RunIdentity(run_id=name or "/"))
    assert sorted(tmp_path.rglob("*")) == before


NO_NAMES = [
    "../x",
    "a/../../x",
    "/etc/passwd",
    "../../../../../dev/zero",
    "..",
    ".",
    "",
    "a//b",
    "a\0b",
    7,
    None,
    ["a"],
]


@pytest.mark.parametrize("name", NO_NAMES, ids=repr)
def test_what_results_name_is_looked_for_in_its_folder_alone(name: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no name of a file in"):
        within(tmp_path, name)
    paths = run_paths(tmp_path, "demo", "r1")
    save_model(paths, "m", {}, {})
    card = paths.models / "m.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "file": name}))
    with pytest.raises(ValueError, match=r"m\.json is damaged"):
        load_model(paths, "m")
    if isinstance(name, str):
        put(paths.artifacts, "manifest.json", hashed_json({"version": 1, "files": {name: []}}).decode())
        with pytest.raises(ValueError, match="is not the manifest of a run"):
            check_files(paths)
    save_checkpoint(paths.checkpoint, {"b": TensorGroup({}, 1)}, {})
    state = from_hashed_json((paths.checkpoint / STATE_FILE).read_bytes(), Path())
    state["bags"]["b"]["file"] = name
    (paths.checkpoint / STATE_FILE).write_bytes(hashed_json(state))
    with pytest.raises(ValueError, match=r"is no name of a file|is not the state of a checkpoint"):
        load_checkpoint(paths.checkpoint)


def place(kind: str, path: Path, elsewhere: Path) -> None:
    """Something at this path that is no regular file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else elsewhere)


KINDS = ("pipe", "socket", "folder", "device", "link")


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened_and_none_is_waited_for(kind: str, tmp_path: Path) -> None:
    other = put(tmp_path, "other", "untouched")
    path = tmp_path / "r" / "x"
    place(kind, path, other)
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC):
        with pytest.raises(ValueError, match="nothing in results is followed"):
            opened(path, flags)
    with pytest.raises(ValueError, match="nothing in results is followed"):
        read_part(path)
    (tmp_path / "r" / ".y.tmp").symlink_to(other)  # where the next content of a file is written first
    with pytest.raises(ValueError, match="nothing in results is followed"):
        write_atomically(tmp_path / "r" / "y", b"new")
    assert other.read_text() == "untouched"


@pytest.mark.parametrize("link", ["reports", "reports/r1"])
def test_a_report_is_not_written_through_a_strangers_link(link: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "results" / link
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"nothing in results is followed.*or give --out"):
        output_folder(tmp_path / "results", None, "reports/r1")
    assert output_folder(tmp_path / "results", tmp_path / "elsewhere", "reports/r1") == tmp_path / "elsewhere"


def test_a_file_is_read_up_to_its_greatest_size(tmp_path: Path) -> None:
    path = put(tmp_path, "x", "1234")
    assert read_file(path, 4) == b"1234"
    with pytest.raises(ValueError, match="x has 4 bytes, of which at most 3 are read"):
        read_file(path, 3)
    os.truncate(path, MOST_TEXT_BYTES + 1)  # takes no room on the disk
    with pytest.raises(ValueError, match=r"of which at most 268435456 are read"):
        read_file(path)


@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
@pytest.mark.parametrize(
    "file", [".owner", "logs/console.log", "models/.x.json.tmp", "plugins/a/evil.py", "checkpoint"]
)
def test_a_run_with_links_or_pipes_is_used_by_no_command(
    file: str, kind: str, beside: Path, tiny_config: Callable[..., RunConfig]
) -> None:
    config = tiny_config()
    paths = forge(config, {})
    place(kind, paths.artifacts / file, put(beside, "mine/precious", "untouched").parent)
    before = sorted(beside.rglob("*"))
    uses: list[Callable[[], object]] = [
        lambda: stored_config(paths.root, RUN),
        lambda: load_trained(paths.root, RUN),
        lambda: export(paths.root, RUN, Wanted(tier="tier1")),
        lambda: resume_run(config, RUN, make_serial),
        lambda: write_report(paths.root, [RUN]),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="nothing in results is followed") as refused:
            use()
        assert "\n" not in str(refused.value)
    assert any("nothing in results is followed" in line for line in verified(paths).problems)
    assert sorted(beside.rglob("*")) == before


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
