"""SuperFedNAS's search: measures subnets, fits predictors, and verifies each target's best candidates."""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedloom.platform.clients.assignments import SERVER, Assignment, ClientResult, Measurement, Task
from fedloom.platform.clients.execution import Executor, SharedWeights, make_chunks
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.scoring import ScoreSubnets, loaded_subnet
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.trees import single
from fedloom.platform.federation.algorithm import SUPERNET, Plan, RoundResult, RoundUpdate, Row, RunState
from fedloom.platform.federation.loop import merge_chunks
from fedloom.platform.federation.method import Stage
from fedloom.platform.federation.selection import for_server
from fedloom.platform.federation.world import World
from fedloom.platform.methods.tier_search import (
    WINNERS,
    Goal,
    TierSearchConfig,
    TierSearchStage,
    candidate_rows,
    check_validation_data,
)
from fedloom.platform.search.base import Interval, Scored, in_unit, merit, pareto_front
from fedloom.platform.search.predictors import FEWEST_SAMPLES, check_predictor
from fedloom.platform.search.targets import (
    UNFITTED,
    Predictors,
    Sample,
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
    latency_target,
    macs_target,
    predictor_of,
)
from fedloom.platform.spaces.slices import Architecture, Weights, architecture_id, parse_architecture
from fedloom.tiers.costs import CostTable, with_unsupported
from fedloom.tiers.devices import EVALUATION_FACTOR
from fedloom.tiers.measure import latency_s_of

logger = logging.getLogger(__name__)

SAMPLES = "samples"
"""The state's name for the measured subnets, and the tier of their rows in `candidates`."""
FINALISTS = "finalists"
FRONT = "front"
"""The name of NSGA-II's front over the whole space among the targets."""


def supported_macs(world: World) -> CostTable:
    """The MACs of what a search may choose: infinite for what `tiers.unsupported` makes the budgets' cost infinite."""
    unsupported = [
        (d, o) for d, row in enumerate(world.cost_table.options) for o, cost in enumerate(row) if cost == math.inf
    ]
    return with_unsupported(world.macs_table, unsupported)


def targets_of(world: World, config: TargetSearchConfig) -> list[Target]:
    """The configured targets, by default each tier's cost interval; ValueError for an invalid or duplicate target."""
    above: Sequence[float | None] = config.macs_above or [None] * len(config.macs)
    macs = supported_macs(world)
    try:
        targets = [
            macs_target(value, config.tolerance, macs, lower) for value, lower in zip(config.macs, above, strict=True)
        ]
    except ValueError as error:
        raise ValueError(f"method.search: {error}") from error
    targets += [latency_target(value, config.tolerance) for value in config.latency_s]
    names = [target.name for target in targets]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"method.search: target {name!r} is given twice")
    by_tier = [Target(t.name, "budget", Interval(t.lower, t.upper), world.cost_table) for t in world.tiers]
    return targets or by_tier


def search_stages(world: World, config: TargetSearchConfig) -> list[Stage]:
    """The sampling and verification stages; without predictors, a search with measured scores per target."""
    check_target_search(config, "method.search")
    if config.samples == 0 and config.predictor not in UNFITTED:
        return []
    targets, genome = targets_of(world, config), world.space.genome
    for target in targets:
        check_reachable(target, genome, world.config.seed_for("search"))
    check_validation_data(world)
    if config.predictor in UNFITTED and any(t.measure == "latency_s" for t in targets):
        raise ValueError("method.search.latency_s: a latency target needs method.search.predictor=mlp")
    if config.predictor == "none":  # an evolutionary search per target that measures every candidate
        search = TierSearchConfig(
            searcher="evolution",
            population=max(2, min(config.population, config.budget)),  # the fewest for evolution
            parents=config.parents,
            mutation=config.mutation,
            budget=config.budget,
            metric=config.metric,
            validation_share=config.validation_share,
            candidates_per_task=config.candidates_per_task,
        )
        goals = [
            Goal(t.name, t.interval, t.table, world.everyone, config.budget) for t in targets if t.table is not None
        ]
        return [TierSearchStage(world, search, goal, genome) for goal in goals]
    if config.predictor == "fitness":
        fitness_predictors(world.space)
        return [VerifyStage(world, config, targets)]
    check_predictor(predictor_of(config), genome)
    sampling = SampleStage(world, config, targets)
    if sampling.expected < FEWEST_SAMPLES:
        raise ValueError(
            f"method.search.predictor={config.predictor}: space {world.space.name} has {sampling.expected} subnets, "
            f"and predictors need at least {FEWEST_SAMPLES} samples: use predictor=none, which measures them all, or "
            "samples=0 to leave the search out"
        )
    return [sampling, VerifyStage(world, config, targets)]


