"""Frames of rounds: communication and compute per stage, loss and accuracy, and validation accuracy over steps."""

from collections.abc import Callable, Mapping

import pandas as pd

from fedloom.experiments.analysis.tables import (
    ALONE,
    EVALUATION,
    MEASUREMENTS,
    METRIC,
    RUN_KEY,
    SEARCH,
    TRAINING,
    Tables,
    by_stage,
    real_rounds,
    requires,
    rounds_by_stage,
    where,
)


def communication(tables: Tables) -> pd.DataFrame:
    """Communication and compute per (run, stage), in the stages' order.

    Columns: experiment, run_id, stage, kind, tier, rounds, clients (tasks), bytes_down, bytes_up, macs, simulated_s,
    wall_s. Bytes are the totals that all clients received and sent; MACs are those of forward passes. Source: FedorAS,
    Tab. 17 and 18.
    """
    requires(tables, "rounds")
    rounds = by_stage(real_rounds(tables.rounds)).rename(columns={"stage_tier": "tier"})
    grouped = rounds.groupby([*RUN_KEY, "stage", "kind", "tier"], sort=False)
    sums = {name: (name, "sum") for name in ("bytes_down", "bytes_up", "macs", "simulated_s", "wall_s")}
    return grouped.agg(rounds=("round", "count"), clients=("clients_planned", "sum"), **sums).reset_index()


def communication_by_kind(frame: pd.DataFrame) -> pd.DataFrame:
    """`communication` summed over tiers, with a row of kind "method" per run: the total of the method itself.

    The total excludes the rand-init baseline of a supernet, the final evaluation and personalisation gains.
    """
    values = ["rounds", "clients", "bytes_down", "bytes_up", "macs", "simulated_s", "wall_s"]
    kinds = frame.groupby([*RUN_KEY, "kind"], sort=False)[values].sum().reset_index()
    of_method = kinds[is_own(kinds)]
    total = of_method.groupby(RUN_KEY, sort=False)[values].sum().reset_index().assign(kind="method")
    return pd.concat([kinds, total[kinds.columns]], ignore_index=True)


def is_own(frame: pd.DataFrame) -> "pd.Series[bool]":
    """Which rows belong to the method itself; rand_init belongs to it if the run trains no supernet or slice of one."""
    with_supernet = set(frame.loc[frame["kind"].isin([TRAINING, "fine_tuned"]), "run_id"])
    baseline = (frame["kind"] == "rand_init") & frame["run_id"].isin(with_supernet)
    return ~(baseline | frame["kind"].isin(MEASUREMENTS))


def convergence(tables: Tables) -> pd.DataFrame:
    """Loss and metric over the finished rounds of each stage, in long form with the column `series`.

    Columns: experiment, run_id, stage, kind, tier (empty for the supernet), series, rounds_done, loss, metric.
    "train" is what the clients of a round report during training (mean weighted by samples), at the end of the round.
    "validation" is measured by the server with the weights after `rounds_done` rounds; for the supernet it is the mean
    over the evaluated paths. After a stage's last round the values are the stage's own scores or, without any, those
    of the final evaluation.
    """
    requires(tables, "rounds", "evaluations")
    rounds = by_stage(real_rounds(tables.rounds))
    rounds = rounds[rounds["loss"].notna() & ~rounds["kind"].isin([SEARCH, EVALUATION])]
    train = rounds.assign(series="train", rounds_done=rounds["round"] + 1, tier=rounds["stage_tier"])
    columns = [*RUN_KEY, "stage", "kind", "tier", "series", "rounds_done", "loss", "metric"]
    parts = [train[columns], _validation(tables)[columns]]
    return pd.concat([p.astype({"rounds_done": "int64"}) for p in parts if len(p)] or parts, ignore_index=True)


def simulated_hours(tables: Tables) -> pd.DataFrame:
    """Cumulative simulated hours at the end of each round of a stage; a round takes as long as its slowest client.

    Columns: run_id, stage, rounds_done, simulated_h. Raises ValueError without the table `rounds`.
    """
    return _since_the_beginning(tables, "simulated_h", lambda rounds: rounds["simulated_s"] / 3600)


def megabytes(tables: Tables) -> pd.DataFrame:
    """Cumulative megabytes that all clients received and sent, at the end of each round of a stage.

    Columns: run_id, stage, rounds_done, megabytes. Raises ValueError without the table `rounds`.
    """
    return _since_the_beginning(tables, "megabytes", lambda rounds: (rounds["bytes_down"] + rounds["bytes_up"]) / 1e6)


def _since_the_beginning(
    tables: Tables, name: str, of_rounds: Callable[[pd.DataFrame], "pd.Series[float]"]
) -> pd.DataFrame:
    requires(tables, "rounds")
    rounds = real_rounds(tables.rounds).sort_values(["run_id", "stage", "round"])
    sums = of_rounds(rounds).groupby([rounds["run_id"], rounds["stage"]]).cumsum()
    done = rounds.assign(rounds_done=(rounds["round"] + 1).astype("int64"), **{name: sums})
    begin = done.drop_duplicates(["run_id", "stage"]).assign(rounds_done=0, **{name: 0.0})
    columns = ["run_id", "stage", "rounds_done", name]
    return pd.concat([begin[columns], done[columns]], ignore_index=True)


