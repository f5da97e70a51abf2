"""A copy that stops at any moment is one that can be resumed from."""

import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from fedloom.platform.clients.execution import SerialExecutor
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import World
from fedloom.platform.results.checkpoint import load_checkpoint, save_checkpoint
from fedloom.platform.results.copies import Mirror, fetch
from fedloom.platform.results.manifest import FILE as MANIFEST, manifest_path, problems
from fedloom.platform.results.paths import find_run, run_paths
from fedloom.platform.results.store import local_root, open_target
from fedloom.platform.results.tables import read_table
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.runs.run import Watcher, resume_run, start_run
from fedloom.platform.spaces.slices import TensorGroup

Elastic = Callable[..., RunConfig]
Machine = Callable[[str], None]
Serial = Callable[[World], SerialExecutor]

FOUR_ROUNDS = {"train": {"rounds": 4}}


@dataclass(frozen=True)
class Moments:
    """A run that was copied after each of its rounds."""

    run_id: str
    rows: dict[str, pd.DataFrame]
    changes: list[tuple[str, str]]
    """What was done to the copy: uploads and deletions."""
    taken: list[Path]
    """The copy before each change, and after the last."""


@pytest.fixture(scope="module")
def moments(
    tmp_path_factory: pytest.TempPathFactory,
    cache_of: Callable[[Path, str], Path],
    elastic_config_in: Elastic,
    serial: Serial,
    watched: Any,
    stable_rows: Any,
) -> Moments:
    """A run whose copy is kept as it was at every moment; to be read and not to be changed."""
    folder = tmp_path_factory.mktemp("moments")
    bucket = folder / "bucket" / "results"
    taken: list[Path] = []
    targets: list[Any] = []
    mirrors: list[Mirror] = []

    def take(*_: str) -> None:
        taken.append(folder / "taken" / f"{len(taken):03}")
        if bucket.exists():
            shutil.copytree(bucket, taken[-1], copy_function=os.link)
        else:
            taken[-1].mkdir(parents=True)

    def started(run_id: str, _: str) -> None:
        targets.append(watched(f"file://{bucket}", take))
        mirrors.append(Mirror(targets[0], run_paths(root, config.experiment, run_id)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDLOOM_CACHE", str(cache_of(folder, "first")))
        root = folder / "results"
        config = elastic_config_in(root, **FOUR_ROUNDS)
        run_id = start_run(config, serial, Watcher(started, lambda _: mirrors[0].turn()))
    take()
    return Moments(run_id, stable_rows(root, run_id), targets[0].done, taken)


def test_every_moment_of_the_copy_can_be_resumed_from(
    moments: Moments,
    url: str,
    bucket: Path,
    machine: Machine,
    elastic_config: Elastic,
    serial: Serial,
    stable_rows: Any,
    assert_same_rows: Any,
) -> None:
    run_id = moments.run_id
    first_state = moments.changes.index(("upload", f"artifacts/{run_id}/checkpoint/state.json"))
    assert not any(what == "delete" and "/journal-" in name for what, name in moments.changes[:first_state])
    config = elastic_config(results=url, **FOUR_ROUNDS)
    resumable = moments.taken[first_state + 1 :]
    assert len(resumable) > 12
    for number, moment in enumerate(resumable):
        shutil.rmtree(bucket, ignore_errors=True)
        shutil.copytree(moment, bucket)
        machine(f"m{number}")
        root = fetch(url, [run_id])
        paths = find_run(root, run_id)
        assert problems(paths) == []
        position = load_checkpoint(paths.checkpoint).data["position"]
        assert position["rounds"] > 0
        if number % 5 == 3:
            resume_run(config, run_id, serial)
            assert_same_rows(stable_rows(root, run_id), moments.rows)
            assert_same_rows(stable_rows(bucket, run_id), moments.rows)
        else:
            RunWriter.resume(root, paths.experiment, run_id, position)


def test_what_refers_to_files_is_copied_after_them_and_nothing_is_deleted_before_its_successor(
    moments: Moments,
) -> None:
    changes, checkpoint = moments.changes, f"artifacts/{moments.run_id}/checkpoint"
    states = [i for i, change in enumerate(changes) if change == ("upload", f"{checkpoint}/state.json")]
    assert len(states) >= 4
    seen = []
    for before, state in pairwise(states):
        kinds = []
        for what, name in changes[before + 1 : state]:
            if Path(name).name == MANIFEST:
                continue  # announced first, and exact last
            kind = Path(name).suffix if Path(name).name != "status.json" else "status"
            if (what, kind) not in kinds:
                kinds.append((what, kind))
        seen.append(kinds)
    status, rows = ("upload", "status"), [("upload", ".parquet"), ("upload", ".jsonl"), ("delete", ".jsonl")]
    groups, dropped = ("upload", ".safetensors"), ("delete", ".safetensors")
    # The end of a turn, then rows, tensors and cards of the next, then its state.
    order = [status, dropped, *rows, ("upload", ".log"), groups, ("upload", ".json")]
    assert all(kinds == [kind for kind in order if kind in kinds] for kinds in seen), seen
    assert any({status, dropped, groups} <= set(kinds) for kinds in seen), seen


def test_a_copy_made_while_the_run_writes_is_always_one_that_can_be_resumed(
    url: str, bucket: Path, tmp_path: Path, machine: Machine
) -> None:
    root = local_root(url)
    writer = RunWriter.create(root, "e", "r1", flush_interval_s=0.002, rows_per_file=40)
    writer.manifest.begin()
    stopped = threading.Event()

    def write() -> None:
        saved, version = None, 0
        while not stopped.is_set():
            version += 1
            for client in range(3):
                writer.add("clients", round=version, client_id=client)
            writer.add("rounds", stage="s", round=version)
            position = writer.commit()
            groups = {"w": TensorGroup({"x": torch.full((100,), float(version))}, version)}
            saved = save_checkpoint(writer.paths.checkpoint, groups, {"position": position}, saved)
            mirror.checkpoint()

    writing = threading.Thread(target=write)
    mirror = Mirror(open_target(url), writer.paths)
    writing.start()
    rounds = []
    try:
        while len(rounds) < 12:
            if (files := mirror._take()) is None:
                continue
            mirror.turn(files)
            if not (bucket / "artifacts/r1/checkpoint/state.json").exists():
                continue
            copy = tmp_path / f"copy-{len(rounds)}"
            shutil.copytree(bucket, copy)
            checkpoint = load_checkpoint(copy / "artifacts/r1/checkpoint")
            assert manifest_path(run_paths(copy, "e", "r1")).exists()
            assert problems(run_paths(copy, "e", "r1")) == []
            RunWriter.resume(copy, "e", "r1", checkpoint.data["position"])
            rounds.append(read_table(copy, "rounds")["round"].tolist())
            assert rounds[-1] == list(range(1, checkpoint.groups["w"].version + 1))
    finally:
        stopped.set()
        writing.join()
    assert len(rounds[0]) < len(rounds[-1])
