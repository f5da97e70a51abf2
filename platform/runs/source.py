"""A hash of the science's own source."""

from functools import cache
from hashlib import sha256
from pathlib import Path


@cache
def source_hash() -> str:
    """A hash of the science's own source: workers and driver must run the same.

    Read once per process: an edit after that changes the files, not the code that this process runs.
    """
    here = Path(__file__).resolve().parent.parent
    digest = sha256()
    for folder in (here, here.parent / "tiers"):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