def _validation(tables: Tables) -> pd.DataFrame:
    rows = by_stage(tables.evaluations)
    rows = rows[rows["client_id"].isna() & (rows["split"] == "validation") & (rows["kind"] != SEARCH)]
    in_stages = rows[rows["kind"] != EVALUATION].assign(rounds_done=lambda r: r["round"])
    final = _at_the_end(rows[rows["kind"] == EVALUATION], in_stages, rounds_by_stage(tables.rounds))
    rows = by_stage(pd.concat([in_stages, final], ignore_index=True))
    index = [*RUN_KEY, "stage", "kind", "stage_tier", "rounds_done"]
    table = rows.pivot_table(index=index, columns="metric", values="value", aggfunc="mean", sort=False)
    wide = table.reindex(columns=["loss", METRIC]).reset_index().rename_axis(columns=None)
    return wide.rename(columns={METRIC: "metric", "stage_tier": "tier"}).assign(series="validation")


def _at_the_end(final: pd.DataFrame, in_stages: pd.DataFrame, rounds: Mapping[tuple[str, str], int]) -> pd.DataFrame:
    """The rows of the final evaluation as the last points of the stages that trained the scored models.

    It leaves out models without their own training (supernet_init is where fine-tuning starts), stages that scored
    their last weights themselves, and supernets for which training scored other subnets.
    """
    models = zip(final["model"], final["tier"], final["architecture"], strict=True)
    stages = [
        TRAINING if model == TRAINING else f"{model}/{architecture if model == ALONE else tier}"
        for model, tier, architecture in models
    ]
    # A model that tiers or all clients share was trained in a stage of its own name.
    runs = final["run_id"].astype(str)
    stages = [
        model if (run, stage) not in rounds and (run, model) in rounds else stage
        for run, stage, model in zip(runs, stages, final["model"].astype(str), strict=True)
    ]
    done = [rounds.get((run, stage)) for run, stage in zip(runs, stages, strict=True)]
    rows = final.assign(stage=stages, rounds_done=pd.Series(done, final.index, dtype="Int64"))
    scored = {key: set(group["architecture"]) for key, group in in_stages.groupby(["run_id", "stage"])}
    ended = set(zip(in_stages["run_id"], in_stages["stage"], in_stages["rounds_done"], strict=True))
    points = []
    for (run, stage, end), group in rows.groupby(["run_id", "stage", "rounds_done"], sort=False):
        if (run, stage, end) in ended:
            continue
        if stage != TRAINING:
            points.append(group)
        elif scored.get((run, stage), set()) and scored[run, stage] <= set(group["architecture"]):
            points.append(group[group["architecture"].isin(scored[run, stage])])
    return pd.concat(points) if points else rows.iloc[:0]


def steps(tables: Tables) -> pd.DataFrame:
    """One row per validated path of the supernet in training, and per scored candidate of the search.

    Columns: run_id, phase ("supernet" or "search"), step, accuracy (a share, validation data). The step of the supernet
    after r rounds is the number of clients planned in these rounds; candidates follow in the order of their scoring.
    Source: FedorAS, Fig. 5 and 10.
    """
    requires(tables, "rounds", "evaluations", "candidates")
    parts = [_training(tables), _search(tables)]
    columns = ["run_id", "phase", "step", "accuracy"]
    return pd.concat([p[columns] for p in parts if len(p)] or parts, ignore_index=True)


def _training(tables: Tables) -> pd.DataFrame:
    rounds = by_stage(tables.rounds)
    rounds = rounds[rounds["kind"] == TRAINING].sort_values(["run_id", "round"])
    before = rounds.groupby("run_id")["clients_planned"].cumsum()
    after = {(r, n + 1): int(s) for r, n, s in zip(rounds["run_id"], rounds["round"], before, strict=True)}
    rows = by_stage(tables.evaluations)
    rows = where(rows[rows["client_id"].isna()], kind=TRAINING, split="validation", metric=METRIC)
    step = [after.get((run, done), 0) for run, done in zip(rows["run_id"], rows["round"], strict=True)]
    return pd.DataFrame(
        {"run_id": rows["run_id"].astype(object), "phase": TRAINING, "step": step, "accuracy": rows["value"]}
    )


def _search(tables: Tables) -> pd.DataFrame:
    rows = tables.candidates[tables.candidates["metric"].notna()]
    # All searches start at the end of the longest training, so that runs without training rows align with the others.
    rounds = where(by_stage(tables.rounds), kind=TRAINING)
    begin = int(rounds.groupby("run_id")["clients_planned"].sum().max()) if len(rounds) else 0
    step = begin + 1 + rows.groupby("run_id").cumcount()
    return pd.DataFrame(
        {"run_id": rows["run_id"].astype(object), "phase": SEARCH, "step": step, "accuracy": rows["metric"]}
    )
