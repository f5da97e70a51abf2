"""Checks of everything that a run has stored, for `fedloom verify`."""

from dataclasses import asdict, dataclass
from functools import partial

from fedloom.experiments.terminal import console, write_json
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.feature_skew import original_of
from fedloom.platform.data.partition import prepared_for
from fedloom.platform.data.prepare import prepared_folder
from fedloom.platform.results.checkpoint import list_models, load_model, run_checkpoint
from fedloom.platform.results.files import as_stored, from_json, read_json
from fedloom.platform.results.manifest import has_hashed_checkpoint, lost_records, manifest_path, problems
from fedloom.platform.results.paths import NAMES, STATE_FILE, Names, RunPaths, read_names
from fedloom.platform.results.status import says_done
from fedloom.platform.results.tables import count_rows, is_done, read_runs, stored_parts
from fedloom.platform.results.writer import ROW_TABLES, journalled_rows
from fedloom.platform.runs.resuming import placed_here
from fedloom.platform.runs.run_files import changed_files, input_files, other_data, recorded_inputs
from fedloom.platform.runs.source_code import check_code_places


@dataclass(frozen=True)
class Verified:
    """The problems of a run's files, a line each, and remarks, such as on what could not be checked."""

    run_id: str
    problems: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


def verified(paths: RunPaths) -> Verified:
    """Checks a run's files, models, rows and prepared data against what was recorded about them; changes nothing."""
    lines: list[str] = []
    unchecked: list[str] = []
    for check in (problems, lost_records, _checkpoint, _end, _models, _names, partial(_inputs, unchecked=unchecked)):
        try:
            lines += check(paths)
        except ValueError as error:
            lines.append(str(error))
    remarks = [*unchecked]
    if not manifest_path(paths).exists() and not has_hashed_checkpoint(paths):
        has_checkpoint = as_stored(paths.checkpoint / STATE_FILE).exists()
        or_ended = "" if has_checkpoint else ", or it ended before its first checkpoint"
        remarks.insert(0, f"no manifest: an earlier version of fedloom wrote this run{or_ended}")
    return Verified(paths.run_id, tuple(dict.fromkeys(lines)), tuple(remarks))


def _checkpoint(paths: RunPaths) -> list[str]:
    state = as_stored(paths.checkpoint / STATE_FILE)
    if not state.exists():
        return []
    position = run_checkpoint(paths).data["position"]
    journalled = journalled_rows(paths.artifacts, position)
    lines = []
    for table in ROW_TABLES:
        stored = sum(count_rows(path) for path in stored_parts(paths.table(table)))
        counted = position.get(table, 0)
        lacking = set(range(stored, counted)) - journalled.get(table, {}).keys()
        if lacking:
            lines.append(
                f"table {table} of {paths.run_id} is short: the checkpoint counts {counted} rows, {stored} are in "
                f"{paths.table(table)} and {counted - stored - len(lacking)} in the journal"
            )
    return lines


def _end(paths: RunPaths) -> list[str]:
    if not says_done(paths.status) or is_done(paths):
        return []
    return [f"{paths.status} says done, the run's row does not: fedloom resume {paths.run_id} goes on with the run"]


def _models(paths: RunPaths) -> list[str]:
    lines = []
    for name in list_models(paths):
        try:
            load_model(paths, name)
        except ValueError as error:
            lines.append(str(error))
    return lines


def _names(paths: RunPaths) -> list[str]:
    rows = read_runs([paths], "runs", ["name", "tags"]).to_dict("records")
    name, tags = (rows[0][c] if rows and isinstance(rows[0][c], str) else None for c in ("name", "tags"))
    listed = from_json(tags or "[]", f"the list of tags of run {paths.run_id}")
    in_row, in_file = Names(name, tuple(listed)), read_names(paths.artifacts)
    if in_row == in_file:
        return []
    return [
        f"{paths.artifacts / NAMES} says {_as_overrides(in_file)}, the run's row {_as_overrides(in_row)}: `fedloom "
        f"resume {paths.run_id}` with the right name and tags corrects both"
    ]


def _inputs(paths: RunPaths, unchecked: list[str]) -> list[str]:
    """Compares data and input files with what the run recorded; adds to `unchecked` what is not on this machine.

    Reads all of the run's prepared data if its cache is on this machine.
    """
    try:
        config = placed_here(read_json(paths.config))
        data = DataConfig(**config["data"])
    except (OSError, ValueError, KeyError, TypeError):
        return []  # a run of an earlier version, or a damaged file that the manifest check reports
    check_code_places([config], paths.root)
    recorded = recorded_inputs(paths)
    if "partition_hash" not in recorded:
        return []  # it was killed before its first round
    prepared = prepared_for(data, recorded["partition_hash"])
    if prepared is not None:
        Dataset.open(prepared).verify()
    lines, files = changed_files(paths, recorded), input_files(config)
    unchecked += [line for text, line in lines.items() if text not in files]
    changed = [line for text, line in lines.items() if text in files]
    try:
        folder = prepared_folder(data)
    except ValueError as error:  # the originals, or the code that reads them, are elsewhere
        unchecked.append(f"its data was not compared: {error}")
        return changed
    # With feature skew, the run uses a skewed copy of the data set, which records its original.
    is_skewed = (data.noise, data.rotation) != (None, None)
    original = original_of(prepared) if is_skewed and prepared is not None else recorded.get("dataset_hash")
    if prepared is None and (is_skewed or not folder.is_dir() or "dataset_hash" not in recorded):
        unchecked.append("its data was not compared, as it is not prepared on this machine")
    elif folder != prepared and (not folder.is_dir() or Dataset.open(folder).hash != original):
        changed.append(other_data(paths, data.dataset))
    return changed


def _as_overrides(names: Names) -> str:
    return f"name={names.name or 'null'} tags=[{','.join(names.tags)}]"


def show_verified(runs: list[Verified], *, as_json: bool) -> None:
    """Prints a line per problem and a verdict line per run, or one JSON object."""
    if as_json:
        write_json({"runs": [{**asdict(run), "whole": run.whole} for run in runs]})
        return
    screen = console()
    for run in runs:
        for line in run.problems:
            screen.print(line)
        verdict = "whole" if run.whole else f"{len(run.problems)} problems"
        screen.print(f"run {run.run_id}: {'; '.join([verdict, *run.remarks])}")