@dataclass(frozen=True)
class MeasureLatency:
    """Measures subnets on this host with a batch of one sample: median latency and interquartile range, in seconds."""

    architectures: tuple[Architecture, ...]
    repeats: int = 20

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Returns two measurements per architecture, `latency_s` and `latency_spread_s`."""
        del assignment
        x, _ = worker.central_data("validation").tensors(slice(1))
        measurements: list[Measurement] = []
        for architecture in self.architectures:
            latency = latency_s_of(
                loaded_subnet(worker, Subnet(architecture), weights),
                single(x, "a measure of latency"),
                repeats=self.repeats,
            )
            figures = {"latency_s": latency.median_s, "latency_spread_s": latency.spread_s}
            name = architecture_id(architecture)
            measurements += [
                Measurement("supernet", name, "validation", k, v, latency.repeats) for k, v in figures.items()
            ]
        return ClientResult(measurements=tuple(measurements), clock_factor=EVALUATION_FACTOR)


class ScoringStage(Stage):
    """Scores subnets of the shared supernet on validation data, and measures their latency if a target needs it.

    Latencies have a round of their own, during which nothing else runs on the machine.
    """

    def __init__(self, world: World, config: TargetSearchConfig, targets: Sequence[Target], expected: int) -> None:
        """`expected` is the expected number of subnets, to estimate the time left."""
        self.world, self.config, self.targets, self.expected = world, config, targets, expected
        self.latency = any(target.measure == "latency_s" for target in targets)
        self.rounds = 2 if self.latency else 1

    def subnets(self, state: RunState) -> Sequence[Architecture]:
        """The subnets that are scored."""
        raise NotImplementedError

    def macs_left(self, state: RunState) -> float:
        """The MACs of scoring the subnets; measuring latencies takes hardly any."""
        if state.round > 0:
            return 0.0
        samples = self.config.validation_share * self.world.data.num_central("validation")
        return self.expected * samples * self.world.expected_macs()

    def plan(self, state: RunState) -> Plan:
        """The subnets in groups, for the server's workers."""
        subnets, config = self.subnets(state), self.config
        tasks: list[Task] = [MeasureLatency(tuple(subnets), config.latency_repeats)]
        if state.round == 0:
            size, version = config.candidates_per_task, state.version(SUPERNET)
            groups = [tuple(subnets[i : i + size]) for i in range(0, len(subnets), size)]
            tasks = [ScoreSubnets(group, version, share=config.validation_share) for group in groups]
        return Plan([for_server(self.name, state.round, task) for task in tasks], SUPERNET, chunk_size=1)


class SampleStage(ScoringStage):
    """Scores `samples` subnets for the predictors."""

    name = "search/samples"

    def __init__(
        self,
        world: World,
        config: TargetSearchConfig,
        targets: Sequence[Target],
        architectures: Sequence[Architecture] | None = None,
    ) -> None:
        """`architectures` are the samples, by default drawn ones."""
        seed = world.config.seed_for("search")
        drawn = draw_samples(world.space.genome, supported_macs(world), config.samples, seed)
        self.architectures = drawn if architectures is None else architectures
        super().__init__(world, config, targets, len(self.architectures))

    def subnets(self, state: RunState) -> Sequence[Architecture]:
        """The samples."""
        del state
        return self.architectures

    def begin(self, state: RunState) -> RunState:
        """Starts without measurements."""
        return state.with_data(SAMPLES, {})

    def rounds_left(self, state: RunState) -> int:
        """One round, and one for latencies if needed."""
        return self.rounds - state.round

    def merge(self, state: RunState, _plan: Plan, result: RoundResult) -> RoundUpdate:
        """Collects what was measured."""
        return RoundUpdate(state.with_data(SAMPLES, _with_measured(state.data[SAMPLES], result.client_results)))

    def end(self, state: RunState) -> RoundUpdate:
        """Returns one row per sample."""
        measured = state.data[SAMPLES]
        rows = _sample_rows(self.world, SAMPLES, 0, _samples_in(measured), self.config.metric)
        return RoundUpdate(state, [*rows, *_latency_rows(SAMPLES, measured)])


