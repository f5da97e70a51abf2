"""Where reports and exports may be written: outside what runs have stored."""

from pathlib import Path

from fedloom.platform.results.files import check_writable, irregular
from fedloom.platform.results.names import ARTIFACTS
from fedloom.platform.results.remote import ABLATIONS
from fedloom.platform.results.tables import TABLES

SUPERNETS = "supernets"
STORED = (ARTIFACTS, ABLATIONS, SUPERNETS, *TABLES)
"""The folders below the results folder that hold what runs and ablations have stored."""


def output_folder(results: Path, out: Path | None, default: str) -> Path:
    """The folder `out`, or RESULTS/DEFAULT if it is None, after checking that files may be written there.

    Raises ValueError for a folder that cannot be written, and for one in which a reader of the results, or a check of
    their files, would find what is written.
    """
    if out is None:
        own = [Path(results, *Path(default).parts[: i + 1]) for i in range(len(Path(default).parts))]
        if linked := next((folder for folder in own if folder.is_symlink()), None):
            raise ValueError(f"{irregular(linked)}, or give --out")
        check_writable(Path(results) / default)
        return Path(results) / default
    place = Path(out).resolve()
    for name in STORED:
        stored = Path(results, name).resolve()
        if place.is_relative_to(stored):
            raise ValueError(
                f"--out {out} lies in {Path(results, name)}, which holds what runs have stored: choose a folder "
                f"elsewhere, such as {Path(results) / default}"
            )
    if place.exists() and not place.is_dir():
        raise ValueError(f"--out {out} is not a folder: choose a folder, such as {Path(results) / default}")
    check_writable(place, "--out")
    return Path(out)
