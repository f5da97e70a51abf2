"""What is fetched from a URL, and whose copy is the right one."""

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fedloom.platform.results.copies import fetch, fetch_folder, mirror_folder, mirrored
from fedloom.platform.results.files import hashed_json, remove_temporaries
from fedloom.platform.results.lock import owned
from fedloom.platform.results.paths import NO_NAMES, Names, list_runs, run_paths, write_names
from fedloom.platform.results.status import StatusFile
from fedloom.platform.results.store import RemoteFile, Target, local_root, open_target
from fedloom.platform.results.tables import TABLES, read_table

Machine = Callable[[str], None]


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def status_text(state: str, heartbeat: float, host: str = "elsewhere", pid: int = 1, **counts: int) -> str:
    values = {"state": state, "pid": pid, "host": host, "stage": "s", "round": 0, "rounds_total": 1, "message": ""}
    return json.dumps({**values, "heartbeat": heartbeat, **counts})


def state_text(stage: int, round_: int) -> str:
    return hashed_json({"data": {"stage": stage, "round": round_}}).decode()


@pytest.mark.parametrize(
    ("here", "there", "kept"),
    [
        (status_text("failed", 9.0, taken=1, written=9), status_text("running", 5.0, taken=1, written=5), "here"),
        (status_text("failed", 5.0, taken=1, written=9), status_text("failed", 5.0, taken=1, written=9), "here"),
        (status_text("failed", 5.0, taken=1, written=5), status_text("done", 9.0, taken=1, written=9), "there"),
        (status_text("running", 5.0, taken=1, written=9), status_text("done", 9.0, taken=2, written=1), "there"),
    ],
    ids=["further here", "the same", "further there", "died here"],
)
def test_a_run_is_replaced_only_by_a_later_copy(
    url: str, machine: Machine, here: str, there: str, kept: str, bucket: Path
) -> None:
    part = "rounds/experiment=e/run_id=r1/part-00000.parquet"
    for root, status, name in ((local_root(url), here, "here"), (bucket, there, "there")):
        put(root / part, name)
        put(root / "artifacts/r1/journal-000001.jsonl", name)
        put(root / f"artifacts/r1/checkpoint/{name}.safetensors", name)
        put(root / "artifacts/r1/status.json", status)
    fetch(url)
    assert (local_root(url) / part).read_text() == kept
    assert [p.name for p in local_root(url).rglob("*.safetensors")] == [f"{kept}.safetensors"]


EARLY, LATE = 600.0, 7800.0
"""The same moment by a right clock, and by one that is two hours fast."""


@pytest.mark.parametrize(
    ("here", "there", "kept"),
    [
        ((0, 80, {}), (0, 150, {}), "there"),
        ((0, 150, {}), (0, 80, {}), "here"),
        ((0, 150, {}), (1, 2, {}), "there"),
        ((0, 80, {"taken": 3, "written": 9}), (0, 150, {"taken": 1, "written": 1}), "there"),
        ((0, 80, {"taken": 1, "written": 9}), (0, 80, {"taken": 2, "written": 5}), "there"),
        ((0, 80, {"taken": 1, "written": 9}), (0, 80, {"taken": 1, "written": 5}), "here"),
        ((0, 80, {"taken": 1, "written": 5}), (0, 80, {"taken": 1, "written": 9}), "there"),
        ((0, 80, {}), None, "here"),
        (None, (0, 1, {}), "there"),
    ],
)
@pytest.mark.parametrize("clocks", [(EARLY, LATE), (LATE, EARLY)])
def test_the_copy_that_goes_further_is_kept_whatever_the_clocks_say(
    url: str, machine: Machine, here: Any, there: Any, kept: str, clocks: tuple[float, float], bucket: Path
) -> None:
    sides = ((local_root(url), here, "here", clocks[0]), (bucket, there, "there", clocks[1]))
    for root, place, name, heartbeat in sides:
        stage, round_, counts = place or (0, 0, {})
        state = state_text(stage, round_) if place else "{damaged"
        put(root / "rounds/experiment=e/run_id=r1/part-00000.parquet", name)
        put(root / "artifacts/r1/checkpoint/state.json", state)
        put(root / "artifacts/r1/status.json", status_text("interrupted", heartbeat, name, **counts))
    fetch(url)
    assert (local_root(url) / "rounds/experiment=e/run_id=r1/part-00000.parquet").read_text() == kept


@pytest.mark.parametrize("status", [None, "", "{cut"])
@pytest.mark.parametrize(("here", "kept"), [(80, "here"), (10, "there")])
def test_without_its_status_the_checkpoint_alone_decides(
    url: str, machine: Machine, bucket: Path, status: str | None, here: int, kept: str
) -> None:
    for root, name, round_ in ((local_root(url), "here", here), (bucket, "there", 40)):
        put(root / "rounds/experiment=e/run_id=r1/part-00000.parquet", name)
        put(root / "artifacts/r1/checkpoint/state.json", state_text(0, round_))
    put(bucket / "artifacts/r1/status.json", status_text("interrupted", EARLY))
    if status is not None:
        put(local_root(url) / "artifacts/r1/status.json", status)
    fetch(url)
    assert (local_root(url) / "rounds/experiment=e/run_id=r1/part-00000.parquet").read_text() == kept


