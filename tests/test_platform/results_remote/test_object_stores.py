"""Results in object stores: S3 by a server of our own, and memory."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.fs as pafs
import pytest

from fedloom.platform.clients.execution import SerialExecutor
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import World
from fedloom.platform.results.checkpoint import load_checkpoint
from fedloom.platform.results.copies import check_results, fetch
from fedloom.platform.results.paths import find_run
from fedloom.platform.results.store import local_root, open_target
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import RunIdentity, Watcher, resume_run, start_run

Elastic = Callable[..., RunConfig]
Machine = Callable[[str], None]
Serial = Callable[[World], SerialExecutor]


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
    s3_url: str,
    copied: Any,
    machine: Machine,
    elastic_config: Elastic,
    serial: Serial,
    stable_rows: Any,
    assert_same_rows: Any,
) -> None:
    def interrupt() -> bool:
        return True

    config = elastic_config(results=s3_url)
    whole = stable_rows(copied.root, copied.run_id)  # of the same configuration, never interrupted
    with pytest.raises(RuntimeError, match="stopped after round 1"):
        start_run(config, serial, Watcher(should_stop=interrupt), RunIdentity(run_id="mine"))
    machine("b")
    resume_run(config, "mine", serial)
    machine("c")
    root = fetch(s3_url)
    assert_same_rows(stable_rows(root, "mine"), whole)
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


def test_a_bucket_that_is_not_there_is_refused(s3_url: str, machine: Machine) -> None:
    for look in (check_results, fetch):
        with pytest.raises(ValueError, match=r"s3://none/x\?region=\.\.\. .*no bucket none.*AWS_ACCESS_KEY_ID"):
            look("s3://none/x?region=us-east-1")
    assert not local_root("s3://none/x").exists()


def test_memory_is_a_filesystem_too(
    machine: Machine, elastic_config: Elastic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serial: Serial
) -> None:
    url = "fsspec+memory:///fedloom/results"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run_id = start_run(elastic_config(results=url), serial)
    assert not list((tmp_path / "here").iterdir()), "nothing of it goes to the disk but the local folder"
    machine("b")
    assert read_table(fetch(url, [run_id]), "runs")["status"].tolist() == ["done"]
