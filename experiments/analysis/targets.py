"""The cost of reaching a target: rounds, megabytes and simulated hours until a validation score reaches it."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from fedloom.experiments.analysis.rounds import convergence, is_own, megabytes, simulated_hours
from fedloom.experiments.analysis.settings import SEEDS, estimate_by_seed, seeds_of, settings_of
from fedloom.experiments.analysis.tables import (
    EVALUATION,
    METRIC,
    RUN_KEY,
    SEARCH,
    Tables,
    by_stage,
    configuration,
    real_rounds,
    requires,
    with_training,
)
from fedloom.platform.federation.stopping import reaches

TARGET_METRICS = (METRIC, "loss")

COSTS = ("rounds", "megabytes", "simulated_h")
"""The costs of reaching a target, as columns of `first_reached` and `to_target`."""

_STAGE = ["run_id", "stage"]


def first_reached(tables: Tables, target: float, metric: str = METRIC) -> pd.DataFrame:
    """One row per run and training stage with validation scores: whether a score reached the target, and at what cost.

    Columns: experiment, run_id, seeds (all of them as JSON), stage, kind, tier, evaluations (their number), best (of
    their scores), reached (whether a score is at least the target for accuracy, a share, or at most the target for
    loss); and up to the first such score: rounds (of the stage), megabytes (received and sent by all clients) and
    simulated_h, both since the run began: the method's earlier stages count, also the training of a supernet that
    another run shared with it, but not the stages of the same kind for other tiers. They are null where the target was
    not reached. A score is the mean of the server's scores, or of the clients' if the server has none, as for `stop.*`;
    nothing is interpolated. Raises ValueError for a metric other than accuracy and loss, and for an accuracy above 1.
    """
    if metric not in TARGET_METRICS:
        raise ValueError(f"there are no targets for {metric!r}: give one of {', '.join(TARGET_METRICS)}")
    requires(tables, "rounds", "evaluations")
    tables = with_training(tables)
    scores = _scores(tables, metric)
    if metric == METRIC and target > max(1, scores["score"].max()):  # a metric of one's own may be above 1
        raise ValueError(f"target={target:g}: accuracies are shares, at most 1: give 0.9 for 90 %")
    scores = scores.assign(reached=scores["score"].map(lambda value: reaches(metric, value, target)).astype(bool))
    stages = scores.groupby([*RUN_KEY, "stage", "kind", "tier"], sort=False)
    best = "min" if metric == "loss" else "max"
    frame = stages.agg(evaluations=("score", "count"), best=("score", best), reached=("reached", "any")).reset_index()
    first = scores[scores["reached"]].sort_values("rounds_done").drop_duplicates(_STAGE)
    first = first.rename(columns={"rounds_done": "rounds"})
    costs = megabytes(tables).merge(simulated_hours(tables), on=[*_STAGE, "rounds_done"])
    costs = costs.rename(columns={"rounds_done": "rounds"}).merge(_before(tables), on=_STAGE)
    for name in COSTS[1:]:
        costs[name] += costs[f"{name}_before"]
    first = first[[*_STAGE, "rounds"]].merge(costs[[*_STAGE, *COSTS]], on=[*_STAGE, "rounds"], how="left")
    frame = frame.merge(first, on=_STAGE, how="left").astype(dict.fromkeys(["best", *COSTS], "float64"))
    seeds = pd.Series([seeds_of(tables, str(run_id)) for run_id in frame["run_id"]], frame.index, dtype=object)
    columns = [*RUN_KEY, SEEDS, "stage", "kind", "tier", "evaluations", "best", "reached", *COSTS]
    return frame.assign(seeds=seeds)[columns]


def to_target(tables: Tables, target: float, metric: str = METRIC) -> pd.DataFrame:
    """One row per setting and training stage: how many of its runs reach the target, and at what cost.

    Columns: setting, experiment, kind, tier, runs (with such a stage), reached (how many of them reach it), best_mean;
    and for each of rounds, megabytes and simulated_h (see `first_reached`) NAME_n (seeds that reach it), NAME_mean,
    NAME_half_width (95 %, Student's t; null below three seeds) and NAME_values (a list, by seed). Means cover only the
    runs that reach the target, so they are too low for a setting in which some runs do not.
    """
    frame, rows = first_reached(tables, target, metric), []
    for setting in settings_of(tables):
        of_setting = frame[frame["run_id"].isin(setting.run_ids)]
        for (kind, tier), group in of_setting.groupby(["kind", "tier"], sort=False):
            names = {"setting": setting.name, "experiment": setting.experiment, "kind": kind, "tier": tier}
            rows.append({**names, **_over_seeds(group)})
    numbers = [f"{name}_{what}" for name in COSTS for what in ("n", "mean", "half_width", "values")]
    columns = ["setting", "experiment", "kind", "tier", "runs", "reached", "best_mean", *numbers]
    kinds = {f"{name}_{what}": "float64" for name in COSTS for what in ("mean", "half_width")}
    return pd.DataFrame(rows, columns=columns).astype(kinds)


def stop_targets(tables: Tables) -> list[tuple[str, float]]:
    """The distinct targets at which the runs were to stop (stop.metric, stop.target)."""
    stops: list[Mapping[str, Any]] = [configuration(tables, path.run_id).get("stop", {}) for path in tables.paths]
    known = [(str(stop["metric"]), float(stop["target"])) for stop in stops if stop.get("target") is not None]
    return list(dict.fromkeys(known))


def _over_seeds(rows: pd.DataFrame) -> dict[str, Any]:
    best = estimate_by_seed(rows["best"], rows[SEEDS])
    values: dict[str, Any] = {"runs": len(rows), "reached": int(rows["reached"].sum())}
    values["best_mean"] = best.mean if best else None
    for name in COSTS:
        known = estimate_by_seed(rows[name], rows[SEEDS])
        values[f"{name}_n"] = known.runs if known else 0
        values[f"{name}_mean"] = known.mean if known else None
        values[f"{name}_half_width"] = known.half_width if known else None
        values[f"{name}_values"] = list(known.values) if known else []
    return values


def _scores(tables: Tables, metric: str) -> pd.DataFrame:
    """The mean validation scores of every training stage: the server's, or the clients' if the server has none.

    Columns: experiment, run_id, stage, kind, tier, rounds_done, score.
    """
    curves = convergence(tables)
    columns = [*RUN_KEY, "stage", "kind", "tier", "rounds_done", "score"]
    values = {"metric" if metric == METRIC else metric: "score"}
    of_server = curves[curves["series"] == "validation"].rename(columns=values).dropna(subset="score")
    rows = by_stage(tables.evaluations).rename(columns={"stage_tier": "tier_of_stage"})
    rows = rows[rows["client_id"].notna() & (rows["split"] == "validation") & (rows["metric"] == metric)]
    rows = rows[~rows["kind"].isin([SEARCH, EVALUATION])].dropna(subset="value")
    # A client scores its own model after the round.
    rows = rows.assign(rounds_done=rows["round"] + 1, tier=rows["tier_of_stage"])
    means = rows.groupby([*RUN_KEY, "stage", "kind", "tier", "rounds_done"], sort=False)["value"].mean()
    of_clients = means.rename("score").reset_index()
    scored = set(zip(of_server["run_id"], of_server["stage"], strict=True))
    alone = [key not in scored for key in zip(of_clients["run_id"], of_clients["stage"], strict=True)]
    parts = [of_server[columns], of_clients.loc[alone, columns]]
    both = pd.concat([part for part in parts if len(part)] or parts, ignore_index=True)
    return both.astype({"rounds_done": "int64", "score": "float64"})


def _before(tables: Tables) -> pd.DataFrame:
    """The cost of the method's stages before each stage, without those of the stage's own kind; 0 for a baseline.

    Columns: run_id, stage, megabytes_before, simulated_h_before.
    """
    rounds = by_stage(real_rounds(tables.rounds))
    rounds = rounds.assign(
        own=is_own(rounds),
        megabytes=(rounds["bytes_down"] + rounds["bytes_up"]) / 1e6,
        simulated_h=rounds["simulated_s"] / 3600,
    )
    sums = {"own": ("own", "first"), **{name: (name, "sum") for name in COSTS[1:]}}
    stages = rounds.groupby([*_STAGE, "kind"], sort=False).agg(**sums).reset_index()
    before = []
    for run_id, of_run in stages.groupby("run_id", sort=False):
        for number, stage in enumerate(of_run.to_dict("records")):
            others = of_run.iloc[: number if stage["own"] else 0]
            earlier = others[others["own"] & others["kind"].ne(stage["kind"])]
            sums_before = (float(earlier[name].sum()) for name in COSTS[1:])
            before.append((run_id, stage["stage"], *sums_before))
    return pd.DataFrame(before, columns=[*_STAGE, *(f"{name}_before" for name in COSTS[1:])])
