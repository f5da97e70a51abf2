"""Hashes of blocks of large arrays, so that a run notices changed data without reading all of it.

Small files are read whole and compared with the manifest of their data set. Of a large file the hash of some blocks,
from its first byte to its last, lies in a file beside the manifest: in the manifest it would change the data set's
hash, which partitions and results refer to. Only `Dataset.verify` reads all.
"""

import json
from hashlib import sha256
from pathlib import Path

from fedloom.platform.data.artefact import Fields, hash_of, hash_of_file

FILE = "blocks.json"
WHOLE_BYTES = 2**21
"""Files up to this size are read whole."""
BLOCKS, BLOCK_BYTES = 32, 2**16
"""2 MiB per file: two files take a few milliseconds, and about a hundred from a disk that has to seek."""
AGAIN = "delete its folder and prepare again"


def write_blocks(folder: Path) -> None:
    """Writes the hashes of the large arrays in a folder."""
    large = [path for path in sorted(folder.glob("*.npy")) if path.stat().st_size > WHOLE_BYTES]
    content: Fields = {"files": {path.stem: hash_of_blocks(path) for path in large}}
    (folder / FILE).write_text(json.dumps({**content, "hash": hash_of(content)}))


def check_blocks(folder: Path, manifest: Fields) -> None:
    """Raises ValueError naming the first array whose content was changed, as far as small files and blocks tell.

    Large arrays that an earlier version prepared have no hashes of blocks, and are not read.
    """
    blocks = _read(folder / FILE)
    for name, entry in manifest["files"].items():
        path = folder / f"{name}.npy"
        if entry["size_bytes"] <= WHOLE_BYTES:
            is_same = hash_of_file(path) == entry["sha256"]
        else:
            is_same = name not in blocks or hash_of_blocks(path) == blocks[name]
        if not is_same:
            raise ValueError(f"{path}: was changed after it was prepared; {AGAIN}")


def hash_of_blocks(path: Path) -> str:
    """SHA-256 (hex) of evenly spaced blocks of a file that is larger than they are together."""
    digest = sha256()
    with path.open("rb", buffering=0) as file:
        last = path.stat().st_size - BLOCK_BYTES
        for number in range(BLOCKS):
            file.seek(last * number // (BLOCKS - 1))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def _read(path: Path) -> dict[str, str]:
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
