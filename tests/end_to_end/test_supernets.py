"""A supernet is trained once: other runs begin with it, and find what they would have found with their own."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread

import pandas as pd
import pytest
import torch

from fedloom.platform.clients.execution import SerialExecutor
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.superfednas import SuperFedNASConfig
from fedloom.platform.results.checkpoint import load_checkpoint
from fedloom.platform.results.files import from_hashed_json
from fedloom.platform.results.paths import RunPaths, find_run, list_runs
from fedloom.platform.results.tables import read_table
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.runs.run import make_serial, resume_run, start_run
from fedloom.platform.runs.supernets import keeper, load_supernet, store_supernet, stored_supernet, supernet_key

Tiny = Callable[..., RunConfig]
Rows = Callable[[Path, str], dict[str, pd.DataFrame]]
KEY = "0123456789abcdef" * 2
MINE = RunConfig(experiment="mine", method=SuperFedNASConfig())

OTHER_SEARCH = {
    "fedoras": ["method.search.budget=12", "method.finetune.lr=0.02", "seeds.search=7"],
    "superfednas": [
        "method.search.samples=24",
        "method.family=[smallest]",
        "method.evaluation.clients_per_tier=2",
        "seeds.search=7",
    ],
}


def run(config: RunConfig) -> str:
    return start_run(config, make_serial)


def key_of(config: RunConfig) -> str:
    key = supernet_key(config, build_world(config))
    assert key is not None
    return key


def trained(results: Path, run_id: str) -> list[int]:
    """The rounds of training that a run has rows of."""
    rounds = read_table(results, "rounds", run_id=run_id)
    return [int(r) for r in rounds[rounds["stage"] == "supernet"]["round"]]


def trained_and_searched(tiny_config: Tiny, **changes: object) -> RunConfig:
    """A run that re-uses a supernet, and trains nothing after the search."""
    config = tiny_config(reuse_supernet=True, **changes)
    config.method.finetune.rounds = config.method.rand_init.rounds = 0
    return config


def used(results: Path, run_id: str) -> tuple[str | None, str | None]:
    """What a run's row says about its supernet."""
    row = read_table(results, "runs", run_id=run_id).iloc[0]
    return tuple(None if pd.isna(row[c]) else str(row[c]) for c in ("supernet", "supernet_run_id"))  # type: ignore[return-value]


def assert_same_later(rows: Rows, results: Path, first: str, second: str) -> None:
    """Two runs have the same rows after training, the same models and the same final weights, bit for bit."""
    tables = [rows(results, run_id) for run_id in (first, second)]
    for name in ("candidates", "models", "evaluations", "rounds", "clients"):
        later = [t[name] if name == "models" else t[name][t[name]["stage"] != "supernet"] for t in tables]
        a, b = (frame.reset_index(drop=True) for frame in later)
        assert len(a) > 0, name
        pd.testing.assert_frame_equal(a, b, check_exact=True, obj=name)
    groups = [load_checkpoint(find_run(results, run_id).checkpoint).groups for run_id in (first, second)]
    assert groups[0].keys() == groups[1].keys()
    for name in groups[0]:
        assert groups[0][name].version == groups[1][name].version
        for tensor, value in groups[0][name].tensors.items():
            assert value.numpy().tobytes() == groups[1][name].tensors[tensor].numpy().tobytes(), f"{name}: {tensor}"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["fedoras", "superfednas"], indirect=True)
def test_later_stages_are_those_of_a_run_that_trained_itself(tiny: Tiny, rows_of: Rows, family: str) -> None:
    first = tiny("reuse_supernet=true")
    results, key = Path(first.results), key_of(first)
    origin = run(first)
    assert trained(results, origin) == list(range(first.method.train.rounds))
    assert used(results, origin) == (key, origin)
    assert stored_supernet(results, key) == origin

    itself = run(tiny(*OTHER_SEARCH[family]))
    again = run(tiny("reuse_supernet=true", *OTHER_SEARCH[family]))
    assert trained(results, again) == []
    assert used(results, again) == (key, origin)
    assert used(results, itself) == (None, None), "nothing is re-used unless asked for"
    assert_same_later(rows_of, results, itself, again)
    assert [path.name for path in (results / "supernets").iterdir() if not path.name.startswith(".")] == [key]


def test_methods_without_a_shared_supernet_run_as_ever(tiny_config: Tiny) -> None:
    config = tiny_config(reuse_supernet=True, dry_run=True)
    assert used(Path(config.results), run(config)) == (None, None)
    assert not (Path(config.results) / "supernets").exists()


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage", ["tensors", *(pytest.param(name, marks=pytest.mark.slow) for name in ("missing", "state", "origin"))]
)
def test_a_damaged_supernet_is_told_of_and_replaced(
    tiny_config: Tiny, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    config = trained_and_searched(tiny_config)
    results, key = Path(config.results), key_of(config)
    folder = results / "supernets" / key
    run(config)
    (tensors,) = folder.glob("*.safetensors")
    file = {"state": folder / "state.json", "origin": folder / "origin.json"}.get(damage, tensors)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(b"{" if damage == "origin" else content)
    second = run(config)
    warnings = [r.message for r in caplog.records if r.levelname == "WARNING" and "supernet" in r.message]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"supernet {key} cannot be used: {folder}")
    assert "\n" not in warnings[0]
    assert trained(results, second) == [0, 1]
    assert used(results, second) == (key, second)
    third = run(config)
    assert (trained(results, third), used(results, third)) == ([], (key, second))


