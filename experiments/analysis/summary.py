"""Quality and cost of models: per run, and per setting with mean and interval over seeds."""

from typing import Any

import pandas as pd

from fedloom.experiments.analysis.frames import (
    METRIC,
    communication,
    communication_by_kind,
    natural,
    shown_models,
)
from fedloom.experiments.analysis.intervals import estimate
from fedloom.experiments.analysis.kinds import ALL_TIERS, elastic_run_ids, silo_run_ids
from fedloom.experiments.analysis.seeds import by_seed, seeds_of
from fedloom.experiments.analysis.settings import settings_of
from fedloom.experiments.analysis.silos import GLOBAL, PERSONAL, per_silo
from fedloom.experiments.analysis.subnets import SEARCHED
from fedloom.experiments.analysis.tables import RUN_KEY, Tables, requires

MEASURES = (METRIC, "loss", "macs", "parameters", "total_bytes", "simulated_s", "wall_s")
"""The measures of a model in `summary` and `compare`; `per_model` describes them."""

MODEL_KEY = ["model", "tier", "subnet"]
_QUALITIES, _COSTS = [METRIC, "loss"], ["macs", "parameters"]


def per_model(tables: Tables) -> pd.DataFrame:
    """One row per (run, model, tier) of the final evaluation, and per subnet of an elastic supernet's family.

    Columns: experiment, run_id, seeds (all of them as JSON), model, tier ("all" for models of silos), subnet (empty
    except for members of a family), architecture, accuracy (a share) and loss on the whole test data (the mean over
    silos for cross-silo runs), macs (forward, per sample), parameters; and the totals of the method in that run, equal
    for all its models: total_bytes (received and sent by all clients), simulated_s and wall_s. A run that was not
    evaluated has one row with only these totals.
    """
    requires(tables, "rounds", "evaluations", "candidates", "models")
    parts = [_of_server(tables), _of_silos(tables)]
    columns = [*RUN_KEY, *MODEL_KEY, "architecture", *_QUALITIES, *_COSTS]
    rows = pd.concat([p[columns].astype(object) for p in parts if len(p)] or parts, ignore_index=True)
    runs = pd.DataFrame([(p.experiment, p.run_id) for p in tables.paths], columns=RUN_KEY, dtype=object)
    runs["seeds"] = [seeds_of(tables, run_id) for run_id in runs["run_id"]]
    frame = runs.merge(rows, on=RUN_KEY, how="left").merge(_run_costs(tables), on=RUN_KEY, how="left")
    numbers = dict.fromkeys(MEASURES, "float64")
    whole = frame[[*RUN_KEY, "seeds", *MODEL_KEY, "architecture", *MEASURES]]
    return whole.assign(**{m: pd.to_numeric(whole[m]) for m in MEASURES}).astype(numbers)


def _of_server(tables: Tables) -> pd.DataFrame:
    rows = tables.evaluations
    chosen = (rows["split"] == "test") & rows["metric"].isin(_QUALITIES) & rows["client_id"].isna()
    rows = rows[chosen.fillna(False).astype(bool)]
    rows = rows[~rows["run_id"].isin(silo_run_ids(tables))]
    family = rows["run_id"].isin(elastic_run_ids(tables)) & (rows["model"] != SEARCHED)
    names = {name: rows[name].astype(object).fillna("") for name in ("model", "tier", "architecture")}
    rows = rows.assign(**names, subnet=names["architecture"].where(family, ""))
    key = [*RUN_KEY, *MODEL_KEY]
    # The last evaluation of a model counts.
    values = rows.drop_duplicates([*key, "metric"], keep="last").astype(dict.fromkeys([*key, "metric"], object))
    wide = values.pivot(index=key, columns="metric", values="value").reindex(columns=_QUALITIES)
    heads = rows.drop_duplicates(key, keep="last")[[*key, "architecture"]].astype(object)
    frame = heads.merge(wide.reset_index().rename_axis(columns=None), on=key, how="left")
    return frame.merge(_architecture_costs(tables), on=["run_id", "architecture"], how="left")


def _architecture_costs(tables: Tables) -> pd.DataFrame:
    """MACs and parameters per (run, architecture), from the evaluations, else the kept models, else the candidates."""
    key = ["run_id", "architecture"]
    rows = tables.evaluations[tables.evaluations["metric"].isin(_COSTS)].dropna(subset=key)
    rows = rows.drop_duplicates([*key, "metric"], keep="last").astype(dict.fromkeys([*key, "metric"], object))
    wide = rows.pivot(index=key, columns="metric", values="value").reindex(columns=_COSTS).reset_index()
    others = [f[[*key, *_COSTS]].astype(dict.fromkeys(_COSTS, "Float64")) for f in (tables.models, tables.candidates)]
    both = pd.concat([f.astype(object) for f in (wide, *others)], ignore_index=True).dropna(subset=key)
    return both.groupby(key, sort=False)[_COSTS].first().reset_index()


