"""SuperFedNAS's search: measures subnets, fits predictors, and verifies each target's best candidates."""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedloom.platform.clients.assignments import SERVER, ClientResult, Task
from fedloom.platform.clients.latency import MeasureLatency
from fedloom.platform.clients.scoring import ScoreSubnets
from fedloom.platform.federation.algorithm import (
    SUPERNET,
    Plan,
    RoundResult,
    RoundUpdate,
    Row,
    RunState,
    Stage,
    for_server,
)
from fedloom.platform.federation.world import World, expected_macs
from fedloom.platform.methods.candidates import candidate_rows
from fedloom.platform.methods.tier_search import (
    WINNERS,
    Goal,
    TierSearchConfig,
    TierSearchStage,
    check_validation_data,
)
from fedloom.platform.search.base import Interval, Scored, merit, pareto_front
from fedloom.platform.search.predictors import FEWEST_SAMPLES, check_predictor
from fedloom.platform.search.targets import (
    UNFITTED,
    Predictors,
    Sample,
    SearchSpaceCosts,
    Target,
    TargetSearchConfig,
    check_reachable,
    check_target_search,
    choose,
    draw_samples,
    finalists,
    fit_predictors,
    fitness_predictors,
    front_finalists,
    parse_target,
    predictor_of,
)
from fedloom.platform.spaces.slices import Architecture, architecture_id, parse_architecture

logger = logging.getLogger(__name__)

SAMPLES = "samples"
"""The state's name for the measured subnets, and the tier of their rows in `candidates`."""
FINALISTS = "finalists"
FRONT = "front"
"""The name of NSGA-II's front over the whole space among the targets."""


def targets_of(world: World, config: TargetSearchConfig) -> list[Target]:
    """The configured targets, by default each tier's cost interval; ValueError for an invalid or duplicate target."""
    above: Sequence[float | None] = config.macs_above or [None] * len(config.macs)
    texts: list[tuple[str, float | None]]
    texts = [(f"macs={value!r}", lower) for value, lower in zip(config.macs, above, strict=True)]
    texts += [(f"latency_s={value!r}", None) for value in config.latency_s]
    if not texts:
        return [Target(t.name, "budget", Interval(t.lower, t.upper)) for t in world.tiers]
    targets: list[Target] = []
    for text, lower in texts:
        try:
            target = parse_target(text, config.tolerance, world.macs_table, lower)
        except ValueError as error:
            raise ValueError(f"method.search: {error}") from error
        if target.name in [t.name for t in targets]:
            raise ValueError(f"method.search: target {text!r} is given twice")
        targets.append(target)
    return targets


def costs_of(world: World) -> SearchSpaceCosts:
    """The genome and cost tables that a search needs."""
    return SearchSpaceCosts(world.space.genome, world.macs_table, world.cost_table)


def search_stages(world: World, config: TargetSearchConfig) -> list[Stage]:
    """The sampling and verification stages; without predictors, a search with measured scores per target."""
    check_target_search(config, "method.search")
    if config.samples == 0 and config.predictor not in UNFITTED:
        return []
    targets = targets_of(world, config)
    for target in targets:
        check_reachable(target, costs_of(world), world.config.seed_for("search"))
    check_validation_data(world)
    if config.predictor in UNFITTED and any(t.measure == "latency_s" for t in targets):
        raise ValueError("method.search.latency_s: a latency target needs method.search.predictor=mlp")
    if config.predictor == "none":
        return [*_real_searches(world, config, targets)]
    if config.predictor == "fitness":
        fitness_predictors(world.space)
        return [VerifyStage(world, config, targets)]
    check_predictor(predictor_of(config), world.space.genome)
    return [SampleStage(world, config, targets), VerifyStage(world, config, targets)]


def _real_searches(world: World, config: TargetSearchConfig, targets: Sequence[Target]) -> list[Stage]:
    """An evolutionary search per target that measures every candidate."""
    search = TierSearchConfig(
        searcher="evolution",
        population=min(config.population, config.budget),
        parents=config.parents,
        mutation=config.mutation,
        budget=config.budget,
        metric=config.metric,
        validation_share=config.validation_share,
        candidates_per_task=config.candidates_per_task,
    )
    genome, everybody = world.space.genome, world.everyone
    tables = {"macs": world.macs_table, "budget": world.cost_table}
    goals = [Goal(t.name, t.interval, tables[t.measure], everybody, config.budget) for t in targets]
    return [TierSearchStage(world, search, goal, genome) for goal in goals]


