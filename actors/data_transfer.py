"""Sends prepared data from the server's node to nodes that lack it, block by block through Ray's object store."""

import os
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import ray
from filelock import FileLock
from ray.exceptions import GetTimeoutError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fedloom.platform.data.artefact import (
    ByteArray,
    atomic_folder,
    hash_of_file,
    open_arrays,
    read_manifest,
    verify_arrays,
)
from fedloom.platform.data.config import machine_cache
from fedloom.platform.data.dataset import MANIFEST as DATASET
from fedloom.platform.data.partition import MANIFEST as PARTITION
from fedloom.platform.runs.logs import as_bytes
from fedloom.platform.words import naming

BLOCK_BYTES = 2**24
BLOCKS_AHEAD = 2
"""Blocks of one transfer in the object stores at a time, so that a data set of any size needs little memory."""

READERS = 8
"""Blocks that the server's node reads at a time, for all nodes together."""

ANSWER_TIMEOUT_S = 300.0
"""Seconds that an actor waits for one block: only a stalled network hits this limit, not a slow one."""


@dataclass(frozen=True)
class Origin:
    """The reader on the server's node, and the folders of the prepared data there."""

    reader: Any
    dataset_path: str
    partition_path: str


@dataclass(frozen=True)
class Offer:
    """The server's copy of an artefact: its hash, and the sizes of its files.

    The manifest holds the arrays' hashes, `sha256` those of the other files.
    """

    hash: str
    sizes_bytes: Mapping[str, int]
    sha256: Mapping[str, str]


class Sender(Protocol):
    """Reads the server's folders."""

    def offer(self, folder: str, manifest: str) -> Offer:
        """The server's copy of a folder; raises ValueError or OSError if the server does not have it either."""

    def blocks(self, path: str, size_bytes: int) -> Iterator[ByteArray]:
        """The content of a file, in blocks of at most `BLOCK_BYTES`."""


@dataclass(frozen=True)
class Fetched:
    """Where a node now has the data, and what was fetched: empty if another of its actors fetched it."""

    dataset_path: str
    partition_path: str
    what: str


def fetch(sender: Sender, server: Origin, dataset_path: str, partition_path: str) -> Fetched:
    """Fetches those of the two folders that are missing into this node's cache, unless they are there by now.

    The node's folders must have the server's hashes. Raises ValueError or OSError, saying what is wrong.
    """
    cache = machine_cache()
    dataset, dataset_bytes = _at_hand(sender, server.dataset_path, dataset_path, cache, DATASET)
    partition, partition_bytes = _at_hand(
        sender, server.partition_path, partition_path, cache / "partitions", PARTITION
    )
    sizes_bytes = {f"data set {dataset.name}": dataset_bytes, f"partition {partition.name}": partition_bytes}
    what = " and ".join(f"the {name} ({as_bytes(size)})" for name, size in sizes_bytes.items() if size)
    return Fetched(str(dataset), str(partition), what)


def _at_hand(sender: Sender, there: str, named: str, cache: Path, manifest: str) -> tuple[Path, int]:
    """The artefact's folder on this node, as given or in the node's cache, and the bytes received into it."""
    offer = sender.offer(there, manifest)
    here = Path(named) if Path(named).is_dir() else cache / Path(there).name
    size_bytes = _received(sender, offer, there, here, manifest)
    if (own_hash := read_manifest(here / manifest)["hash"]) != offer.hash:
        raise ValueError(f"{here} has the hash {own_hash:.16}, the server's {offer.hash:.16}: delete it")
    return here, size_bytes


def _received(sender: Sender, offer: Offer, there: str, here: Path, manifest: str) -> int:
    """Receives the folder `here` and returns its bytes; 0 if it exists, or once another process has made it."""
    if here.is_dir():
        return 0
    here.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(here.with_name(f".{here.name}.lock")):
        if here.is_dir():
            return 0
        size_bytes, free_bytes = sum(offer.sizes_bytes.values()), shutil.disk_usage(here.parent).free
        if size_bytes > free_bytes:
            raise ValueError(f"it takes {as_bytes(size_bytes)}, and {here.parent} has {as_bytes(free_bytes)} left")
        with atomic_folder(here) as temporary:
            for name, file_bytes in offer.sizes_bytes.items():
                path = temporary / name
                with naming(path), path.open("wb") as file:
                    for block in sender.blocks(str(Path(there, name)), file_bytes):
                        file.write(block.data)
                    file.flush()
                    os.fsync(file.fileno())
            _check(temporary, offer, manifest)
        return size_bytes


def _check(folder: Path, offer: Offer, manifest: str) -> None:
    try:
        described = read_manifest(folder / manifest)
        open_arrays(folder, described)
        verify_arrays(folder, described)
        is_same = all(hash_of_file(folder / name) == sha256 for name, sha256 in offer.sha256.items())
    except ValueError:  # its message is for where data is prepared
        is_same = False
    if not is_same:
        raise ValueError("what arrived does not have the recorded hashes")


# -- the server's node ------------------------------------------------------------------------------------------------


class DataReader:
    """Reads the prepared data on the server's node; as an actor, one process serves any number of nodes."""

    def offer(self, folder: str, manifest: str) -> Offer:
        """The `Offer` of a folder on this node; raises like `read_manifest`."""
        described = read_manifest(Path(folder, manifest))
        files = sorted(path for path in Path(folder).iterdir() if path.is_file() and not path.name.startswith("."))
        others = [path for path in files if path.stem not in described["files"]]
        return Offer(
            described["hash"],
            {path.name: path.stat().st_size for path in files},
            {path.name: hash_of_file(path) for path in others},
        )

    def block(self, path: str, offset_bytes: int, most_bytes: int) -> ByteArray:
        """A block of a file; an array, because Ray maps arrays into the receiver's memory."""
        return np.fromfile(path, dtype=np.uint8, count=most_bytes, offset=offset_bytes)


_RemoteReader: Any = ray.remote(DataReader)


def start_reader() -> Any:
    """A `DataReader` on this node, as an actor that ends with this process."""
    return _RemoteReader.options(
        num_cpus=0,
        max_concurrency=READERS,
        max_restarts=-1,
        max_task_retries=3,
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    ).remote()


class ServersNode:
    """A `Sender` that asks the server's reader; each block is an object in Ray's object store."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def offer(self, folder: str, manifest: str) -> Offer:
        offer: Offer = _got(self._reader.offer.remote(folder, manifest))
        return offer

    def blocks(self, path: str, size_bytes: int) -> Iterator[ByteArray]:
        ahead = deque[Any]()
        for offset_bytes in range(0, size_bytes, BLOCK_BYTES):
            ahead.append(self._reader.block.remote(path, offset_bytes, BLOCK_BYTES))
            if len(ahead) == BLOCKS_AHEAD:
                yield _got(ahead.popleft())
        while ahead:
            yield _got(ahead.popleft())


def _got(reference: Any) -> Any:
    try:
        return ray.get(reference, timeout=ANSWER_TIMEOUT_S)
    except GetTimeoutError:
        raise ValueError(f"no answer within {ANSWER_TIMEOUT_S:g} s") from None
    except RayTaskError as error:
        raise error.cause from None
