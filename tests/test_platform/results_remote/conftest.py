"""Machines that share results at a URL, targets that tell of every change, and a run with its copy."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import pandas as pd
import pytest

from fedloom.platform.clients.execution import SerialExecutor
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import World
from fedloom.platform.results.status import StatusFile
from fedloom.platform.results.store import Target, local_root, open_target
from fedloom.platform.results.writer import RunWriter
from fedloom.platform.runs.run import make_serial, start_run

Serial = Callable[[World], SerialExecutor]
Rows = dict[str, pd.DataFrame]


@pytest.fixture(scope="session")
def cache_of(own_cache: Path) -> Callable[[Path, str], Path]:
    """Makes the cache of a machine of this name in a folder, where the machine has not got one yet."""

    def make(folder: Path, machine: str) -> Path:
        cache = folder / f"cache-{machine}"
        cache.mkdir(exist_ok=True)
        for prepared in own_cache.iterdir():  # data need not be prepared on every machine anew
            if prepared.name != "results" and not (cache / prepared.name).exists():
                (cache / prepared.name).symlink_to(prepared)
        return cache

    return make


@pytest.fixture
def machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_of: Callable[[Path, str], Path]
) -> Callable[[str], None]:
    """Goes to a machine of this name: it has a results cache of its own. The test begins on machine a."""

    def go(name: str) -> None:
        monkeypatch.setenv("FEDLOOM_CACHE", str(cache_of(tmp_path, name)))

    go("a")
    return go


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """The folder of `url`; not there before something is written to it."""
    return tmp_path / "bucket" / "results"


@pytest.fixture
def url(bucket: Path) -> str:
    """Results on pyarrow's own local filesystem."""
    return f"file://{bucket}"


@pytest.fixture(scope="session")
def serial() -> Serial:
    """Trains clients in this process."""
    return make_serial


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


@pytest.fixture(scope="session")
def watched() -> Callable[..., Watched]:
    """Opens a URL whose changes are told of."""

    def watch(url: str, before: Callable[[str, str], None] = lambda *_: None) -> Watched:
        target = open_target(url)
        return Watched(target.filesystem, target.base, target.url, before)

    return watch


@pytest.fixture
def small_run(url: str, machine: Callable[[str], None]) -> Callable[..., RunWriter]:
    """Writes a run of a few rows on this machine, without training."""

    def write(run_id: str = "r1") -> RunWriter:
        writer = RunWriter.create(local_root(url), "e", run_id)
        writer.add("rounds", stage="s", round=0)
        writer.close()
        StatusFile(writer.paths.status).write("done")
        return writer

    return write


@dataclass(frozen=True)
class Copied:
    """A finished run on the machine that made it, and its copy at a URL."""

    run_id: str
    url: str
    root: Path
    bucket: Path


@pytest.fixture(scope="session")
def copied(
    tmp_path_factory: pytest.TempPathFactory,
    cache_of: Callable[[Path, str], Path],
    elastic_config_in: Callable[..., RunConfig],
    serial: Serial,
) -> Copied:
    """A run with results at a URL, made on a machine where no test is; to be read and not to be changed."""
    folder = tmp_path_factory.mktemp("copied")
    bucket = folder / "bucket" / "results"
    url = f"file://{bucket}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDLOOM_CACHE", str(cache_of(folder, "first")))
        return Copied(start_run(elastic_config_in(url), serial), url, local_root(url), bucket)