@pytest.mark.parametrize("ended", [False, True], ids=["at work", "ended again"])
def test_a_run_that_is_taken_up_here_while_it_is_downloaded_is_left_alone(
    url: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, bucket: Path, ended: bool
) -> None:
    root, part = local_root(url), "rounds/experiment=e/run_id=r1/part-00000.parquet"
    for place, name, round_ in ((root, "here", 80), (bucket, "there", 150)):
        put(place / part, name)
        put(place / "artifacts/r1/checkpoint/state.json", state_text(0, round_))
        put(place / "artifacts/r1/status.json", status_text("interrupted", EARLY))
    download, taken = Target.download, ExitStack()

    def overtaken(self: Target, name: str, path: Path) -> int:
        if name == part and (root / part).read_text() == "here":
            taken.enter_context(owned(root / "artifacts/r1", "run r1", root, root))
            put(root / part, "resumed here")
            put(root / "artifacts/r1/journal-000001.jsonl", "rows of its own")
            put(root / "artifacts/r1/checkpoint/state.json", state_text(0, 151))
            StatusFile(root / "artifacts/r1/status.json").write("interrupted" if ended else "running")
            if ended:
                taken.close()
        return download(self, name, path)

    monkeypatch.setattr(Target, "download", overtaken)
    with taken:
        fetch(url)
        assert (root / part).read_text() == "resumed here"
        assert (root / "artifacts/r1/journal-000001.jsonl").read_text() == "rows of its own"
    assert list(root.rglob("*.tmp")) == []


def test_the_owner_of_a_run_fetches_it(url: str, machine: Machine, bucket: Path) -> None:
    root, folder = local_root(url), local_root(url) / "artifacts/r1"
    for place, round_ in ((root, 80), (bucket, 150)):
        put(place / "artifacts/r1/checkpoint/state.json", state_text(0, round_))
        put(place / "artifacts/r1/status.json", status_text("running", time.time(), platform.node()))
    with owned(folder, "run r1", root, root):
        fetch(url, owned="r1")
    assert (folder / "checkpoint/state.json").read_text() == state_text(0, 150)


def test_only_what_changed_is_fetched_again(
    url: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, bucket: Path, small_run: Any
) -> None:
    small_run("r1")
    with mirrored(url, small_run("r2").paths):
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
    put(bucket / "artifacts/r1/status.json", status_text("running", 9e12, taken=2))
    del fetched[:]
    fetch(url)
    assert fetched == ["artifacts/r1/status.json"]


def test_a_named_run_is_fetched_without_listing_the_others(
    url: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, bucket: Path, small_run: Any
) -> None:
    for run_id in ("r1", "r2"):
        with mirrored(url, small_run(run_id).paths):
            pass
    listed: list[str] = []
    own = Target.list

    def watched(self: Target, under: Sequence[str] = ("",)) -> dict[str, RemoteFile]:
        found = own(self, under)
        listed.extend(found)
        return found

    monkeypatch.setattr(Target, "list", watched)
    machine("b")
    fetch(url, ["r1"])
    assert any("r2" in name for name in listed), "it is not known of which experiment r1 is"
    put(bucket / "artifacts/r1/config.json", json.dumps({"experiment": "e"}))
    del listed[:]
    machine("c")
    root = fetch(url, ["r1"])
    there = {p.relative_to(bucket).as_posix() for p in bucket.rglob("*") if p.is_file()}
    assert set(listed) == {name for name in there if "r2" not in name}
    assert len(read_table(root, "rounds", run_id="r1")) == 1


def test_runs_are_fetched_by_their_names_also_beside_one_that_is_meant_by_its_id(
    url: str, machine: Machine, small_run: Any, bucket: Path
) -> None:
    called = {"r1": NO_NAMES, "r2": Names("best"), "r3": Names("r1", ("paper",)), "r4": Names("other")}
    called["paper-0000"] = NO_NAMES
    for run_id, names in called.items():
        paths = small_run(run_id).paths
        write_names(paths.artifacts, names)
        with mirrored(url, paths):
            pass
        put(bucket / f"artifacts/{run_id}/config.json", json.dumps({"experiment": "e"}))
    for place, words, expected in (
        ("b", ["r1"], ["r1"]),  # an id, although it is the name of another
        ("c", ["r1", "best"], ["r1", "r2"]),
        ("d", ["paper", "best"], ["paper-0000", "r2", "r3"]),  # a tag, although an id begins with it
        ("f", ["none"], []),
    ):
        machine(place)
        assert [run.run_id for run in list_runs(fetch(url, words))] == expected