@dataclass(frozen=True)
class Scoring:
    """Scores subnets of the shared supernet on validation data, and measures their latency if a target needs it."""

    world: World
    config: TargetSearchConfig
    targets: Sequence[Target]
    stage: str

    @property
    def rounds(self) -> int:
        """One round of scores, and one of latencies, during which nothing else runs on the machine."""
        return 2 if any(t.measure == "latency_s" for t in self.targets) else 1

    def macs_left(self, state: RunState, subnets: int) -> float:
        """Those of scoring this many subnets; measuring latencies takes hardly any."""
        if state.round > 0:
            return 0.0
        samples = self.config.validation_share * self.world.data.num_central("validation")
        return subnets * samples * expected_macs(self.world)

    def plan(self, state: RunState, architectures: Sequence[Architecture]) -> Plan:
        """The server's tasks of the round."""
        tasks: list[Task] = [MeasureLatency(tuple(architectures), self.config.latency_repeats)]
        if state.round == 0:
            size, version = self.config.candidates_per_task, state.version(SUPERNET)
            groups = [tuple(architectures[i : i + size]) for i in range(0, len(architectures), size)]
            tasks = [ScoreSubnets(group, version, share=self.config.validation_share) for group in groups]
        return Plan([for_server(self.stage, state.round, task) for task in tasks], SUPERNET, chunk_size=1)


def _values(reports: Iterable[ClientResult]) -> dict[str, dict[str, float]]:
    """The measured values per architecture, by name."""
    values: dict[str, dict[str, float]] = {}
    for report in reports:
        for m in report.measurements:
            values.setdefault(m.architecture, {})[m.metric] = m.value
    return values


def _merged(known: Any, reports: Iterable[ClientResult]) -> Any:
    """The values of earlier rounds and of this one, as JSON values for the state."""
    merged = {name: dict(values) for name, values in known.items()}
    for name, values in _values(reports).items():
        merged.setdefault(name, {}).update({k: None if math.isnan(v) else v for k, v in values.items()})
    return merged


def samples_in(measured: Any) -> list[Sample]:
    """The measured subnets of a run's state."""
    return [
        Sample(parse_architecture(name), _number(v.get("loss")), _number(v.get("accuracy")), v.get("latency_s"))
        for name, v in measured.items()
    ]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


class SampleStage(Stage):
    """Scores `samples` subnets for the predictors."""

    name = "search/samples"

    def __init__(
        self,
        world: World,
        config: TargetSearchConfig,
        targets: Sequence[Target],
        architectures: Sequence[Architecture] | None = None,
    ) -> None:
        self.world, self.config = world, config
        self.scoring = Scoring(world, config, targets, self.name)
        seed = world.config.seed_for("search")
        drawn = draw_samples(world.space.genome, world.macs_table, config.samples, seed)
        self.architectures = drawn if architectures is None else architectures

    def begin(self, state: RunState) -> RunState:
        """Starts without measurements."""
        return state.with_data(SAMPLES, {})

    def rounds_left(self, state: RunState) -> int:
        """One round, and one for latencies if needed."""
        return self.scoring.rounds - state.round

    def macs_left(self, state: RunState) -> float:
        """Those of scoring the samples."""
        return self.scoring.macs_left(state, len(self.architectures))

    def plan(self, state: RunState) -> Plan:
        """The samples in groups, for the server's workers."""
        return self.scoring.plan(state, self.architectures)

    def merge(self, state: RunState, _plan: Plan, result: RoundResult) -> RoundUpdate:
        """Collects what was measured."""
        return RoundUpdate(state.with_data(SAMPLES, _merged(state.data[SAMPLES], result.client_results)))

    def end(self, state: RunState) -> RoundUpdate:
        """Returns one row per sample."""
        rows = sample_rows(self.world, SAMPLES, 0, samples_in(state.data[SAMPLES]), self.config.metric)
        return RoundUpdate(state, [*rows, *_latency_rows(SAMPLES, state.data[SAMPLES])])


