"""Results at a URL: the copy of a run can be resumed from at every moment, and is brought to where it is read."""

import json
import logging
import os
import platform
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import pandas as pd
import pyarrow.dataset
import pyarrow.fs as pafs
import pytest
import torch

from fedloom.platform.clients.execution import SerialExecutor
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import World
from fedloom.platform.results import mirror as mirror_module
from fedloom.platform.results.bag import Bag
from fedloom.platform.results.checkpoint import load_checkpoint, save_checkpoint
from fedloom.platform.results.mirror import Mirror, MirrorError, mirrored
from fedloom.platform.results.order import rank
from fedloom.platform.results.paths import RunPaths, find_run, run_paths
from fedloom.platform.results.remote import check_results, fetch, fetch_folder, is_remote, local_root, mirror_folder
from fedloom.platform.results.status import StatusFile, read_status
from fedloom.platform.results.tables import TABLES, TIME_COLUMNS, read_table
from fedloom.platform.results.target import Target, open_target
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.runs.run import Label, Watcher, resume_run, start_run

Elastic = Callable[..., RunConfig]


def serial(world: World) -> SerialExecutor:
    return SerialExecutor(Worker(world.spec))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> Callable[[str], None]:
    """Goes to a machine of this name: it has a results cache of its own. The test begins on machine a."""

    def go(name: str) -> None:
        cache = tmp_path / f"cache-{name}"
        cache.mkdir(exist_ok=True)
        for prepared in own_cache.iterdir():  # data need not be prepared on every machine anew
            if prepared.name != "results" and not (cache / prepared.name).exists():
                (cache / prepared.name).symlink_to(prepared)
        monkeypatch.setenv("FEDLOOM_CACHE", str(cache))

    go("a")
    return go


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Results on pyarrow's own local filesystem."""
    return f"file://{tmp_path}/bucket/results"


@dataclass(frozen=True)
class Watched(Target):
    """Tells of every change before it is made; the telling may raise."""

    before: Callable[[str, str], None] = lambda *_: None
    done: list[tuple[str, str]] = field(default_factory=list)

    def upload(self, name: str, file: BinaryIO, size_bytes: int) -> None:
        self.before("upload", name)
        super().upload(name, file, size_bytes)
        self.done.append(("upload", name))

    def delete(self, name: str) -> None:
        self.before("delete", name)
        super().delete(name)
        self.done.append(("delete", name))


def watched(url: str, before: Callable[[str, str], None] = lambda *_: None) -> Watched:
    target = open_target(url)
    return Watched(target.filesystem, target.base, target.url, before)


def bucket(url: str) -> Path:
    return Path(url.removeprefix("file://"))


def stable(root: Path, run_id: str) -> dict[str, pd.DataFrame]:
    """The tables without what depends on when and where the run ran, and in how many sittings."""
    apart = {"experiment", "run_id", "config", "ablation", "trial", "setting"}
    frames = {t: read_table(root, t, run_id=run_id) for t in TABLES}
    return {t: f.drop(columns=[c for c in f if c in TIME_COLUMNS[t] or c in apart]) for t, f in frames.items()}


def assert_same_rows(one: dict[str, pd.DataFrame], other: dict[str, pd.DataFrame]) -> None:
    for table in TABLES:
        pd.testing.assert_frame_equal(one[table], other[table])
    assert len(one["clients"]) >= 8


# What a URL is


