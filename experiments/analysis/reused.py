"""Adds the rows of a supernet's training to the runs that reused the supernet."""

from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from fedloom.experiments.analysis.stages import TRAINING, by_stage
from fedloom.experiments.analysis.tables import Tables, read_table_of
from fedloom.platform.results.paths import RunPaths, runs_called


def with_training(tables: Tables) -> Tables:
    """Adds the rows of the supernet's training to the tables of runs that started from a trained supernet.

    The rows of `rounds` and `evaluations` of the run that trained it (`supernet_run_id`) are copied under the id of the
    run that reused it, so that curves start where the training started and costs are those of a run that shares no
    supernet. If the run that trained the supernet was deleted, no rows are added.
    """
    sources = _sources(tables)
    if not sources:
        return tables
    known = {p.run_id: [p] for p in tables.paths}
    experiments = {p.run_id: p.experiment for p in tables.paths}
    root = tables.paths[0].root
    trained = [p for r in dict.fromkeys(sources.values()) for p in (known.get(r) or runs_called(root, r))[-1:]]

    def joined(name: str, frame: pd.DataFrame) -> pd.DataFrame:
        copies = _copies(name, trained, sources, experiments) if name in tables.read else []
        return pd.concat([*copies, frame], ignore_index=True) if copies else frame

    return replace(
        tables, rounds=joined("rounds", tables.rounds), evaluations=joined("evaluations", tables.evaluations)
    )


def _sources(tables: Tables) -> dict[str, str]:
    """For each run that reused a supernet, the run that trained it."""
    rows = tables.runs[tables.runs["supernet_run_id"].notna()]
    pairs = {str(r.run_id): str(r.supernet_run_id) for r in rows.itertuples()}
    stages = tables.rounds["stage"].astype(object)
    own = set(tables.rounds.loc[stages == TRAINING, "run_id"])
    return {run: source for run, source in pairs.items() if run != source and run not in own}


def _copies(
    name: str, trained: list[RunPaths], sources: Mapping[str, str], experiments: Mapping[str, str]
) -> list[pd.DataFrame]:
    """The rows of a supernet's training, one copy per run that reused it."""
    rows = by_stage(read_table_of(trained, name))
    rows = rows[rows["kind"] == TRAINING].drop(columns=["kind", "stage_tier"])
    by_source = {str(run_id): group for run_id, group in rows.groupby("run_id", sort=False)}
    return [
        by_source[source].assign(run_id=run, experiment=experiments[run])
        for run, source in sources.items()
        if source in by_source
    ]