class VerifyStage(Stage):
    """Searches every target with the predictors, measures the best candidates, and chooses the winners."""

    name = "search/winners"

    def __init__(self, world: World, config: TargetSearchConfig, targets: Sequence[Target]) -> None:
        self.world, self.config, self.targets = world, config, targets
        self.scoring = Scoring(world, config, targets, self.name)

    def begin(self, state: RunState) -> RunState:
        """Fits the predictors and searches with them; only the candidates found are stored.

        If the predictors are not good enough there are no winners, and the run continues with the evaluation.
        """
        if self.config.predictor == "fitness":
            return self._searched(state, fitness_predictors(self.world.space), {})
        seed, costs = self.world.config.seed_for("search"), costs_of(self.world)
        samples = samples_in(state.data[SAMPLES])
        sound = sum(math.isfinite(s.loss) for s in samples)
        if sound < FEWEST_SAMPLES:
            return self._refuse(state, {}, f"only {sound} of {len(samples)} samples could be scored")
        latency = any(t.measure == "latency_s" for t in self.targets)
        predictors = fit_predictors(costs.genome, samples, self.config, seed, latency)
        if predictors.refused:
            return self._refuse(state, fit_figures(predictors, self.config.metric), predictors.refused)
        return self._searched(state, predictors, fit_figures(predictors, self.config.metric))

    def _searched(self, state: RunState, predictors: Predictors, fit: dict[str, float]) -> RunState:
        """The state with each target's best candidates."""
        seed, costs = self.world.config.seed_for("search"), costs_of(self.world)
        found = {t.name: _ids(finalists(t, costs, predictors, self.config, seed)) for t in self.targets}
        if self.config.front:
            found[FRONT] = _ids(front_finalists(costs, predictors, self.config, seed))
        value = {"found": found, "fit": fit, "measured": {}, "refused": ""}
        return state.with_data(FINALISTS, value)

    def _refuse(self, state: RunState, fit: dict[str, float], reason: str) -> RunState:
        found: dict[str, Any] = {t.name: {} for t in self.targets}
        return state.with_data(FINALISTS, {"found": found, "fit": fit, "measured": {}, "refused": reason})

    def rounds_left(self, state: RunState) -> int:
        """One round, and one for latencies if needed; none without a finalist."""
        anything = any(state.data[FINALISTS]["found"].values())
        return self.scoring.rounds - state.round if anything else 0

    def macs_left(self, state: RunState) -> float:
        """Those of scoring as many finalists as the targets may have."""
        return self.scoring.macs_left(state, len(self.targets) * self.config.verify + self.config.front)

    def plan(self, state: RunState) -> Plan:
        """Every finalist once, even if several targets share it."""
        found = state.data[FINALISTS]["found"]
        names = dict.fromkeys(name for candidates in found.values() for name in candidates)
        return self.scoring.plan(state, [parse_architecture(name) for name in names])

    def merge(self, state: RunState, _plan: Plan, result: RoundResult) -> RoundUpdate:
        """Collects what was measured."""
        value = state.data[FINALISTS]
        measured = _merged(value["measured"], result.client_results)
        return RoundUpdate(state.with_data(FINALISTS, {**value, "measured": measured}))

    def end(self, state: RunState) -> RoundUpdate:
        """Stores the winners, and returns one row per finalist and the predictors' quality."""
        value = state.data[FINALISTS]
        verified = {architecture_id(s.architecture): s for s in samples_in(value["measured"])}
        if value["refused"]:
            logger.warning(
                "no subnet was searched: %s (afterwards: fedloom search RUN --samples N --min-tau X)", value["refused"]
            )
        rows: list[Row] = [_figure(name, figure) for name, figure in value["fit"].items()]
        winners: dict[str, str] = {}
        for target in self.targets:
            own = [verified[name] for name in value["found"][target.name] if name in verified]
            macs = {s.architecture: self.world.macs_table.cost(s.architecture) for s in own}
            won = choose(target, own, macs, self.config.metric)
            rows += sample_rows(self.world, target.name, 1, own, self.config.metric, won)
            if won is None and not value["refused"]:
                logger.warning("%s: no subnet was found for this target, or none could be scored", target.name)
            if won is not None:
                winners[target.name] = architecture_id(won.architecture)
        if FRONT in value["found"]:
            own = [verified[name] for name in value["found"][FRONT] if name in verified]
            rows += sample_rows(self.world, FRONT, 1, own, self.config.metric)
        rows += _latency_rows("finalists", value["measured"])
        # The rows hold everything from here on; without removal every later checkpoint would contain it.
        return RoundUpdate(state.with_data(WINNERS, winners).without_data(FINALISTS, SAMPLES), rows)


def _ids(found: dict[Architecture, float]) -> dict[str, float]:
    return {architecture_id(architecture): metric for architecture, metric in found.items()}


def fit_figures(predictors: Predictors, metric: str) -> dict[str, float]:
    """The predictors' quality on held-out samples, by metric name."""
    figures: dict[str, float] = {}
    for what, fitted in ((metric, predictors.metric), ("latency_s", predictors.latency)):
        if fitted is not None:
            figures[f"predictor_kendall_tau_{what}"] = fitted.tau
            figures[f"predictor_mae_{what}"] = fitted.mae
            figures[f"predictor_held_out_{what}"] = float(fitted.held_out)
    return figures


def _figure(name: str, value: float) -> Row:
    return "evaluations", {"model": "predictor", "tier": SERVER, "split": "validation", "metric": name, "value": value}


def _latency_rows(tier: str, measured: Any) -> list[Row]:
    """Measured latencies as rows: medians and interquartile ranges in seconds."""
    names = ("latency_s", "latency_spread_s")
    return [
        ("evaluations", {"model": SUPERNET, "tier": tier, "architecture": a, "metric": name, "value": values[name]})
        for a, values in measured.items()
        for name in names
        if values.get(name) is not None
    ]


def sample_rows(
    world: World, tier: str, generation: int, samples: Sequence[Sample], metric: str, won: Sample | None = None
) -> list[Row]:
    """Scored subnets as rows of `candidates`; the front holds the winner or, without one, the non-dominated subnets."""
    cost_of = world.macs_table.cost
    scored = [
        Scored(s.architecture, s.metric, s.loss, cost_of(s.architecture), generation, math.isfinite(s.loss))
        for s in samples
    ]
    ranked = [replace(s, metric=merit(metric, s.metric, s.loss)) for s in scored]
    front = {won.architecture} if won else {s.architecture for s in pareto_front(ranked)}
    return candidate_rows(world, tier, scored, front, won.architecture if won else None)