def test_a_path_is_its_own_and_a_url_has_a_folder_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", "/cache")
    assert local_root("some/results") == Path("some/results")
    assert local_root(Path("/x")) == Path("/x")
    assert not is_remote("some/results")
    assert not is_remote("/s3:/x")
    found = local_root("s3://bucket/path")
    assert found.parent == Path("/cache/results")
    assert len(found.name) == 12
    assert local_root("s3://bucket/path/") == found
    assert local_root("s3://bucket/other") != found
    assert local_root("s3://bucket/path?region=eu-west-1") != found
    monkeypatch.delenv("FEDLOOM_CACHE")
    assert local_root("gs://bucket/path").parent == Path("~/.cache/fedloom/results").expanduser()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("ftp://host/x", r"results=ftp://host/x cannot be used .*ftp.*: give a local folder, s3://bucket/path, gs://"),
        ("s3://bucket/x?colour=red", r"colour.*: give a local folder, s3://bucket/path"),
        ("s3://key:word@bucket/x", r"^results=s3://bucket/x was given with a secret.*AWS_SECRET_ACCESS_KEY"),
        ("abfs://c@a/x?account_key=word", r"was given with a secret"),
        ("s3://", r"results=s3:// names no bucket or folder: give s3://bucket/path"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused_in_one_line(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        check_results(given)
    assert "\n" not in str(error.value)
    assert "word" not in str(error.value)


def test_a_folder_that_cannot_be_written_is_refused_before_a_run(url: str, machine: Callable[[str], None]) -> None:
    bucket(url).parent.mkdir()
    bucket(url).write_text("a file where the folder should be")
    with pytest.raises(ValueError, match=r"results=file://.* cannot be used .*check the URL and what you may do"):
        check_results(url)


def test_checking_leaves_nothing_at_the_url(url: str, machine: Callable[[str], None]) -> None:
    assert check_results(url) == local_root(url)
    assert list(bucket(url).iterdir()) == []


def test_a_local_path_has_no_mirror_and_is_not_fetched(tmp_path: Path) -> None:
    threads = threading.active_count()
    with mirrored(str(tmp_path), RunPaths(tmp_path, "e", "r1")):
        assert threading.active_count() == threads
    assert fetch(tmp_path, ["r1"]) == tmp_path
    mirror_folder(tmp_path, "nothing/there")
    assert list(tmp_path.iterdir()) == []


# A run and its copy


def test_the_copy_of_a_run_is_the_run(url: str, machine: Callable[[str], None], elastic_config: Elastic) -> None:
    run_id = start_run(elastic_config(results=url), serial)
    here = {p.relative_to(local_root(url)): p.read_bytes() for p in local_root(url).rglob("*") if p.is_file()}
    there = {p.relative_to(bucket(url)): p.read_bytes() for p in bucket(url).rglob("*") if p.is_file()}
    assert here == there
    assert json.loads(there[Path("artifacts", run_id, "config.json")])["results"] == url
    assert read_table(bucket(url), "runs")["status"].tolist() == ["done"]


def test_a_copy_is_read_on_another_machine_by_fedloom_and_by_pyarrow_alone(
    url: str, machine: Callable[[str], None], elastic_config: Elastic
) -> None:
    run_id = start_run(elastic_config(results=url), serial)
    expected = read_table(local_root(url), "rounds")
    machine("b")
    root = fetch(url, tensors=False)
    assert root == local_root(url)
    pd.testing.assert_frame_equal(read_table(root, "rounds"), expected)
    assert read_status(find_run(root, run_id).status).state == "done"
    assert list(root.rglob("*.safetensors")) == []
    assert len(pd.read_parquet(f"{url}/rounds")) == len(expected)
    filesystem, path = pafs.FileSystem.from_uri(f"{url}/clients")
    rows = pyarrow.dataset.dataset(path, filesystem=filesystem, partitioning="hive").to_table()
    assert set(rows.column("run_id").to_pylist()) == {run_id}


def test_a_run_that_fails_is_copied_too(
    url: str, machine: Callable[[str], None], elastic_config: Elastic, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: World) -> SerialExecutor:
        raise RuntimeError("no workers today")

    with pytest.raises(RuntimeError, match="no workers today"):
        start_run(elastic_config(results=url), fail)
    assert read_table(bucket(url), "runs")[["status", "error"]].values.tolist() == [["failed", "no workers today"]]


def test_an_id_that_is_used_at_the_url_is_refused_on_another_machine(
    url: str, machine: Callable[[str], None], elastic_config: Elastic
) -> None:
    start_run(elastic_config(results=url), serial, label=Label(run_id="mine"))
    machine("b")
    with pytest.raises(ValueError, match="run 'mine' exists"):
        start_run(elastic_config(results=url), serial, label=Label(run_id="mine"))


# Crashes


@pytest.fixture
def moments(
    url: str, tmp_path: Path, machine: Callable[[str], None], elastic_config: Elastic
) -> tuple[str, list[Path], list[tuple[str, str]]]:
    """A run that is copied after each of its rounds: its id, what was there before every single change, the changes."""
    config = elastic_config(results=url, train={"rounds": 4})
    taken: list[Path] = []
    targets: list[Watched] = []
    mirrors: list[Mirror] = []

    def take(*_: str) -> None:
        taken.append(tmp_path / "moments" / f"{len(taken):03}")
        if bucket(url).exists():
            shutil.copytree(bucket(url), taken[-1], copy_function=os.link)
        else:
            taken[-1].mkdir(parents=True)

    def started(run_id: str, _: str) -> None:
        targets.append(watched(url, take))
        mirrors.append(Mirror(targets[0], run_paths(local_root(url), config.experiment, run_id)))

    watcher = Watcher(started, lambda _: mirrors[0].turn())
    run_id = start_run(replace(config, results=str(local_root(url))), serial, watcher)
    take()
    return run_id, taken, targets[0].done


def test_every_moment_of_the_copy_can_be_resumed_from(
    moments: tuple[str, list[Path], list[tuple[str, str]]],
    url: str,
    machine: Callable[[str], None],
    elastic_config: Elastic,
) -> None:
    run_id, taken, changes = moments
    whole = stable(local_root(url), run_id)
    first_state = changes.index(("upload", f"artifacts/{run_id}/checkpoint/state.json"))
    assert ("delete", f"artifacts/{run_id}/journal-000001.jsonl") not in changes[:first_state]
    config = elastic_config(results=url, train={"rounds": 4})
    resumable = taken[first_state + 1 :]
    assert len(resumable) > 12
    for number, moment in enumerate(resumable):
        shutil.rmtree(bucket(url))
        shutil.copytree(moment, bucket(url))
        machine(f"m{number}")
        root = fetch(url, [run_id])
        paths = find_run(root, run_id)
        position = load_checkpoint(paths.checkpoint).data["position"]
        assert sum(position.values()) > 0
        if number % 5 == 3:
            resume_run(config, run_id, serial)
            assert_same_rows(stable(root, run_id), whole)
            assert_same_rows(stable(bucket(url), run_id), whole)
        else:
            RunWriter.resume(root, paths.experiment, run_id, position)


def test_what_refers_to_files_is_copied_after_them_and_nothing_is_deleted_before_its_successor(
    moments: tuple[str, list[Path], list[tuple[str, str]]],
) -> None:
    run_id, _, changes = moments
    checkpoint = f"artifacts/{run_id}/checkpoint"
    states = [i for i, change in enumerate(changes) if change == ("upload", f"{checkpoint}/state.json")]
    assert len(states) >= 4
    seen = []
    for before, state in pairwise(states):
        kinds = []
        for what, name in changes[before + 1 : state]:
            kind = Path(name).suffix if Path(name).name != "status.json" else "status"
            if (what, kind) not in kinds:
                kinds.append((what, kind))
        seen.append(kinds)
    status, rows = ("upload", "status"), [("upload", ".parquet"), ("upload", ".jsonl"), ("delete", ".jsonl")]
    bags, dropped = ("upload", ".safetensors"), ("delete", ".safetensors")
    # The end of a turn, then rows, bags and cards of the next, then its state.
    order = [status, dropped, *rows, bags, ("upload", ".json")]
    assert all(kinds == [kind for kind in order if kind in kinds] for kinds in seen), seen
    assert any({status, dropped, bags} <= set(kinds) for kinds in seen), seen


def test_a_copy_made_while_the_run_writes_is_always_one_that_can_be_resumed(
    url: str, tmp_path: Path, machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    root = local_root(url)
    writer = RunWriter.create(root, "e", "r1", flush_interval_s=0.002, rows_per_file=40)
    stopped = threading.Event()

    def write() -> None:
        saved, version = None, 0
        while not stopped.is_set():
            version += 1
            for client in range(3):
                writer.add("clients", round=version, client_id=client)
            writer.add("rounds", stage="s", round=version)
            position = writer.commit()
            bags = {"w": Bag({"x": torch.full((100,), float(version))}, version)}
            saved = save_checkpoint(writer.paths.checkpoint, bags, {"position": position}, saved)

    writing = threading.Thread(target=write)
    writing.start()
    mirror = Mirror(open_target(url), writer.paths)
    rounds = []
    try:
        while len(rounds) < 12:
            mirror.turn()
            if not (bucket(url) / "artifacts/r1/checkpoint/state.json").exists():
                continue
            copy = tmp_path / f"copy-{len(rounds)}"
            shutil.copytree(bucket(url), copy)
            checkpoint = load_checkpoint(copy / "artifacts/r1/checkpoint")
            RunWriter.resume(copy, "e", "r1", checkpoint.data["position"])
            rounds.append(read_table(copy, "rounds")["round"].tolist())
            assert rounds[-1] == list(range(1, checkpoint.bags["w"].version + 1))
    finally:
        stopped.set()
        writing.join()
    assert len(rounds[0]) < len(rounds[-1])


# Failing uploads


def small_run(url: str, run_id: str = "r1") -> RunWriter:
    """A run of a few rows on this machine, without training."""
    writer = RunWriter.create(local_root(url), "e", run_id)
    writer.add("rounds", stage="s", round=0)
    writer.close()
    StatusFile(writer.paths.status).write("done")
    return writer


def test_a_failed_turn_goes_on_where_it_stopped(url: str, machine: Callable[[str], None]) -> None:
    writer = small_run(url)
    failures = [OSError("the network is down")]

    def fail_once(_: str, name: str) -> None:
        if name.startswith("rounds/") and failures:
            raise failures.pop()

    target = watched(url, fail_once)
    mirror = Mirror(target, writer.paths)
    with pytest.raises(OSError, match="the network is down"):
        mirror.turn()
    sent = len(target.done)
    mirror.turn()
    assert 0 < sent < len(target.done)
    assert len(set(target.done)) == len(target.done) == len([p for p in local_root(url).rglob("*") if p.is_file()])
    mirror.turn()
    assert len(set(target.done)) == len(target.done), "what has not changed is not copied again"


def test_a_copy_that_fails_to_the_end_is_said_in_one_line(
    url: str,
    machine: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    elastic_config: Elastic,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: str) -> None:
        raise OSError("the network is down")

    monkeypatch.setattr(mirror_module, "open_target", lambda results: watched(results, fail))
    monkeypatch.setattr(mirror_module, "INTERVAL_S", 0.05)
    with caplog.at_level(logging.WARNING), pytest.raises(MirrorError) as error:
        start_run(elastic_config(results=url), serial)
    assert f"to {url} (the network is down); all of it is in {local_root(url)}" in str(error.value)
    assert "\n" not in str(error.value)
    assert "trying again in" in caplog.text
    assert read_table(local_root(url), "runs")["status"].tolist() == ["done"]
    assert read_table(bucket(url), "runs").empty


def test_what_broke_a_run_is_told_before_what_broke_its_copy(
    url: str, machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: str) -> None:
        raise OSError("the network is down")

    writer = small_run(url)
    monkeypatch.setattr(mirror_module, "open_target", lambda results: watched(results, fail))
    with pytest.raises(RuntimeError, match="the run broke"), mirrored(url, writer.paths):
        raise RuntimeError("the run broke")
    assert "run r1 could not be copied" in caplog.text


def test_the_copy_is_kept_up_to_date_in_the_background(url: str, machine: Callable[[str], None]) -> None:
    writer = small_run(url)
    arrived = threading.Event()

    def notice(_: str, name: str) -> None:
        if name.endswith("status.json"):
            arrived.set()

    mirror = Mirror(watched(url, notice), writer.paths, interval_s=0.02)
    mirror.start()
    assert arrived.wait(30)
    mirror.close()


def test_half_an_upload_is_never_seen(url: str, tmp_path: Path) -> None:
    target = open_target(url)
    (tmp_path / "old").write_bytes(b"old")
    with open(tmp_path / "old", "rb") as file:
        target.upload("x/y", file, 3)

    class Torn:
        def read(self, _: int) -> bytes:
            raise OSError("torn")

    with pytest.raises(OSError, match="torn"):
        target.upload("x/y", Torn(), 3)  # type: ignore[arg-type]
    assert target.read("x/y") == b"old"
    assert list(target.list()) == ["x/y"]


# Whose copy is the right one


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def status_text(state: str, heartbeat: float, host: str = "elsewhere", pid: int = 1) -> str:
    values = {"state": state, "pid": pid, "host": host, "stage": "s", "round": 0, "rounds_total": 1, "message": ""}
    return json.dumps({**values, "heartbeat": heartbeat})


@pytest.mark.parametrize(
    ("here", "there", "kept"),
    [
        (status_text("running", 5.0, platform.node(), os.getpid()), status_text("running", 9.0), "here"),
        (status_text("failed", 9.0), status_text("running", 5.0), "here"),
        (status_text("failed", 5.0), status_text("failed", 5.0), "here"),
        (status_text("failed", 5.0), status_text("done", 9.0), "there"),
        (status_text("running", 5.0, platform.node(), 2**22 + 1), status_text("done", 9.0), "there"),
    ],
    ids=["at work here", "further here", "the same", "further there", "died here"],
)
def test_a_run_is_replaced_only_by_a_later_copy(
    url: str, machine: Callable[[str], None], here: str, there: str, kept: str
) -> None:
    part = "rounds/experiment=e/run_id=r1/part-00000.parquet"
    for root, status, name in ((local_root(url), here, "here"), (bucket(url), there, "there")):
        put(root / part, name)
        put(root / "artifacts/r1/journal-000001.jsonl", name)
        put(root / f"artifacts/r1/checkpoint/{name}.safetensors", name)
        put(root / "artifacts/r1/status.json", status)
    fetch(url)
    assert (local_root(url) / part).read_text() == kept
    assert [p.name for p in local_root(url).rglob("*.safetensors")] == [f"{kept}.safetensors"]


def test_only_what_changed_is_fetched_again(
    url: str, machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_run(url, "r1")
    with mirrored(url, small_run(url, "r2").paths):
        pass
    with mirrored(url, run_paths(local_root(url), "e", "r1")):
        pass
    machine("b")
    fetched: list[str] = []
    download = Target.download

    def counted(self: Target, name: str, path: Path) -> int:
        fetched.append(name)
        return download(self, name, path)

    monkeypatch.setattr(Target, "download", counted)
    fetch(url, ["r1"])
    assert {name for name in fetched if "r2" in name} == set()
    assert len(fetched) == len(TABLES) + 1
    fetch(url)
    assert len(fetched) == 2 * (len(TABLES) + 1)
    put(bucket(url) / "artifacts/r1/status.json", status_text("running", 9e12))
    del fetched[:]
    fetch(url)
    assert fetched == ["artifacts/r1/status.json"]


def test_a_file_that_disappears_while_it_is_fetched_is_looked_for_again(
    url: str, machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with mirrored(url, small_run(url).paths):
        pass
    put(bucket(url) / "artifacts/r1/checkpoint/w-v1.safetensors", "old")
    machine("b")
    download = Target.download

    def overtaken(self: Target, name: str, path: Path) -> int:
        if name.endswith("w-v1.safetensors"):
            (bucket(url) / name).rename(bucket(url) / name.replace("v1", "v2"))
        return download(self, name, path)

    monkeypatch.setattr(Target, "download", overtaken)
    root = fetch(url)
    assert [p.name for p in root.rglob("*.safetensors")] == ["w-v2.safetensors"]
    assert list(root.rglob("*.tmp")) == []


def test_folders_beside_the_runs_go_there_and_come_back(url: str, machine: Callable[[str], None]) -> None:
    plan = local_root(url) / "ablations/a1/ablation.json"
    put(plan, "planned")
    mirror_folder(url, "ablations/a1")
    put(plan, "two trials done")
    assert fetch(url) == local_root(url)
    assert plan.read_text() == "two trials done", "what is here is later"
    mirror_folder(url, "ablations/a1")
    machine("b")
    assert (fetch(url, [], ablations=True) / "ablations/a1/ablation.json").read_text() == "two trials done"
    put(bucket(url) / "supernets/k/origin.json", "{}")
    assert (fetch_folder(url, "supernets/k") / "origin.json").read_text() == "{}"
    assert list(fetch_folder(url, "supernets/none").glob("*")) == []


def test_a_folder_that_cannot_be_sent_is_said_in_one_line(url: str, machine: Callable[[str], None]) -> None:
    put(local_root(url) / "ablations/a1/ablation.json", "planned")
    bucket(url).parent.mkdir()
    bucket(url).write_text("a file where the folder should be")
    with pytest.raises(OSError, match=r"ablations/a1 could not be copied to file://.*: copy it yourself"):
        mirror_folder(url, "ablations/a1")


def test_what_is_copied_last_is_the_status() -> None:
    names = [
        "artifacts/r/status.json",
        "artifacts/r/checkpoint/state.json",
        "artifacts/r/models/a.json",
        "artifacts/r/models/a.0.safetensors",
        "artifacts/r/checkpoint/w.safetensors",
        "artifacts/r/journal-000001.jsonl",
        "runs/experiment=e/run_id=r/part-00000.parquet",
        "clients/experiment=e/run_id=r/part-00000.parquet",
        "artifacts/r/config.json",
    ]
    expected = [names[8], names[7], names[6], names[5], names[4], names[3], names[2], names[1], names[0]]
    assert sorted(names, key=rank) == expected


# Object stores


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """An S3-compatible server of our own on this machine; its host and port."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    yield f"{host}:{port}"
    server.stop()


@pytest.fixture
def s3_url(s3: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Results in a bucket of that server, whose address is in the environment as it is for a user."""
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{s3}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "word",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    filesystem, path = pafs.FileSystem.from_uri("s3://bucket?allow_bucket_creation=true")
    filesystem.create_dir(path)
    return "s3://bucket/some/results"


def test_a_run_on_s3_goes_on_on_another_machine(
    s3_url: str, machine: Callable[[str], None], elastic_config: Elastic
) -> None:
    def interrupt() -> bool:
        return True

    config = elastic_config(results=s3_url)
    whole_id = start_run(replace(config, results=str(local_root("file:///whole"))), serial)
    whole = stable(local_root("file:///whole"), whole_id)
    with pytest.raises(RuntimeError, match="stopped after round 0"):
        start_run(config, serial, Watcher(should_stop=interrupt), Label(run_id="mine"))
    machine("b")
    resume_run(config, "mine", serial)
    machine("c")
    root = fetch(s3_url)
    assert_same_rows(stable(root, "mine"), whole)
    assert load_checkpoint(find_run(root, "mine").checkpoint).data["stage"] > 0
    filesystem, path = pafs.FileSystem.from_uri(f"{s3_url}/rounds")
    assert len(pd.read_parquet(path, filesystem=filesystem)) == len(whole["rounds"])
    assert len(pd.read_parquet(f"{s3_url}/rounds")) == len(whole["rounds"])


def test_the_server_may_be_named_in_the_url(s3: str, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("FEDLOOM_CACHE", "/nowhere")
    target = open_target(f"{s3_url}?scheme=http&endpoint_override={s3}&region=us-east-1")
    target.check_reachable(writable=True)
    assert all("writable" not in name for name in target.list())


def test_a_bucket_that_is_not_there_is_refused(s3_url: str, machine: Callable[[str], None]) -> None:
    for look in (check_results, fetch):
        with pytest.raises(ValueError, match=r"s3://none/x\?region=us-east-1 .*no bucket none.*AWS_ACCESS_KEY_ID"):
            look("s3://none/x?region=us-east-1")
    assert not local_root("s3://none/x").exists()


def test_memory_is_a_filesystem_too(
    machine: Callable[[str], None], elastic_config: Elastic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "fsspec+memory:///fedloom/results"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run_id = start_run(elastic_config(results=url), serial)
    assert not list((tmp_path / "here").iterdir()), "nothing of it goes to the disk but the local folder"
    machine("b")
    assert read_table(fetch(url, [run_id]), "runs")["status"].tolist() == ["done"]
