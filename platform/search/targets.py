"""Search of a trained supernet for the best subnet per target, an upper bound on MACs or latency."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import annotated_types
import numpy as np

from fedloom.platform.plugins import ComponentSpec, PluginError
from fedloom.platform.search.base import METRIC_TEXT, Architecture, Interval, Metric, merit
from fedloom.platform.search.constraint import Constraint, PredictedConstraint, TableConstraint
from fedloom.platform.search.predictors import (
    FEWEST_SAMPLES,
    HIDDEN,
    PREDICTORS,
    Fitted,
    fit_predictor,
    predicted_front,
    refusal,
    search_predicted,
)
from fedloom.platform.seeding import stream
from fedloom.platform.settings import (
    ONE_OR_MORE,
    PART,
    POSITIVE,
    SHARE,
    UP_TO_A_MILLION,
    ZERO_OR_MORE,
    ComponentName,
    check_settings,
    component_specs,
)
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.genome import Floats, Genome, Ints, as_array, draw_supported
from fedloom.tiers.costs import CostTable

MEASURES = ("macs", "latency_s")
UNFITTED = ("none", "fitness")
"""The values of `predictor` that need no samples and fit nothing, so that they cannot predict latencies."""


@dataclass
class TargetSearchConfig:
    """Search of a trained elastic supernet (SuperFedNAS, stage 2); no client trains.

    Targets are the upper bounds in `macs` and `latency_s`; without any, each tier's budget is a target. A target's
    interval begins `tolerance` below its bound, or at its entry of `macs_above` (the bins of SuperFedNAS, Tab. 3).
    """

    macs: Annotated[list[Annotated[float, POSITIVE]], "targets: upper bounds on MACs"] = field(default_factory=list)
    macs_above: Annotated[
        list[Annotated[float, ZERO_OR_MORE]],
        "lower bounds, one per entry of macs, which a winner exceeds; empty: see tolerance",
    ] = field(default_factory=list)
    latency_s: Annotated[
        list[Annotated[float, POSITIVE]], "targets: upper bounds on seconds per sample on this host"
    ] = field(default_factory=list)
    tolerance: Annotated[
        float, annotated_types.Interval(gt=0, lt=1), "share by which a winner may cost less than its target"
    ] = 0.01
    metric: Annotated[Metric, METRIC_TEXT] = "accuracy"
    predictor: Annotated[
        str,
        ComponentName("predictor"),
        "predictor of metric and latency; none: measure every candidate; fitness: DeepFedNAS' score, untrained",
    ] = "mlp"
    samples: Annotated[
        int,
        annotated_types.Interval(ge=0, le=1_000_000),
        "number of subnets to fit predictors on; 0 disables the search",
    ] = 200
    validation_share: Annotated[float, SHARE, "share of the validation data used for scoring"] = 1.0
    min_tau: Annotated[
        float, annotated_types.Interval(ge=-1, le=1), "Kendall's tau on held-out samples that a predictor must reach"
    ] = 0.5
    hidden: Annotated[int, HIDDEN, "mlp: units per hidden layer"] = 128
    epochs: Annotated[int, UP_TO_A_MILLION, "mlp: passes over the samples"] = 100
    population: Annotated[int, annotated_types.Interval(ge=2, le=1_000_000), "candidates per generation"] = 100
    parents: Annotated[float, SHARE, "number of parents as a share of the population"] = 0.25
    mutation: Annotated[float, PART, "probability that a gene changes"] = 0.1
    generations: Annotated[int, UP_TO_A_MILLION, "number of generations"] = 30
    verify: Annotated[int, UP_TO_A_MILLION, "number of best predicted subnets per target that are measured"] = 5
    front: Annotated[
        int,
        annotated_types.Interval(ge=0, le=1_000_000),
        "number of subnets of the whole space's Pareto front to measure",
    ] = 0
    budget: Annotated[int, ONE_OR_MORE, "predictor none: subnets scored per target"] = 100
    latency_repeats: Annotated[int, UP_TO_A_MILLION, "number of measurements per latency"] = 20
    candidates_per_task: Annotated[int, UP_TO_A_MILLION, "number of subnets scored in one task"] = 8
    options: Annotated[dict[str, Any], "options of a user's own predictor, by name"] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """A target's cost measure, and the cost interval to search, whose upper end is the target.

    `measure` is "macs", "latency_s", or "budget" for a tier's; `table` has the costs, None for latencies.
    """

    name: str
    measure: str
    interval: Interval
    table: CostTable | None = None


@dataclass(frozen=True)
class Sample:
    """A subnet scored on validation data; `latency_s` is None if it was not measured."""

    architecture: Architecture
    loss: float
    metric: float
    latency_s: float | None = None


def macs_target(value: float, tolerance: float, table: CostTable, above: float | None = None) -> Target:
    """A target of at most `value` MACs, whose interval begins at `above`, by default `tolerance` below `value`.

    Raises ValueError for MACs below the smallest or above the largest subnet.
    """
    # A bin (above, value] may reach beyond the largest subnet; a target without `above` may not.
    if value < table.smallest or (value > table.largest if above is None else above >= table.largest):
        shown = f"macs={value!r}" if above is None else f"macs={value!r} above {above:.10g}"
        raise ValueError(
            f"target {shown!r}: subnets have {table.smallest:.10g} (smallest) to {table.largest:.10g} (largest) MACs; "
            "choose a target in between"
        )
    if above is not None and above >= value:
        raise ValueError(f"target 'macs={value!r}': its lower bound is {above:.10g}; give one below it")
    lower = value * (1 - tolerance) if above is None else above
    return Target(f"macs={value:.10g}", "macs", Interval(lower, value), table)


def latency_target(value: float, tolerance: float) -> Target:
    """A target of at most `value` seconds per sample."""
    return Target(f"latency_s={value:.10g}", "latency_s", Interval(value * (1 - tolerance), value))


def check_target_search(config: TargetSearchConfig, key: str) -> None:
    """Raises ValueError for values out of range; `key` is the configuration key."""
    check_settings(config, f"{key}.")
    predictor_of(config, key)
    if config.predictor in UNFITTED and config.front:
        raise ValueError(f"{key}.front={config.front}: the whole front is searched with predictors; use predictor=mlp")
    if config.predictor not in UNFITTED and 0 < config.samples < FEWEST_SAMPLES:
        raise ValueError(
            f"{key}.samples={config.samples}: predictors need at least {FEWEST_SAMPLES}; 0 switches the search off"
        )
    asked = config.macs or config.latency_s or config.front
    if config.predictor not in UNFITTED and asked and not config.samples:
        raise ValueError(
            f"{key}.samples=0 switches the search off, but targets are given: measure samples, or give none"
        )
    if config.macs_above and len(config.macs_above) != len(config.macs):
        raise ValueError(
            f"{key}.macs_above has {len(config.macs_above)} values for {len(config.macs)} targets of {key}.macs: give "
            "one for each, or none"
        )


def predictor_of(config: TargetSearchConfig, key: str = "method.search") -> ComponentSpec:
    """The configured predictor with its options."""
    if config.predictor == "mlp" and not config.options:
        return ComponentSpec("mlp", (("epochs", config.epochs), ("hidden", config.hidden)))
    try:
        return component_specs([(PREDICTORS, config.predictor)], config.options, f"{key}.options")[0]
    except PluginError as error:
        raise PluginError(f"{key}.predictor: {error}") from error


def draw_samples(genome: Genome, table: CostTable, count: int, seed: int) -> list[Architecture]:
    """Distinct subnets to measure: half of them uniform over the genes, half spread evenly over the costs.

    Uniform genes alone give very few small and large subnets, where predictors would be inaccurate.
    """
    rng = stream(seed, "samples")
    pool = draw_supported(genome, table, 64 * count, rng)
    costs = table.costs(pool)
    edges = np.linspace(table.smallest, table.largest, max(2, count // 4) + 1)
    bins = np.clip(np.searchsorted(edges, costs, side="right") - 1, 0, len(edges) - 2)
    rows_by_bin = [np.flatnonzero(bins == b).tolist() for b in range(int(bins.max(initial=0)) + 1)]
    spread = [rows[turn] for turn in range(4) for rows in rows_by_bin if turn < len(rows)]
    # The smallest and the largest subnet are always included, because predictors extrapolate poorly.
    taken = dict.fromkeys([table.extreme(min), table.extreme(max)][:count])
    for row in [*range(count - count // 2), *spread, *range(len(pool))]:
        if len(taken) == count:
            break
        taken[tuple(pool[row].tolist())] = None
    return list(taken)


@dataclass(frozen=True)
class Predictors:
    """The fitted predictors; `latency` is None if no target needs it.

    `refused` is the reason why a search must not use them, empty if it may.
    """

    metric: Fitted
    latency: Fitted | None
    refused: str = ""


def fit_predictors(
    genome: Genome, samples: Sequence[Sample], config: TargetSearchConfig, seed: int, latency: bool = False
) -> Predictors:
    """Fits predictors of merit and, with `latency`, of latency; `refused` is set if a tau is too low.

    Raises ValueError if there are too few samples with finite scores.
    """
    sound = [s for s in samples if math.isfinite(s.loss) and math.isfinite(s.metric)]
    features = genome.one_hot(as_array([s.architecture for s in sound]))

    def fitted(what: str, values: Sequence[float]) -> Fitted:
        return fit_predictor(features, np.array(values), seed=seed, ids=(what,), fit=predictor_of(config))

    metric = fitted("metric", [merit(config.metric, s.metric, s.loss) for s in sound])
    seconds = [s.latency_s if s.latency_s is not None else math.nan for s in sound]
    of_latency = fitted("latency_s", seconds) if latency else None
    refused = refusal(metric, config.min_tau, "the metric")
    if of_latency is not None and not refused:
        refused = refusal(of_latency, config.min_tau, "latency_s")
    return Predictors(metric, of_latency, refused)


def fitness_predictors(space: SearchSpace) -> Predictors:
    """The fitness in place of a metric predictor, with NaN as tau and MAE; ValueError for a space without blocks."""
    from fedloom.platform.search.fitness import fitness_of  # other searches need not load it

    return Predictors(Fitted(fitness_of(space), math.nan, math.nan, 0, 0), None)


def _scores_of(genome: Genome, predict: Callable[[Floats], Floats]) -> Callable[[Ints], Floats]:
    return lambda architectures: predict(genome.one_hot(architectures))


def check_reachable(target: Target, genome: Genome, seed: int) -> None:
    """Raises ValueError if no subnet's cost is inside a target's interval, unless the target is a latency."""
    if target.table is None:
        return
    table, interval = target.table, target.interval
    constraint = TableConstraint(table, interval, genome)
    rng = stream(seed, "reachable", target.name)
    advice = "choose another target, or raise method.search.tolerance (of `fedloom search`: --tolerance)"
    if target.measure == "budget":
        advice = "use fewer tiers, give tiers.upper_bounds, or name targets (method.search.macs)"
    if not constraint.sample(1, (), rng):
        raise ValueError(
            f"no subnet has {table.measure} in ({interval.lower:.10g}, {interval.upper:.10g}], the nearest has about "
            f"{constraint.nearest(rng):.10g}, so {target.name} has none: {advice}"
        )


def finalists(
    target: Target, genome: Genome, macs: CostTable, predictors: Predictors, config: TargetSearchConfig, seed: int
) -> dict[Architecture, float]:
    """The subnets with the best predicted metric inside the target's interval, with their predictions.

    Operators that cost infinite `macs` are not used. Empty if no subnet inside the interval is found.
    """
    constraint: Constraint
    if target.table is not None:
        constraint = TableConstraint(target.table, target.interval, genome)
    else:
        assert predictors.latency is not None, "latencies are measured where a target asks for them"
        predict = _scores_of(genome, predictors.latency.predictor)
        constraint = PredictedConstraint(
            lambda a: np.where(np.isfinite(macs.costs(a)), predict(a), math.inf), genome, target.interval
        )
    if not constraint.sample(1, (), stream(seed, "reachable", target.name)):
        return {}
    candidates = search_predicted(
        genome,
        _scores_of(genome, predictors.metric.predictor),
        constraint,
        seed=seed,
        name=target.name,
        population=config.population,
        generations=config.generations,
        parents=config.parents,
        mutation=config.mutation,
        keep=config.verify,
    )
    return {c.architecture: c.metric for c in candidates}


def front_finalists(
    genome: Genome, macs: CostTable, predictors: Predictors, config: TargetSearchConfig, seed: int
) -> dict[Architecture, float]:
    """`config.front` subnets spread over NSGA-II's front of predicted metric against MACs."""
    candidates = predicted_front(
        genome,
        _scores_of(genome, predictors.metric.predictor),
        macs,
        seed=seed,
        name="front",
        population=config.population,
        generations=config.generations,
        mutation=config.mutation,
    )
    spread = np.unique(np.linspace(0, len(candidates) - 1, min(config.front, len(candidates))).round().astype(int))
    return {candidates[i].architecture: candidates[i].metric for i in spread}


def choose(
    target: Target, verified: Sequence[Sample], cost: Callable[[Architecture], float], metric: str = "accuracy"
) -> Sample | None:
    """The winner among the verified subnets: the best by `metric`, then by the other score, then the smallest cost.

    For a latency target, only subnets whose measured latency meets it count. None if there are none or all failed.
    """
    sound = [s for s in verified if math.isfinite(s.loss) and math.isfinite(s.metric)]
    if target.measure == "latency_s":
        sound = [s for s in sound if s.latency_s is not None and s.latency_s <= target.interval.upper]

    def key(s: Sample) -> tuple[float, float, float, Architecture]:
        scores = (-s.metric, s.loss) if metric == "accuracy" else (s.loss, -s.metric)
        return (*scores, cost(s.architecture), s.architecture)

    return min(sound, key=key, default=None)