def _of_silos(tables: Tables) -> pd.DataFrame:
    measured = per_silo(tables)
    key = [*RUN_KEY, "model"]
    own = measured.groupby(key, sort=False)[[*_QUALITIES, *_COSTS]].mean().reset_index()
    shared = measured[measured["model"] == PERSONAL].groupby(RUN_KEY, sort=False)["global_accuracy"].mean().dropna()
    beside = shared.rename(METRIC).reset_index().assign(model=GLOBAL)
    frame = pd.concat([own, beside], ignore_index=True) if len(beside) else own
    return frame.assign(tier=ALL_TIERS, subnet="", architecture=None)


def _run_costs(tables: Tables) -> pd.DataFrame:
    kinds = communication_by_kind(communication(tables))
    rows = kinds[kinds["kind"] == "method"]
    sums = rows.assign(total_bytes=rows["bytes_down"] + rows["bytes_up"])[
        [*RUN_KEY, "total_bytes", "simulated_s", "wall_s"]
    ]
    return sums.astype(dict.fromkeys(RUN_KEY, object))


def summary(tables: Tables) -> pd.DataFrame:
    """One row per (setting, model, tier), and per subnet of a family: means with 95 % intervals over seeds.

    A setting is a group of runs whose configurations differ only in seeds. Columns: setting (its name), experiment,
    model, tier, subnet, architecture (null if seeds found different ones), runs, seeds (distinct ones: runs that repeat
    a seed count once, with their mean); and for each of `MEASURES` (see `per_model`) NAME_n (seeds with a value),
    NAME_mean, NAME_half_width (by Student's t; null below three seeds) and NAME_values (a list, by seed). A setting
    without an evaluated run has one row with its costs.
    """
    frame = per_model(tables)
    found = []
    for setting in settings_of(tables):
        rows = frame[frame["run_id"].isin(setting.run_ids)]
        for key, group in by_model(rows):
            found.append({"setting": setting.name, "experiment": setting.experiment, **key, **_over_seeds(group)})
    counts = ["runs", "seeds", *(f"{m}_n" for m in MEASURES)]
    values = [f"{m}_{what}" for m in MEASURES for what in ("n", "mean", "half_width", "values")]
    columns = ["setting", "experiment", *MODEL_KEY, "architecture", "runs", "seeds", *values]
    numbers = [name for name in values if not name.endswith("_values")]
    kinds = {**dict.fromkeys(numbers, "float64"), **dict.fromkeys(counts, "int64")}
    return pd.DataFrame(found, columns=columns).astype(kinds)


def by_model(rows: pd.DataFrame) -> list[tuple[dict[str, str | None], pd.DataFrame]]:
    """The rows of `per_model` by (model, tier, subnet) in display order; one group of all rows if none has a model.

    The subnets of a family are in the order of their evaluation.
    """
    evaluated = rows[rows["model"].notna()]
    if evaluated.empty:
        return [(dict.fromkeys(MODEL_KEY), rows)] if len(rows) else []
    models = shown_models([str(model) for model in evaluated["model"]])
    groups = [(tuple(map(str, key)), group) for key, group in evaluated.groupby(MODEL_KEY, sort=False)]
    groups.sort(key=lambda item: (models.index(item[0][0]), natural(item[0][1])))
    return [(dict(zip(MODEL_KEY, key, strict=True)), group) for key, group in groups]


def _over_seeds(rows: pd.DataFrame) -> dict[str, Any]:
    seeds = by_seed(rows, MEASURES)
    architectures = set(rows["architecture"].dropna()) - {""}
    values: dict[str, Any] = {
        "architecture": architectures.pop() if len(architectures) == 1 else None,
        "runs": rows["run_id"].nunique(),
        "seeds": len(seeds),
    }
    for measure in MEASURES:
        known = estimate(seeds[measure])
        values[f"{measure}_n"] = known.runs if known else 0
        values[f"{measure}_mean"] = known.mean if known else None
        values[f"{measure}_half_width"] = known.half_width if known else None
        values[f"{measure}_values"] = list(known.values) if known else []
    return values
