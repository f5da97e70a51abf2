"""Every file of a run is what its run wrote, or is refused in one line."""

import json
import random
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fedloom.experiments.report.runs import write_report
from fedloom.experiments.runs.configuration import stored_config
from fedloom.experiments.verify import Verified, verified
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.loop import InterruptedRunError
from fedloom.platform.results.checkpoint import list_models, run_checkpoint, save_model
from fedloom.platform.results.files import from_hashed_json, hashed_json
from fedloom.platform.results.manifest import (
    ANY,
    Digest,
    Manifest,
    digest_of,
    either,
    manifest_path,
    problems,
)
from fedloom.platform.results.paths import RunPaths, list_runs
from fedloom.platform.results.tables import count_rows, is_done, stored_parts
from fedloom.platform.results.writer import Journal, RunWriter, journalled_rows
from fedloom.platform.runs.run import Watcher, make_serial, resume_run, start_run

UNCHECKED = ("status.json", ".owner")
"""What belongs to no result: a damaged status has a refusal of its own."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, elastic_config_in: Callable[..., RunConfig]) -> RunConfig:
    """A run that was interrupted after its second round; to be copied and not to be changed."""
    config = elastic_config_in(tmp_path_factory.mktemp("stopped") / "results", train={"rounds": 3})
    asked = iter([False, True])
    with pytest.raises(InterruptedRunError):
        start_run(config, make_serial, Watcher(should_stop=lambda: next(asked)))
    return config


@pytest.fixture
def copy(stopped: RunConfig, tmp_path: Path) -> RunPaths:
    shutil.copytree(stopped.results, tmp_path / "results")
    return list_runs(tmp_path / "results")[0]


def files_of(paths: RunPaths) -> list[Path]:
    return [
        p for p in sorted(paths.root.rglob("*")) if p.is_file() and p.name not in UNCHECKED and "logs" not in p.parts
    ]


def refused(paths: RunPaths) -> str:
    """The line with which resuming, verifying and reporting refuse a run."""
    said = []
    for use in (lambda: resumed(paths), lambda: write_report(paths.root, [paths.run_id])):
        with pytest.raises(ValueError, match=r".") as error:
            use()
        said.append(str(error.value))
    assert not verified(paths).whole
    assert all("\n" not in line for line in said)
    return said[0]


def resumed(paths: RunPaths) -> None:
    run_id, config = stored_config(paths.root, paths.run_id)
    resume_run(config, run_id, make_serial)


def test_an_untouched_run_is_whole_and_can_be_resumed(copy: RunPaths) -> None:
    assert verified(copy).problems == ()
    assert {p.name for p in files_of(copy)} >= {"config.json", "costs.json", "state.json", "manifest.json"}
    resumed(copy)
    assert verified(copy).problems == ()


def test_every_changed_or_missing_file_of_a_run_is_refused(stopped: RunConfig, tmp_path: Path) -> None:
    rng = random.Random(1)
    (original,) = list_runs(Path(stopped.results))
    names = [p.relative_to(stopped.results) for p in files_of(original)]
    assert len(names) > 10
    for number, name in enumerate(names):
        for damage in ("flip", "cut", "remove"):
            root = tmp_path / f"{number}-{damage}"
            shutil.copytree(stopped.results, root)
            (paths,) = list_runs(root) or (original,)
            damaged = RunPaths(root, paths.experiment, paths.run_id)
            injure(root / name, damage, rng)
            line = refused_anyhow(damaged)
            assert name.name in line or name.parent.name in line, (name, damage, line)
            shutil.rmtree(root)


def refused_anyhow(paths: RunPaths) -> str:
    """What says no: resuming does; a report needs no tensors."""
    with pytest.raises(ValueError, match=r".") as error:
        resumed(paths)
    assert not verified(paths).whole
    assert "\n" not in str(error.value)
    return str(error.value)


def injure(path: Path, damage: str, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
        return
    if damage == "cut":
        del content[rng.randrange(len(content)) :]
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def test_a_report_refuses_tables_that_were_changed(copy: RunPaths) -> None:
    part = next(iter(copy.table("rounds").glob("*.parquet")))
    other = next(iter(copy.table("clients").glob("*.parquet")))
    shutil.copy(other, part)
    assert f"{part} is not what its run wrote: expected {digest_of_old(copy, part)}" in refused(copy)


def digest_of_old(paths: RunPaths, part: Path) -> Digest:
    files = json.loads(manifest_path(paths).read_bytes())["files"]
    return Digest(*files[part.relative_to(paths.root).as_posix()][-1])


def test_a_changed_number_in_the_costs_is_noticed(copy: RunPaths) -> None:
    path = copy.artifacts / "costs.json"
    costs = json.loads(path.read_text())
    costs["macs"]["fixed"] += 1
    path.write_text(json.dumps(costs))
    assert "costs.json is not what its run wrote" in refused(copy)


def test_short_tables_are_said_to_be_short(copy: RunPaths) -> None:
    """A copy of an earlier moment: nothing in it is damaged, and its manifest is of that moment, too."""
    for part in copy.table("clients").glob("*.parquet"):
        part.unlink()
    listed_anew(copy)
    (line,) = verified(copy).problems
    assert f"table clients of {copy.run_id} is short: the checkpoint counts 8 rows, 0 are in" in line


def journalled(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A journal of three rows, and the position of a checkpoint that counts them."""
    journal = Journal(folder)
    for index in range(3):
        journal.append([("rounds", index, json.dumps({"loss": index / 7}))])
    assert journal.end is not None
    return folder / journal.end.file, {"rounds": 3, "journal": asdict(journal.end)}


