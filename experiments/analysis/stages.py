"""Stages and their rounds: which of them train, and which rows of `rounds` are rounds of training."""

import pandas as pd

TRAINING = "supernet"
"""The kind of the stage that trains a supernet, which runs may share."""

ALONE = "alone"
"""The kind of the stages that train a subnet without a supernet, and the model that comes of it."""

SEARCH, EVALUATION, GAINS = "search", "evaluation", "gains"
MEASUREMENTS = (EVALUATION, GAINS)
"""Kinds of stages that are no part of what a method itself sends: they measure what it has trained."""


def by_stage(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with the stage's `kind` and `stage_tier`: "search/tier2" is of kind search, for tier2."""
    # There are few stages, and up to millions of rows.
    parts = {stage: stage.partition("/") for stage in frame["stage"].dropna().unique()}
    kinds = frame["stage"].map({stage: part[0] for stage, part in parts.items()}).astype(object)
    tiers = frame["stage"].map({stage: part[2] for stage, part in parts.items()}).astype(object)
    return frame.assign(kind=kinds, stage_tier=tiers)


def real_rounds(rounds: pd.DataFrame) -> pd.DataFrame:
    """The rows of `rounds` without those in which a training stage only scored the weights of its last round.

    Such a row comes after the stage's last round of training, and no client was planned for it.
    """
    trains = ~by_stage(rounds)["kind"].isin([SEARCH, *MEASUREMENTS])
    last = rounds["round"] == rounds.groupby(["run_id", "stage"])["round"].transform("max")
    only_scored = trains & last & (rounds["clients_planned"] == 0)
    return rounds[~only_scored.fillna(False).astype(bool)]


def rounds_by_stage(rounds: pd.DataFrame) -> dict[tuple[str, str], int]:
    """Per (run, stage), in their order, how many rounds it has gone through."""
    last = real_rounds(rounds).groupby(["run_id", "stage"], sort=False, as_index=False)["round"].max()
    return {(str(row.run_id), str(row.stage)): int(row.round) + 1 for row in last.itertuples()}
