"""Artefacts: folders of arrays that are written atomically, once, together with the hash of their content."""

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from fedloom.platform.words import naming

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
ByteArray = npt.NDArray[np.uint8]
AnyArray = npt.NDArray[Any]
Fields = dict[str, Any]
"""The fields of a JSON file."""

FORMAT = 1
ABANDONED_AFTER_S = 24 * 3600.0
AGAIN = "delete its folder and prepare again"


def hash_of(fields: Fields) -> str:
    """SHA-256 (hex) of the fields in canonical JSON."""
    return sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def hash_of_file(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """A temporary folder beside `final`, renamed to `final` when the block ends and deleted if it raises.

    If several processes prepare the same folder, the first one to finish wins and the others' folders are deleted.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    # A killed process leaves its folder behind. Recent folders may belong to a process that is still writing.
    for folder in final.parent.glob(f".{final.name}.*.tmp"):
        with suppress(FileNotFoundError):
            if time.time() - folder.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(folder, ignore_errors=True)
    temporary = final.parent / f".{final.name}.{uuid4().hex}.tmp"
    temporary.mkdir()
    try:
        yield temporary
        _fsync(temporary)
        try:
            temporary.rename(final)
        except OSError:
            if not final.is_dir():
                raise
        _fsync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_array(path: Path, pieces: Iterable[AnyArray], length: int) -> AnyArray:
    """Writes an array of this length piece by piece, with the bytes of `np.save`; returns it memory-mapped."""
    with naming(path), path.open("wb") as file:
        shape: tuple[int, ...] = ()
        for piece in pieces:
            if not shape:
                shape, descr = (length, *piece.shape[1:]), np.lib.format.dtype_to_descr(piece.dtype)
                header = {"descr": descr, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
            # Not by NumPy, whose error for a full disk says only how many values were written.
            file.write(np.ascontiguousarray(piece).data)
        file.flush()
        os.fsync(file.fileno())
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def write_artefact(folder: Path, manifest: str, fields: Fields, arrays: Mapping[str, AnyArray]) -> None:
    """Writes every array as NAME.npy, and the manifest: the fields, each file's hash, and the hash of all of these.

    Arrays whose file `write_array` has already written are only listed.
    """
    files: Fields = {}
    for name, array in arrays.items():
        path = folder / f"{name}.npy"
        if not path.is_file():
            write_array(path, [array], len(array))
        described = {"dtype": str(array.dtype), "shape": list(array.shape)}
        files[name] = {**described, "size_bytes": path.stat().st_size, "sha256": hash_of_file(path)}
    content = {"format": FORMAT, **fields, "files": files}
    with naming(folder / manifest), (folder / manifest).open("w") as text:
        json.dump({**content, "hash": hash_of(content)}, text, indent=1)
        text.flush()
        os.fsync(text.fileno())


def read_manifest(path: Path) -> Fields:
    """The manifest's fields.

    Raises ValueError naming the file if it is missing, of another format, or was changed.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: not found; prepare the data first") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); {AGAIN}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path}: expected format {FORMAT}; {AGAIN}")
    recorded = content.get("hash")
    if hash_of({k: v for k, v in content.items() if k != "hash"}) != recorded:
        raise ValueError(f"{path}: was changed after it was written; {AGAIN}")
    return content


def open_arrays(folder: Path, manifest: Fields) -> dict[str, AnyArray]:
    """The manifest's arrays, memory-mapped read-only.

    Raises ValueError naming the file whose size, dtype or shape differs from the manifest. Contents are not read.
    """
    arrays: dict[str, AnyArray] = {}
    for name, entry in manifest["files"].items():
        path = folder / f"{name}.npy"
        if not path.is_file():
            raise ValueError(f"{path}: not found; {AGAIN}")
        size_bytes = path.stat().st_size
        if size_bytes != entry["size_bytes"]:
            raise ValueError(f"{path}: {size_bytes} bytes, expected {entry['size_bytes']}; {AGAIN}")
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise ValueError(f"{path}: not a NumPy array ({error}); {AGAIN}") from None
        if str(array.dtype) != entry["dtype"] or list(array.shape) != entry["shape"]:
            expected = f"{entry['dtype']} {tuple(entry['shape'])}"
            raise ValueError(f"{path}: {array.dtype} {array.shape}, expected {expected}; {AGAIN}")
        # A plain array view of the map, because indexing the subclass np.memmap is slower on every access.
        arrays[name] = np.asarray(array)
    return arrays


def verify_arrays(folder: Path, manifest: Fields) -> None:
    """Reads every array file; raises ValueError naming the first whose SHA-256 differs from the manifest."""
    for name, entry in manifest["files"].items():
        path = folder / f"{name}.npy"
        if hash_of_file(path) != entry["sha256"]:
            raise ValueError(f"{path}: SHA-256 differs from the recorded one; {AGAIN}")


# -- hashes of blocks -------------------------------------------------------------------------------------------------
# A run notices changed data without reading all of it: small files are read whole and compared with the manifest of
# their data set; for large files the hashes of blocks, from the first byte to the last, are stored in a file beside the
# manifest: in the manifest they would change the data set's hash, which partitions and results refer to. Only
# `Dataset.verify` reads everything.

BLOCKS_FILE = "blocks.json"
WHOLE_BYTES = 2**21
"""Files up to this size are read whole."""
BLOCKS, BLOCK_BYTES = 32, 2**16
"""2 MiB per file: reading those of two files takes a few milliseconds, or about a hundred on a disk that seeks."""


def write_blocks(folder: Path) -> None:
    """Writes the block hashes of the large arrays in a folder."""
    large = [path for path in sorted(folder.glob("*.npy")) if path.stat().st_size > WHOLE_BYTES]
    content: Fields = {"files": {path.stem: hash_of_blocks(path) for path in large}}
    (folder / BLOCKS_FILE).write_text(json.dumps({**content, "hash": hash_of(content)}))


def check_blocks(folder: Path, manifest: Fields) -> None:
    """Raises ValueError naming the first array whose content was changed, as far as small files and blocks show.

    Large arrays that an earlier version prepared have no block hashes, and are not checked.
    """
    blocks = _read_blocks(folder / BLOCKS_FILE)
    for name, entry in manifest["files"].items():
        path = folder / f"{name}.npy"
        if entry["size_bytes"] <= WHOLE_BYTES:
            is_same = hash_of_file(path) == entry["sha256"]
        else:
            is_same = name not in blocks or hash_of_blocks(path) == blocks[name]
        if not is_same:
            raise ValueError(f"{path}: was changed after it was prepared; {AGAIN}")


def hash_of_blocks(path: Path) -> str:
    """SHA-256 (hex) of evenly spaced blocks of a file, which must be larger than all of them together."""
    digest = sha256()
    with path.open("rb", buffering=0) as file:
        last = path.stat().st_size - BLOCK_BYTES
        for number in range(BLOCKS):
            file.seek(last * number // (BLOCKS - 1))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def _read_blocks(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text())
        recorded = content.pop("hash")
        if hash_of(content) != recorded:
            raise ValueError("its hash is another")
        return dict(content["files"])
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: was changed after it was written ({error}); {AGAIN}") from None
