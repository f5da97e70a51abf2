"""The copy of a run is the run: it is read on another machine, and made of a run that fails, too."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pyarrow.dataset
import pyarrow.fs as pafs
import pytest

from fedloom.platform.clients.execution import SerialExecutor
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import World
from fedloom.platform.results.copies import Mirror, fetch
from fedloom.platform.results.paths import find_run
from fedloom.platform.results.status import read_status
from fedloom.platform.results.store import local_root
from fedloom.platform.results.tables import TABLES, read_table
from fedloom.platform.runs.run import RunIdentity, make_serial, start_run

Elastic = Callable[..., RunConfig]
Machine = Callable[[str], None]
Serial = Callable[[World], SerialExecutor]


def test_the_copy_of_a_run_is_the_run(copied: Any) -> None:
    here, there = (
        {p.relative_to(folder): p.read_bytes() for p in folder.rglob("[!.]*") if p.is_file()}
        for folder in (copied.root, copied.bucket)
    )
    assert here == there
    assert json.loads(there[Path("artifacts", copied.run_id, "config.json")])["results"] == copied.url
    assert read_table(copied.bucket, "runs")["status"].tolist() == ["done"]


def test_more_tensors_than_a_process_may_have_open_files_are_copied(
    url: str, machine: Machine, elastic_config: Elastic, monkeypatch: pytest.MonkeyPatch, bucket: Path
) -> None:
    monkeypatch.setattr("fedloom.platform.results.copies.resource.getrlimit", lambda _: (0, 0))
    run_id = start_run(elastic_config(results=url), make_serial)
    tensors = [{p.name for p in root.rglob("*.safetensors")} for root in (local_root(url), bucket)]
    assert tensors[0] == tensors[1] != set()
    assert read_table(bucket, "runs", run_id=run_id)["status"].tolist() == ["done"]


def test_two_checkpoints_of_many_tensors_leave_the_run_half_of_its_open_files(
    url: str, machine: Machine, small_run: Any, watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 400
    monkeypatch.setattr("fedloom.platform.results.copies.resource.getrlimit", lambda _: (most, most))
    paths = small_run().paths
    paths.checkpoint.mkdir()
    for index in range(most):
        (paths.checkpoint / f"w-v{index}.safetensors").touch()
    process, opened = psutil.Process(), list[int]()
    before = process.num_fds()

    def next_checkpoint(kind: str, name: str) -> None:
        if not opened:
            mirror.checkpoint()
            opened.append(process.num_fds() - before)
            raise OSError("enough")

    mirror = Mirror(watched(url, next_checkpoint), paths)
    with pytest.raises(OSError, match="enough"):
        mirror.turn()
    others = 2 * (len(TABLES) + 1)  # the tables and the status are always opened
    assert 0 < opened[0] <= most // 2 + others
    mirror.turn(mirror._take())
    assert process.num_fds() == before


def test_a_copy_is_read_on_another_machine_by_fedloom_and_by_pyarrow_alone(copied: Any, machine: Machine) -> None:
    expected = read_table(copied.root, "rounds")
    root = fetch(copied.url, tensors=False)
    assert root == local_root(copied.url) != copied.root
    pd.testing.assert_frame_equal(read_table(root, "rounds"), expected)
    assert read_status(find_run(root, copied.run_id).status).state == "done"
    assert list(root.rglob("*.safetensors")) == []
    assert len(pd.read_parquet(f"{copied.url}/rounds")) == len(expected)
    filesystem, path = pafs.FileSystem.from_uri(f"{copied.url}/clients")
    rows = pyarrow.dataset.dataset(path, filesystem=filesystem, partitioning="hive").to_table()
    assert set(rows.column("run_id").to_pylist()) == {copied.run_id}


def test_a_run_that_fails_is_copied_too(
    url: str, machine: Machine, elastic_config: Elastic, monkeypatch: pytest.MonkeyPatch, bucket: Path
) -> None:
    def fail(_: World) -> SerialExecutor:
        raise RuntimeError("no workers today")

    with pytest.raises(RuntimeError, match="no workers today"):
        start_run(elastic_config(results=url), fail)
    assert read_table(bucket, "runs")[["status", "error"]].values.tolist() == [["failed", "no workers today"]]


def test_an_id_that_is_used_at_the_url_is_refused_on_another_machine(
    copied: Any, machine: Machine, elastic_config: Elastic, serial: Serial
) -> None:
    with pytest.raises(ValueError, match=f"run '{copied.run_id}' exists"):
        start_run(elastic_config(results=copied.url), serial, identity=RunIdentity(run_id=copied.run_id))