def test_a_supernet_of_another_training_is_not_taken(tiny_config: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    """Each training has its own; then their folders are exchanged, as by a copy that went wrong."""
    config, other = (trained_and_searched(tiny_config, seed=seed) for seed in (1, 2))
    results = Path(config.results)
    runs = [run(config), run(other)]
    assert [trained(results, r) for r in runs] == [[0, 1], [0, 1]]
    assert [used(results, r) for r in runs] == [(key_of(config), runs[0]), (key_of(other), runs[1])]
    folders = [results / "supernets" / key_of(each) for each in (config, other)]
    aside = folders[0].rename(results / "aside")
    folders[1].rename(folders[0])
    aside.rename(folders[1])
    again = run(config)
    assert trained(results, again) == [0, 1]
    assert used(results, again) == (key_of(config), again)
    (warning,) = [r.message for r in caplog.records if "cannot be used" in r.message]
    assert f"{folders[0]} holds the supernet of another training (seeds.partition 2 -> 1, " in warning
    assert trained(results, run(config)) == [], "its own has replaced it"


def test_a_full_disk_for_the_supernet_fails_no_run(
    tiny_config: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedloom.platform.runs.supernets.save_state", full)
    config = trained_and_searched(tiny_config)
    run_id = run(config)
    assert read_table(Path(config.results), "runs", run_id=run_id)["status"].tolist() == ["done"]
    assert [r.message for r in caplog.records if r.levelname == "WARNING" and "supernet" in r.message] == [
        f"the supernet could not be stored for later runs: {config.results}/supernets/{key_of(config)}: "
        "no space left on device"
    ]
    assert list((Path(config.results) / "supernets").glob("[!.]*")) == []


# -- kills -------------------------------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys
import torch
from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.runs import supernets
from fedloom.platform.clients.execution import SerialExecutor
from fedloom.platform.runs.run import start_run
from fedloom.platform.clients.worker import Worker

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def executor(world):
    return SerialExecutor(Worker(world.spec))

torch.set_num_threads(1)
place, *overrides = sys.argv[1:]
if place == "storing":  # when the tensors are written, and the folder has not its name yet
    supernets.write_atomically = die
start_run(compose_config(overrides), die if place == "starting" else executor)
"""


def killed_run(config: RunConfig, overrides: list[str], place: str) -> str:
    """The id of a new run that was killed at that place."""
    before = {r.run_id for r in list_runs(Path(config.results))}
    arguments = [*overrides, f"results={config.results}", "reuse_supernet=true"]
    end = subprocess.run([sys.executable, "-c", PROGRAM, place, *arguments], capture_output=True, text=True)
    assert end.returncode == -signal.SIGKILL, end.stderr
    (new,) = {r.run_id for r in list_runs(Path(config.results))} - before
    return new


@pytest.mark.slow
def test_a_kill_while_storing_leaves_nothing_and_the_resumed_run_stores(
    tiny: Tiny, tiny_overrides: list[str], rows_of: Rows
) -> None:
    config = tiny("reuse_supernet=true")
    results, key = Path(config.results), key_of(config)
    origin = killed_run(config, tiny_overrides, "storing")
    assert stored_supernet(results, key) is None
    assert load_supernet(results, key, config) is None
    resume_run(config, origin, make_serial)
    assert stored_supernet(results, key) == origin
    assert used(results, origin) == (key, origin)

    # Killed before its first round is over, and before any worker was there.
    second = killed_run(config, tiny_overrides, "starting")
    assert used(results, second) == (key, origin)
    resume_run(config, second, make_serial)
    assert trained(results, second) == []
    assert used(results, second) == (key, origin)
    assert_same_later(rows_of, results, origin, second)


def interrupted_run(config: RunConfig) -> str:
    """The id of a run that was interrupted before its first round."""

    def nobody(_: World) -> SerialExecutor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start_run(config, nobody)
    return list_runs(Path(config.results))[-1].run_id


def test_a_run_that_was_interrupted_in_training_stores_its_supernet(tiny_config: Tiny) -> None:
    config = trained_and_searched(tiny_config)
    run_id = interrupted_run(config)
    resume_run(config, run_id, make_serial)
    assert stored_supernet(Path(config.results), key_of(config)) == run_id


def test_a_run_that_lost_the_supernet_it_began_with_is_refused(tiny_config: Tiny) -> None:
    """It would train one itself, which its row says is another run's."""
    config = tiny_config(reuse_supernet=True)
    store_supernet(Path(config.results), key_of(config), RunState(), "run-1", config)
    paths = find_run(Path(config.results), interrupted_run(config))
    shutil.rmtree(paths.checkpoint)
    with pytest.raises(ValueError, match=r"state\.json is not what its run wrote: .* found no file"):
        resume_run(config, paths.run_id, make_serial)


@pytest.mark.parametrize("change", ["source", "switched off"])
def test_a_supernet_that_was_not_trained_with_one_key_throughout_is_not_stored(
    tiny_config: Tiny, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    config = trained_and_searched(tiny_config)
    run_id = interrupted_run(config)
    if change == "source":
        monkeypatch.setattr("fedloom.platform.runs.supernets.source_hash", lambda: "another")
    resumed = replace(config, reuse_supernet=change == "source")
    resume_run(resumed, run_id, make_serial)
    assert used(Path(config.results), run_id) == (None, None)
    assert not (Path(config.results) / "supernets").exists()


# -- the store ---------------------------------------------------------------------------------------------------------


def test_of_two_runs_that_finish_at_once_one_wins(tmp_path: Path) -> None:
    barrier = Barrier(4)

    def store(run_id: str) -> None:
        state = RunState(round=3).with_group("supernet", {"w": torch.arange(20_000.0)})
        barrier.wait()
        store_supernet(tmp_path, KEY, state, run_id, MINE)

    threads = [Thread(target=store, args=(f"run-{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stored = load_supernet(tmp_path, KEY, MINE)
    assert stored is not None
    assert stored.run_id == stored_supernet(tmp_path, KEY)
    assert stored.run_id in {f"run-{i}" for i in range(4)}
    assert stored.state.round == 3
    assert torch.equal(stored.state.weights("supernet")["w"], torch.arange(20_000.0))
    assert [path.name for path in (tmp_path / "supernets").iterdir() if path.name != ".lock"] == [KEY], (
        "nothing is left of the others"
    )
    store_supernet(tmp_path, KEY, RunState(), "late", MINE)
    assert stored_supernet(tmp_path, KEY) == stored.run_id


def test_an_origin_says_who_trained_it_and_when(tmp_path: Path) -> None:
    store_supernet(tmp_path, KEY, RunState(), "run-1", MINE)
    path = tmp_path / "supernets" / KEY / "origin.json"
    origin = from_hashed_json(path.read_bytes(), path)
    assert origin.pop("created").endswith("+00:00")
    assert len(origin.pop("state_sha256")) == 64
    assert origin == {"key": KEY, "run_id": "run-1", "experiment": "mine"}
    path.write_bytes(path.read_bytes().replace(b"run-1", b"run-2"))
    assert (stored_supernet(tmp_path, KEY), load_supernet(tmp_path, KEY, MINE)) == (None, None), "it was changed"


def test_an_origin_of_an_earlier_version_has_no_hash(tmp_path: Path) -> None:
    store_supernet(tmp_path, KEY, RunState(), "run-1", MINE)
    path = tmp_path / "supernets" / KEY / "origin.json"
    path.write_text(json.dumps(from_hashed_json(path.read_bytes(), path)))
    found = load_supernet(tmp_path, KEY, MINE)
    assert found is not None
    assert (found.run_id, stored_supernet(tmp_path, KEY)) == ("run-1", "run-1")


@pytest.mark.parametrize("link", ["supernets", f"supernets/{KEY}"])
def test_no_link_to_a_supernet_is_followed(link: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    elsewhere, results = tmp_path / "elsewhere", tmp_path / "results"
    store_supernet(elsewhere, KEY, RunState(), "run-1", MINE)
    (results / link).parent.mkdir(parents=True)
    (results / link).symlink_to(elsewhere / link)
    before = sorted(elsewhere.rglob("*"))
    assert (stored_supernet(results, KEY), load_supernet(results, KEY, MINE)) == (None, None)
    keeper(replace(MINE, results=str(results)), RunPaths(results, "mine", "run-2"), KEY)(RunState())
    assert [line.count("nothing in results is followed") for line in caplog.messages] == [1, 1]
    assert sorted(elsewhere.rglob("*")) == before


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    assert stored_supernet(tmp_path, KEY) is None
    assert load_supernet(tmp_path, KEY, MINE) is None


def test_a_run_killed_before_its_row_was_written_begins_once_more(
    tiny_config: Tiny, rows_of: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a checkpoint of the shared supernet by then, and no row that says whose it is."""
    config = tiny_config(reuse_supernet=True)
    results = Path(config.results)
    leader, undisturbed = run(config), run(config)

    def killed(*_: object, **__: object) -> None:
        raise SystemExit("killed")

    with monkeypatch.context() as at_the_row:
        at_the_row.setattr(RunWriter, "update_run", killed)
        with pytest.raises(SystemExit):
            run(config)
    (broken,) = {p.name for p in (results / "artifacts").iterdir()} - {leader, undisturbed}
    resume_run(config, broken, make_serial)
    assert used(results, broken) == used(results, undisturbed) == (key_of(config), leader)
    assert trained(results, broken) == []
    assert_same_later(rows_of, results, undisturbed, broken)