class VerifyStage(ScoringStage):
    """Searches every target with the predictors, measures the best candidates, and chooses the winners."""

    name = "search/winners"

    def __init__(self, world: World, config: TargetSearchConfig, targets: Sequence[Target]) -> None:
        super().__init__(world, config, targets, len(targets) * config.verify + config.front)

    def begin(self, state: RunState) -> RunState:
        """Fits the predictors and searches with them; only the candidates found are stored.

        If the predictors are not good enough there are no winners, and the run continues with the evaluation.
        """
        predictors, refused = self._predictors(state)
        fit: dict[str, float] = {}
        by_metric = {self.config.metric: predictors.metric, "latency_s": predictors.latency} if predictors else {}
        for metric, fitted in by_metric.items():
            if fitted is not None and fitted.held_out:
                fit[f"predictor_kendall_tau_{metric}"] = fitted.tau
                fit[f"predictor_mae_{metric}"] = fitted.mae
                fit[f"predictor_held_out_{metric}"] = float(fitted.held_out)
        by_target: dict[str, dict[str, float]] = {target.name: {} for target in self.targets}
        if predictors is not None and not refused:
            genome, config, seed = self.world.space.genome, self.config, self.world.config.seed_for("search")
            macs = supported_macs(self.world)
            for target in self.targets:
                by_target[target.name] = _by_id(finalists(target, genome, macs, predictors, config, seed))
            if config.front:
                front = front_finalists(genome, macs, predictors, config, seed)
                by_target[FRONT] = _by_id(front)
        return state.with_data(FINALISTS, {"found": by_target, "fit": fit, "measured": {}, "refused": refused})

    def _predictors(self, state: RunState) -> tuple[Predictors | None, str]:
        """The predictors, None without enough samples, and why a search must not use them."""
        if self.config.predictor == "fitness":
            return fitness_predictors(self.world.space), ""
        samples = _samples_in(state.data[SAMPLES])
        sound = sum(math.isfinite(s.loss) for s in samples)
        if sound < FEWEST_SAMPLES:
            return None, f"{sound} of {len(samples)} samples could be scored, and predictors need {FEWEST_SAMPLES}"
        seed = self.world.config.seed_for("search")
        predictors = fit_predictors(self.world.space.genome, samples, self.config, seed, self.latency)
        return predictors, predictors.refused

    def rounds_left(self, state: RunState) -> int:
        """One round, and one for latencies if needed; none without a finalist."""
        anything = any(state.data[FINALISTS]["found"].values())
        return self.rounds - state.round if anything else 0

    def subnets(self, state: RunState) -> Sequence[Architecture]:
        """Every finalist once, even if several targets share it."""
        by_target = state.data[FINALISTS]["found"]
        names = dict.fromkeys(name for candidates in by_target.values() for name in candidates)
        return [parse_architecture(name) for name in names]

    def merge(self, state: RunState, _plan: Plan, result: RoundResult) -> RoundUpdate:
        """Collects what was measured."""
        value = state.data[FINALISTS]
        measured = _with_measured(value["measured"], result.client_results)
        return RoundUpdate(state.with_data(FINALISTS, {**value, "measured": measured}))

    def end(self, state: RunState) -> RoundUpdate:
        """Stores the winners, and returns one row per finalist and the predictors' quality."""
        value = state.data[FINALISTS]
        if value["refused"]:
            logger.warning(
                "no subnet was searched: %s (later: fedloom search RUN --samples N --min-tau X)", value["refused"]
            )
        of_predictor = {"model": "predictor", "tier": SERVER, "split": "validation"}
        rows: list[Row] = [
            ("evaluations", {**of_predictor, "metric": name, "value": figure}) for name, figure in value["fit"].items()
        ]
        winners: dict[str, str] = {}
        for target in self.targets:
            samples, won = self.verified(state, target)
            rows += _sample_rows(self.world, target.name, 1, samples, self.config.metric, won)
            if won is None and not value["refused"]:
                above = target.measure == "latency_s" and any(math.isfinite(s.loss) for s in samples)
                why = (
                    "all measured latencies are above this target: raise method.search.tolerance or .verify"
                    if above
                    else "no subnet was found for this target, or none could be scored"
                )
                logger.warning("%s: %s", target.name, why)
            if won is not None:
                winners[target.name] = architecture_id(won.architecture)
        if FRONT in value["found"]:
            rows += _sample_rows(self.world, FRONT, 1, _measured_of(value, FRONT), self.config.metric)
        rows += _latency_rows("finalists", value["measured"])
        # The rows hold everything from here on; without removal every later checkpoint would contain it.
        return RoundUpdate(state.with_data(WINNERS, winners).without_data(FINALISTS, SAMPLES), rows)

    def verified(self, state: RunState, target: Target) -> tuple[list[Sample], Sample | None]:
        """The target's finalists that were measured, and the winner among them."""
        samples = _measured_of(state.data[FINALISTS], target.name)
        return samples, choose(target, samples, self.world.macs_table.cost, self.config.metric)


# -- measured values in the state, as JSON, and in tables -------------------------------------------------------------


def _with_measured(known: Any, results: Iterable[ClientResult]) -> Any:
    """The values of earlier rounds and of this one per architecture, as JSON values for the state."""
    measured = {name: dict(values) for name, values in known.items()}
    for result in results:
        for m in result.measurements:
            measured.setdefault(m.architecture, {})[m.metric] = None if math.isnan(m.value) else m.value
    return measured