def test_a_journal_is_read_as_far_as_its_checkpoint_says(tmp_path: Path) -> None:
    path, position = journalled(tmp_path)
    rows = {index: {"loss": index / 7} for index in range(3)}
    assert journalled_rows(tmp_path, position) == {"rounds": rows}
    path.write_bytes(path.read_bytes() + b'["rounds",3,{"lo')
    assert journalled_rows(tmp_path, position) == {"rounds": rows}
    path.unlink()  # after its rows were moved to Parquet
    assert journalled_rows(tmp_path, position) == {}
    assert journalled_rows(tmp_path, {**position, "journal": None}) == {}


@pytest.mark.parametrize("lines", [(0, 1), (0, 2), (0, 2, 1), (0, 1, 1, 2), (1, 2, 0), (0, 1, 0)])
def test_lines_of_a_journal_that_are_not_as_written_are_refused(tmp_path: Path, lines: tuple[int, ...]) -> None:
    path, position = journalled(tmp_path)
    written = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(written[i] for i in lines))
    with pytest.raises(ValueError, match=rf"{path.name} is damaged .*: restore it"):
        journalled_rows(tmp_path, position)
    path.write_bytes(b"".join(written).replace(b"1428", b"1429"))
    with pytest.raises(ValueError, match=rf"{path.name} is damaged .*: restore it"):
        journalled_rows(tmp_path, position)


@pytest.mark.parametrize("journal", [7, {}, {"file": "../x", "size_bytes": 1, "sha256": ""}, {"file": 1}])
def test_a_position_that_says_nothing_of_the_journal_is_refused(tmp_path: Path, journal: Any) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$"):
        journalled_rows(tmp_path, {"journal": journal})


