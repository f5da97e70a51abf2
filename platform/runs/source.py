"""The hash of fedloom's source and a run's plug-ins."""

from functools import cache
from hashlib import sha256
from pathlib import Path

from fedloom.platform.runs.plugin_sources import PluginSources

DIGITS = 16


def source_hash(plugins: PluginSources | None = None) -> str:
    """The hash of the source of platform and tiers, and of the plug-ins if there are any.

    Workers and driver must run the same source. Fedloom's files are read once per process, because later edits do not
    change the code that this process runs.
    """
    if plugins is None or not plugins.files:
        return _own()
    return sha256(f"{_own()} {plugins.hash}".encode()).hexdigest()[:DIGITS]


@cache
def _own() -> str:
    here = Path(__file__).resolve().parent.parent
    digest = sha256()
    for folder in (here, here.parent / "tiers"):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:DIGITS]
