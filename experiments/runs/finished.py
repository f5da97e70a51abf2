"""Resuming a run that is done: nothing is computed, and at most its name and tags change."""

from fedloom.platform.federation.config import RunConfig
from fedloom.platform.results.copies import mirror_run
from fedloom.platform.results.manifest import Manifest
from fedloom.platform.results.paths import Names, RunPaths, read_names, run_paths, write_names
from fedloom.platform.results.status import StatusFile, says_done
from fedloom.platform.results.store import is_remote, local_root
from fedloom.platform.results.tables import TABLES, is_done
from fedloom.platform.results.writer import TableParts
from fedloom.platform.runs.run import check_name_is_free, owned_run


def is_finished(config: RunConfig, run_id: str) -> bool:
    """Whether the run is done, so that there is nothing to resume."""
    return is_done(_paths(config, run_id))


def leave_finished(config: RunConfig, run_id: str, *, take_over: bool = False) -> Names | None:
    """Gives a run that is done the configuration's name and tags, and completes its copy at the results' URL.

    Returns the name and tags if they are new.
    Raises OwnedError if another process does so at this moment.
    """
    paths = _paths(config, run_id)
    is_new = config.names != read_names(paths.artifacts)
    if not (is_new or is_remote(config.results)) and says_done(paths.status):
        return None  # nothing is written, no claim either
    with owned_run(config, paths, take_over=take_over) as ownership:
        is_renamed = config.names != read_names(paths.artifacts)
        if is_renamed:
            if config.names.name != read_names(paths.artifacts).name:
                check_name_is_free(paths.root, config)
            _rename(paths, config.names)
        if not says_done(paths.status):  # its process was killed before it wrote so, or the file was damaged since
            StatusFile(paths.status).write("done")
        mirror_run(config.results, paths, ownership)
    return config.names if is_renamed else None


def _rename(paths: RunPaths, names: Names) -> None:
    manifest = Manifest.of_run(paths)
    rows = TableParts(paths.table("runs"), TABLES["runs"], 1, manifest)
    rows.replace([{**rows.read_last().to_pylist()[0], **names.columns()}])
    manifest.settle()
    write_names(paths.artifacts, names)


def _paths(config: RunConfig, run_id: str) -> RunPaths:
    return run_paths(local_root(config.results), config.experiment, run_id)