def test_a_journal_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Up to a line that was cut short; its first line names the run."""
    lines = ['["journal",1,{"run_id": "r1"},"0f",1]', '["rounds",0,{"loss": 0.5},"a1",3902472441]', '["rounds",1,{"lo']
    (tmp_path / "journal-000001.jsonl").write_text("\n".join(lines))
    assert journalled_rows(tmp_path, {"rounds": 1})["rounds"] == {0: {"loss": 0.5}}


def test_the_journal_of_another_run_is_refused(tmp_path: Path) -> None:
    """That of another seed, with as many rows: which rows these are is in none of them."""
    path, position = journalled(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"0.1428", b"0.9999"))
    writer = RunWriter.create(tmp_path / "results", "e", "r1")
    shutil.copy(path, writer.paths.artifacts)
    with pytest.raises(ValueError, match=f"{path.name} is damaged"):
        RunWriter.resume(tmp_path / "results", "e", "r1", position)


def test_while_a_file_is_replaced_the_old_and_the_new_one_are_right(copy: RunPaths) -> None:
    manifest = Manifest.of_run(copy)
    path = copy.config
    old, new = path.read_bytes(), b"{}"
    with manifest.replacing(path, Digest.of(new)):
        assert problems(copy) == []
        path.write_bytes(new)
        assert problems(copy) == []
        path.write_bytes(b"[]")
        assert len(problems(copy)) == 1
        path.write_bytes(new)
    manifest.settle()
    assert problems(copy) == []
    path.write_bytes(old)
    assert len(problems(copy)) == 1


def listed_anew(paths: RunPaths) -> None:
    """Gives a run a manifest of the files that it has now."""
    manifest_path(paths).unlink()
    Manifest(paths).begin()


def test_a_status_that_says_done_ends_no_run(copy: RunPaths) -> None:
    copy.status.write_text(json.dumps({**json.loads(copy.status.read_text()), "state": "done"}))
    (line,) = verified(copy).problems
    assert line.startswith(f"{copy.status} says done, the run's row does not: fedloom resume {copy.run_id}")
    assert not is_done(copy)
    resumed(copy)
    assert is_done(copy)
    assert verified(copy).problems == ()


def test_the_checkpoint_of_another_run_is_refused(
    copy: RunPaths, elastic_config_in: Callable[..., RunConfig], tmp_path: Path
) -> None:
    other = start_run(elastic_config_in(tmp_path / "other", train={"rounds": 1}), make_serial)
    shutil.rmtree(copy.checkpoint)
    shutil.copytree(RunPaths(tmp_path / "other", copy.experiment, other).checkpoint, copy.checkpoint)
    for use in (lambda: resumed(copy), lambda: run_checkpoint(copy)):
        with pytest.raises(ValueError, match=f"state.json is the checkpoint of run {other}: restore that of"):
            use()
    assert any(f"is the checkpoint of run {other}" in line for line in verified(copy).problems)


def test_a_run_without_checkpoint_and_manifest_gets_one_when_it_is_resumed(copy: RunPaths) -> None:
    """One of an earlier version, say; a checkpoint of an earlier version is refused by itself."""
    manifest_path(copy).unlink()
    state = copy.checkpoint / "state.json"
    state.write_bytes(b'{"checkpoint_version": 1,' + state.read_bytes())
    assert problems(copy) == []
    assert verified(copy).remarks == ("no manifest: an earlier version of fedloom wrote this run",)
    shutil.rmtree(copy.checkpoint)
    for part in copy.table("rounds").glob("*.parquet"):  # it ended before its first round
        part.unlink()
    (remark,) = verified(copy).remarks
    assert remark.endswith("an earlier version of fedloom wrote this run, or it ended before its first checkpoint")
    resumed(copy)
    assert verified(copy) == Verified(copy.run_id, ())


def test_a_run_whose_manifest_was_lost_is_refused(copy: RunPaths) -> None:
    manifest_path(copy).unlink()
    assert refused(copy) == f"{manifest_path(copy)} is missing: restore it from a copy, or start a new run"
    assert verified(copy).remarks == ()


def test_a_run_whose_manifest_and_checkpoint_were_lost_keeps_its_rows(copy: RunPaths) -> None:
    manifest_path(copy).unlink()
    shutil.rmtree(copy.checkpoint)
    line = refused_anyhow(copy)
    assert line == (
        f"{copy.table('rounds')} has rows, but {manifest_path(copy)} and {copy.checkpoint / 'state.json'} are missing: "
        "restore both from a copy, or start a new run"
    )
    assert verified(copy).problems == (line,)
    assert sum(map(count_rows, stored_parts(copy.table("rounds")))) == 2


@pytest.mark.parametrize("name", ["part-00000 (conflicted copy).parquet", "part-00001.parquet", "a/part-00000.parquet"])
def test_rows_that_no_run_wrote_are_noticed(copy: RunPaths, name: str) -> None:
    (part,) = copy.table("rounds").glob("*.parquet")
    more = part.parent / name
    more.parent.mkdir(exist_ok=True)
    shutil.copy(part, more)
    line = refused(copy)
    assert line == f"{more} was not written by its run, and would be read as rows of it: move it out of the results"
    assert verified(copy).problems[0] == line
    more.unlink()
    for harmless in (".part-00001.parquet.tmp", ".part-00000.parquet", "_metadata.parquet", "desktop.ini"):
        (part.parent / harmless).write_bytes(b"x")
    assert problems(copy) == []


@pytest.mark.parametrize("name", ["tier-9.json", ".tier-9.json"])
def test_models_that_no_run_wrote_are_noticed(copy: RunPaths, name: str) -> None:
    save_model(copy, "tier-9", {}, {})
    card = (copy.models / "tier-9.json").rename(copy.models / name)
    assert name.removesuffix(".json") in list_models(copy)
    assert refused(copy) == (
        f"{card} was not written by its run, and would be read as a model of it: move it out of the results"
    )


def test_a_run_that_adds_parts_is_whole_at_every_moment(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "demo", "r1", rows_per_file=2)
    writer.manifest.begin()
    writer.update_run(status="running")
    ended = threading.Event()

    def look() -> list[str]:
        seen = []
        while not ended.is_set():
            seen += problems(writer.paths)
        return seen

    with ThreadPoolExecutor(1) as reader:
        found = reader.submit(look)
        for index in range(40):
            writer.add("rounds", stage="train", round=index)
            writer.close()
        ended.set()
        assert found.result() == []


def test_changed_prepared_data_is_noticed(
    tmp_path: Path, elastic_config_in: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = elastic_config_in(tmp_path / "results", train={"rounds": 1})
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    config.data.cache = None
    run_id = start_run(config, make_serial)
    (paths,) = list_runs(Path(config.results))
    assert verified(paths) == Verified(run_id, ())
    (array,) = (tmp_path / "cache").glob("*/train_x.npy")
    injure(array, "flip", random.Random(1))
    (line,) = verified(paths).problems
    assert line.startswith(f"{array}: ")
    for use in (lambda: resumed(paths), lambda: start_run(config, make_serial)):
        with pytest.raises(ValueError, match="delete its folder and prepare again"):
            use()
    assert list_runs(Path(config.results)) == [paths]
    shutil.rmtree(array.parent)
    remark = "its data was not compared, as it is not prepared on this machine"
    assert verified(paths) == Verified(run_id, (), (remark,))
    resumed(paths)


def test_either_of_two_manifests_fits_every_mixture() -> None:
    a, b = Digest(1, "a"), Digest(2, "b")
    assert either({"same": (a,), "new": (a,)}, {"same": (a,), "new": (b,), "more": (b,), "any": (ANY,)}) == {
        "same": (a,),
        "new": (a, b),
        "more": (None, b),
        "any": (None, ANY),
    }


def test_every_flipped_bit_of_a_hashed_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    content = hashed_json({"version": 1, "files": {"a": [[1, "b"]]}})
    assert from_hashed_json(content, path) == {"version": 1, "files": {"a": [[1, "b"]]}}
    assert from_hashed_json(hashed_json({}), path) == {}
    for place in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            with pytest.raises(ValueError, match="is damaged"):
                from_hashed_json(bytes(damaged), path)
    path.write_bytes(content)
    assert digest_of(path) == Digest.of(content)