def test_a_file_that_disappears_while_it_is_fetched_is_looked_for_again(
    url: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, bucket: Path, small_run: Any
) -> None:
    with mirrored(url, small_run().paths):
        pass
    put(bucket / "artifacts/r1/checkpoint/w-v1.safetensors", "old")
    machine("b")
    download = Target.download

    def overtaken(self: Target, name: str, path: Path) -> int:
        if name.endswith("w-v1.safetensors"):
            (bucket / name).rename(bucket / name.replace("v1", "v2"))
        return download(self, name, path)

    monkeypatch.setattr(Target, "download", overtaken)
    root = fetch(url)
    assert [p.name for p in root.rglob("*.safetensors")] == ["w-v2.safetensors"]
    assert list(root.rglob("*.tmp")) == []


def test_a_failed_download_leaves_no_part_of_any_file(
    url: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, bucket: Path
) -> None:
    for name in ("ablation.json", "ends.json", "status.json"):
        put(bucket / f"ablations/a1/{name}", name)
    download = Target.download

    def broken(self: Target, name: str, path: Path) -> int:
        size_bytes = download(self, name, path)
        if name.endswith("ends.json"):
            raise OSError("the network is down")
        return size_bytes

    monkeypatch.setattr(Target, "download", broken)
    with pytest.raises(ValueError, match="the network is down"):
        fetch_folder(url, "ablations/a1")
    assert [path for path in local_root(url).rglob("*") if path.is_file()] == []


def test_a_run_that_is_taken_up_may_tidy_up_while_it_is_fetched(
    url: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, bucket: Path
) -> None:
    put(bucket / "rounds/experiment=e/run_id=r1/part-00000.parquet", "rows")
    put(bucket / "artifacts/r1/status.json", status_text("done", EARLY))
    download, tidied = Target.download, list[str]()

    def overtaken(self: Target, name: str, path: Path) -> int:
        size_bytes = download(self, name, path)
        if name not in tidied:
            tidied.append(name)
            remove_temporaries(path.parent)
        return size_bytes

    monkeypatch.setattr(Target, "download", overtaken)
    root = fetch(url)
    assert (root / "rounds/experiment=e/run_id=r1/part-00000.parquet").read_text() == "rows"
    assert (root / "artifacts/r1/status.json").exists()


def test_no_link_at_a_url_of_this_machine_is_followed(url: str, machine: Machine, bucket: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    put(outside / "config.json", "private")
    put(bucket / "artifacts/r1/status.json", status_text("done", EARLY))
    (bucket / "artifacts/r1/config.json").symlink_to(outside / "config.json")
    (bucket / "artifacts/r1/loop").symlink_to(bucket)
    (bucket / "artifacts/r2").symlink_to(outside)
    root = fetch(url)
    files = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    assert [name for name in files if not name.endswith(".owner")] == ["artifacts/r1/status.json"]
    for run_id in ("r1", "r2"):
        with pytest.raises(ValueError, match=rf"artifacts/{run_id}.* is a link.*nothing in results is followed"):
            fetch(url, [run_id])
    put(root / "artifacts/r2/new.json", "new")
    with pytest.raises(OSError, match="nothing in results is followed"):
        mirror_folder(url, "artifacts/r2")
    with pytest.raises(OSError, match="nothing in results is followed"):
        open_target(url).delete("artifacts/r2/config.json")
    assert [path.name for path in outside.iterdir()] == ["config.json"]


def test_no_pipe_at_a_url_of_this_machine_is_waited_for(url: str, machine: Machine, bucket: Path) -> None:
    put(bucket / "artifacts/r1/status.json", status_text("done", EARLY))
    os.mkfifo(bucket / "artifacts/r1/config.json")
    with pytest.raises(ValueError, match=r"artifacts/r1/config.json is a link, a pipe or the like"):
        fetch(url, ["r1"])


def test_folders_beside_the_runs_go_there_and_come_back(url: str, machine: Machine, bucket: Path) -> None:
    plan = local_root(url) / "ablations/a1/ablation.json"
    put(plan, "planned")
    mirror_folder(url, "ablations/a1")
    put(plan, "two trials done")
    assert fetch(url) == local_root(url)
    assert plan.read_text() == "two trials done", "what is here is later"
    mirror_folder(url, "ablations/a1")
    machine("b")
    assert (fetch(url, [], ablations=True) / "ablations/a1/ablation.json").read_text() == "two trials done"
    put(bucket / "supernets/k/origin.json", "{}")
    assert (fetch_folder(url, "supernets/k") / "origin.json").read_text() == "{}"
    assert list(fetch_folder(url, "supernets/none").glob("*")) == []


def test_a_folder_that_cannot_be_sent_is_said_in_one_line(url: str, machine: Machine, bucket: Path) -> None:
    put(local_root(url) / "ablations/a1/ablation.json", "planned")
    bucket.parent.mkdir()
    bucket.write_text("a file where the folder should be")
    with pytest.raises(OSError, match=r"ablations/a1 could not be copied to file://.*: copy it yourself"):
        mirror_folder(url, "ablations/a1")
