"""Kinds of stages, and the rounds of each stage."""

import pandas as pd

TRAINING = "supernet"
"""The kind of the stage that trains a supernet; several runs may share the supernet."""

ALONE = "alone"
"""The kind of the stages that train a subnet without a supernet, and the name of the resulting model."""

SEARCH, EVALUATION, GAINS = "search", "evaluation", "gains"
MEASUREMENTS = (EVALUATION, GAINS)
"""Kinds of stages that measure trained models and do not count as communication of the method itself."""


def by_stage(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with the columns `kind` and `stage_tier`: stage "search/tier2" has kind "search" and tier "tier2"."""
    # Parses each of the few stages once, since there may be millions of rows.
    parts = {stage: stage.partition("/") for stage in frame["stage"].dropna().unique()}
    kinds = frame["stage"].map({stage: part[0] for stage, part in parts.items()}).astype(object)
    tiers = frame["stage"].map({stage: part[2] for stage, part in parts.items()}).astype(object)
    return frame.assign(kind=kinds, stage_tier=tiers)


def real_rounds(rounds: pd.DataFrame) -> pd.DataFrame:
    """The rows of `rounds` without those in which a training stage only scored its final weights.

    Such a row follows the stage's last training round and has no planned clients.
    """
    trains = ~by_stage(rounds)["kind"].isin([SEARCH, *MEASUREMENTS])
    last = rounds["round"] == rounds.groupby(["run_id", "stage"])["round"].transform("max")
    only_scored = trains & last & (rounds["clients_planned"] == 0)
    return rounds[~only_scored.fillna(False).astype(bool)]


def rounds_by_stage(rounds: pd.DataFrame) -> dict[tuple[str, str], int]:
    """Number of finished rounds by (run, stage), in the order of the rows."""
    last = real_rounds(rounds).groupby(["run_id", "stage"], sort=False, as_index=False)["round"].max()
    return {(str(row.run_id), str(row.stage)): int(row.round) + 1 for row in last.itertuples()}