def _samples_in(measured: Any) -> list[Sample]:
    """The measured subnets of a run's state."""

    def number(value: float | None) -> float:
        return math.nan if value is None else value

    return [
        Sample(parse_architecture(name), number(v.get("loss")), number(v.get("accuracy")), v.get("latency_s"))
        for name, v in measured.items()
    ]


def _measured_of(value: Any, target: str) -> list[Sample]:
    """The measured finalists of a target or of the front, in their predicted order."""
    measured = value["measured"]
    return _samples_in({name: measured[name] for name in value["found"][target] if name in measured})


def _by_id(metrics: dict[Architecture, float]) -> dict[str, float]:
    return {architecture_id(architecture): metric for architecture, metric in metrics.items()}


def _latency_rows(tier: str, measured: Any) -> list[Row]:
    """Measured latencies as rows: medians and interquartile ranges in seconds."""
    return [
        ("evaluations", {"model": SUPERNET, "tier": tier, "architecture": a, "metric": name, "value": values[name]})
        for a, values in measured.items()
        for name in ("latency_s", "latency_spread_s")
        if values.get(name) is not None
    ]


def _sample_rows(
    world: World, tier: str, generation: int, samples: Sequence[Sample], metric: str, won: Sample | None = None
) -> list[Row]:
    """Scored subnets as rows of `candidates`."""
    cost_of = world.macs_table.cost
    scored = [
        Scored(s.architecture, s.metric, s.loss, cost_of(s.architecture), generation, math.isfinite(s.loss))
        for s in samples
    ]
    ranked = [replace(s, metric=merit(metric, s.metric, s.loss)) for s in scored]
    front = {s.architecture for s in pareto_front(ranked)}
    return candidate_rows(world, tier, scored, front, won.architecture if won else None)


# -- search of a trained supernet for new targets, outside of a run ---------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A target's winner, with its predicted and measured scores on validation data."""

    target: str
    architecture: Architecture
    macs: float
    parameters: int
    predicted: float  # in the unit of the search's metric
    metric: float
    loss: float
    latency_s: float | None


def search_supernet(
    world: World,
    config: TargetSearchConfig,
    weights: Weights,
    samples: Sequence[Sample],
    executor: Executor,
) -> list[Found]:
    """Finds the winners for the configured targets with trained weights, by running the stages outside of a run.

    Without `samples`, new ones are measured; their latency is always measured, because it depends on the machine.
    Raises ValueError for targets outside the space, and if a predictor does not reach `min_tau`.
    """
    check_target_search(config, "search")
    targets = targets_of(world, config)
    for target in targets:
        check_reachable(target, world.space.genome, world.config.seed_for("search"))
    state = RunState().with_group(SUPERNET, weights)
    if samples:
        known = {architecture_id(s.architecture): {"loss": s.loss, "accuracy": s.metric} for s in samples}
        state = state.with_data(SAMPLES, known)
        if config.latency_s:
            stage = SampleStage(world, config, targets, [s.architecture for s in samples])
            state = _run_rounds(stage, replace(state, round=1), executor)
    else:
        sampling = SampleStage(world, config, targets)
        state = _run_rounds(sampling, sampling.begin(state), executor)
    verifying = VerifyStage(world, config, targets)
    state = _run_rounds(verifying, verifying.begin(replace(state, round=0)), executor)
    value = state.data[FINALISTS]
    if value["refused"]:
        raise ValueError(value["refused"])
    winners: list[Found] = []
    for target in targets:
        _, won = verifying.verified(state, target)
        if won is None:
            continue
        a, predicted = won.architecture, value["found"][target.name][architecture_id(won.architecture)]
        macs, parameters = world.macs_table.cost(a), int(world.space.cost_table("parameters").cost(a))
        predicted = in_unit(config.metric, predicted)
        winners.append(Found(target.name, a, macs, parameters, predicted, won.metric, won.loss, won.latency_s))
    return winners


def _run_rounds(stage: ScoringStage, state: RunState, executor: Executor) -> RunState:
    """Runs the remaining rounds of a stage in memory, without its end, rows and checkpoints."""
    while stage.rounds_left(state) > 0:
        plan = stage.plan(state)
        shared = SharedWeights(state.weights(plan.group), state.version(plan.group))
        result = merge_chunks(executor.run(make_chunks(plan.assignments, 1), shared))
        for client_result in result.client_results:
            if client_result.error:
                raise ValueError(f"{stage.name}: {client_result.error}")
        state = replace(stage.merge(state, plan, result).state, round=state.round + 1)
    return state
