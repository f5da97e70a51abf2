"""Stage 2 of FedorAS: per tier, a search over paths of the trained supernet, scored by the server or by clients."""

import logging
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np

from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.networks import ESTIMATED
from fedloom.platform.clients.scoring import CALIBRATION_SAMPLES, ScoreSubnets
from fedloom.platform.federation.algorithm import SUPERNET, Plan, RoundResult, RoundUpdate, Row, RunState
from fedloom.platform.federation.method import Stage
from fedloom.platform.federation.selection import (
    Cohort,
    choose_cohort,
    first_online_s,
    for_client,
    for_server,
    simulated_devices,
)
from fedloom.platform.federation.world import World
from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.search.base import Interval, Scored, Searcher, merit, pareto_front, winner
from fedloom.platform.search.config import SearchConfig, SearchProblem
from fedloom.platform.search.predictors import kendall_tau
from fedloom.platform.search.registry import build_searcher, generations_left, try_searcher
from fedloom.platform.settings import ONE_OR_MORE, UP_TO_A_MILLION
from fedloom.platform.spaces.capabilities import with_subspaces
from fedloom.platform.spaces.genome import Genome
from fedloom.platform.spaces.slices import Architecture, architecture_id, bytes_of, extract, parse_architecture
from fedloom.tiers.costs import CostTable

logger = logging.getLogger(__name__)

WINNERS = "winners"
"""The JSON value that holds the architecture found per tier or target."""

Scores = dict[str, Any]
"""Per architecture its loss, metric and number of samples."""


@dataclass
class TierSearchConfig(SearchConfig):
    """Stage 2: the searcher, and whether the server or clients score its candidates.

    With federated `scoring` (FedorAS, App. K.2), `scoring_rounds` cohorts of `clients_per_round` distinct eligible
    clients score a generation on their own validation data.
    """

    budgets: Annotated[
        list[Annotated[int, ONE_OR_MORE]] | None, "number of models to score per tier; null: budget for all"
    ] = None
    scoring: Annotated[Literal["central", "federated"], "central (on the server) or federated (on clients)"] = "central"
    scoring_rounds: Annotated[int, UP_TO_A_MILLION, "federated: cohorts that score a generation"] = 4
    clients_per_round: Annotated[int, UP_TO_A_MILLION, "federated: clients of a cohort"] = 10
    compare_with_central: Annotated[bool, "federated: also score on the server, to report Kendall's tau"] = True
    candidates_per_task: Annotated[int, UP_TO_A_MILLION, "number of candidates scored in one call"] = 8


def winner_of(state: RunState, tier: str) -> Architecture | None:
    """The architecture that the tier's search chose, None if it found no model."""
    name = state.data.get(WINNERS, {}).get(tier)
    return None if name is None else parse_architecture(name)


def with_winner(state: RunState, tier: str, architecture: Architecture) -> RunState:
    """The state in which the tier's search has chosen this architecture."""
    return state.with_data(WINNERS, {**state.data.get(WINNERS, {}), tier: architecture_id(architecture)})


def check_validation_data(world: World, *, federated: bool = False) -> None:
    """Raises ValueError without validation data for a search: the server's or, if federated, the clients'."""
    if not (world.data.sizes("validation").sum() if federated else world.data.num_central("validation")):
        raise ValueError(
            f"data.validation_share={world.config.data.validation_share:g} leaves no validation samples to search "
            "with: raise it, or give each client more samples"
        )


def check_statistics(world: World) -> None:
    """Raises ValueError if slices have running statistics, but there are no validation data to estimate them on."""
    if world.space.keeps_statistics and not world.data.num_central("validation"):
        raise ValueError(
            f"data.validation_share={world.config.data.validation_share:g} leaves no validation samples to estimate "
            "the running statistics of batch norms from: raise it, or choose a space without them, as by space.norm"
        )


@dataclass(frozen=True)
class Goal:
    """The goal of a search: models in a cost interval, and the clients that may score them.

    `table` has the costs in the interval's unit, `budget` is the number of models to score.
    """

    name: str
    interval: Interval
    table: CostTable
    eligible: np.ndarray
    budget: int


def tier_goals(world: World, config: TierSearchConfig) -> list[Goal]:
    """One goal per tier: models between its bounds."""
    budgets = config.budgets if config.budgets is not None else [config.budget] * len(world.tiers)
    if len(budgets) != len(world.tiers):
        raise ValueError(f"method.search.budgets has {len(budgets)} values for {len(world.tiers)} tiers")
    return [
        Goal(tier.name, Interval(tier.lower, tier.upper), costs, eligible, budget)
        for tier, costs, eligible, budget in zip(
            world.tiers, world.costs_by_tier, world.eligible_by_tier, budgets, strict=True
        )
    ]


class TierSearchStage(Stage):
    """Per round, asks the searcher for a generation of candidates, scores them, and tells it the scores."""

    def __init__(self, world: World, config: TierSearchConfig, goal: Goal, genome: Genome | None = None) -> None:
        self.federated = config.scoring == "federated"
        check_validation_data(world, federated=self.federated)
        self.world, self.config, self.goal = world, config, goal
        self.name = f"search/{goal.name}"
        # Names of the state's values: scores of this generation by the clients so far and by the server, accuracies,
        # and which clients scored it.
        self._pending, self._central, self._accuracies, self._asked = (
            f"{self.name}/{value}" for value in ("client_scores", "central", "accuracies", "asked")
        )
        space, seed = world.space, world.config.seed_for("search")
        genome = space.genome if genome is None else genome
        self._problem = SearchProblem(space.options, genome, goal.table, goal.interval, seed, goal.budget, config)
        try_searcher(self._problem)
        self._live = build_searcher(self._problem)  # a cache: `_searcher` rebuilds it where it does not fit the state

    def _searcher(self, state: RunState) -> Searcher:
        saved = state.data[self.name]
        if self._live.state() != saved:
            self._live = build_searcher(self._problem)
            self._live.restore(saved)
        return self._live

    @property
    def counted(self) -> str:
        """What `rounds_left` counts: generations, unless cohorts of clients score parts of one."""
        return "rounds" if self.federated else "generations"

    def begin(self, state: RunState) -> RunState:
        """Starts with a new searcher."""
        return state.with_data(self.name, build_searcher(self._problem).state())

    def rounds_left(self, state: RunState) -> int:
        """The expected rounds while the searcher has candidates to score, at least 1; then 0."""
        searcher = self._searcher(state)
        if not searcher.ask():
            return 0
        generations = max(1, generations_left(self._problem, len(searcher.history)))
        if not self.federated:
            return generations
        return generations * self.config.scoring_rounds - len(state.data.get(self._pending, []))

    def macs_left(self, state: RunState) -> float:
        """The MACs of scoring the remaining models."""
        num_scored = len(self._searcher(state).history) if self.name in state.data else 0
        everything = self.world.data.num_central("validation")
        is_estimated = self.config.statistics == ESTIMATED and self.world.space.keeps_statistics
        samples = self.config.validation_share * everything
        samples += min(CALIBRATION_SAMPLES, everything) if is_estimated else 0
        if self.federated:
            clients = self.config.scoring_rounds * self.config.clients_per_round
            of_clients = clients * everything / self.world.num_clients
            samples = of_clients + (samples if self.config.compare_with_central else 0.0)
        interval = self.goal.interval
        macs = self.world.expected_macs(self.goal.table, interval.lower, interval.upper)
        return max(0, self.goal.budget - num_scored) * samples * macs

    def plan(self, state: RunState) -> Plan:
        """The generation's candidates, for the server's workers or a cohort of clients."""
        candidates = self._searcher(state).ask()
        if not self.federated:
            return Plan(self._for_server(state, candidates), SUPERNET, chunk_size=1)
        part = len(state.data.get(self._pending, []))
        eligible = np.setdiff1d(self.goal.eligible, state.data.get(self._asked, []))
        starts_s = first_online_s(self.world, eligible, state.simulated_s)
        assignments = self._for_clients(state, candidates, part, eligible, starts_s)
        if self.config.compare_with_central and part == 0:
            assignments += self._for_server(state, candidates)
        return Plan(assignments, SUPERNET, chunk_size=1, starts_s=starts_s)

    def _for_server(self, state: RunState, candidates: Sequence[Architecture]) -> list[Assignment]:
        size, version = self.config.candidates_per_task, state.version(SUPERNET)
        alike = sorted(candidates, key=architecture_id)  # candidates of a task compute a common prefix once
        groups = [tuple(alike[i : i + size]) for i in range(0, len(alike), size)]
        share, statistics = self.config.validation_share, self.config.statistics
        tasks = [ScoreSubnets(group, version, share=share, statistics=statistics) for group in groups]
        return [for_server(self.name, state.round, task) for task in tasks]

    def _for_clients(
        self, state: RunState, candidates: Sequence[Architecture], part: int, eligible: np.ndarray, starts_s: float
    ) -> list[Assignment]:
        """The part-th cohort of a generation; a single draw for the whole generation makes its clients distinct.

        If devices are not always online, each cohort is drawn by itself, among clients that were in no cohort yet.
        """
        config, world, uniform = self.config, self.world, ComponentSpec("uniform")
        size = config.clients_per_round * config.scoring_rounds
        if world.availability is None:
            whole = choose_cohort(world, self.name, state.round - part, eligible, size, uniform, {})
            client_ids = tuple(c for i, c in enumerate(whole.client_ids) if i % config.scoring_rounds == part)
            whole = replace(whole, probability=whole.probability * len(client_ids) / max(1, len(whole.client_ids)))
        else:
            size = config.clients_per_round
            whole = choose_cohort(world, self.name, state.round, eligible, size, uniform, {}, now_s=starts_s)
            client_ids = whole.client_ids
        cohort = Cohort(client_ids, whole.probability, whole.reason)
        # The union of the candidates' operators is sent once.
        union = tuple(tuple(sorted(set(options))) for options in zip(*candidates, strict=True))
        slices = with_subspaces(world.space, "scoring=federated").subspace_slices(union)
        sent_bytes = bytes_of(extract(state.weights(SUPERNET), slices))
        version, statistics = state.version(SUPERNET), config.statistics
        task = ScoreSubnets(tuple(candidates), version, sent_bytes=sent_bytes, statistics=statistics)
        ordered = world.in_plan_order(cohort.client_ids)
        devices = simulated_devices(world, self.name, state.round, ordered)
        return [
            for_client(world, self.name, state.round, cohort, c, task, profile=profile, starts_s=starts_s)
            for c, profile in zip(ordered, devices, strict=True)
        ]

    def merge(self, state: RunState, plan: Plan, result: RoundResult) -> RoundUpdate:
        """Collects scores, and tells the searcher when those of the whole generation are complete."""
        central = [r for r in result.client_results if r.client_id is None]
        if not self.federated:
            return RoundUpdate(self._tell(state, _scores(central)))
        of_clients = _scores(r for r in result.client_results if r.client_id is not None)
        pending = [*state.data.get(self._pending, []), of_clients]
        if central:
            state = state.with_data(self._central, _scores(central))
        if len(pending) < self.config.scoring_rounds:
            if self.world.availability is not None:
                asked = [a.client_id for a in plan.assignments if a.client_id is not None]
                state = state.with_data(self._asked, [*state.data.get(self._asked, []), *asked])
            return RoundUpdate(state.with_data(self._pending, pending))
        state = state.without_data(self._asked)
        parts: dict[str, list[Any]] = {}
        for name, score in (item for part in pending for item in part.items()):
            parts.setdefault(name, []).append(score)
        scores = {name: _pooled(of_parts) for name, of_parts in parts.items()}
        rows: list[Row] = []
        if self.config.compare_with_central:
            rows.append(self._tau_row(scores, state.data[self._central]))
        return RoundUpdate(self._tell(state.with_data(self._pending, []), scores), rows)

    def _tell(self, state: RunState, scores: Scores) -> RunState:
        searcher = self._searcher(state)
        candidates = searcher.ask()
        nothing = (float("nan"), float("nan"), 0)
        values = [scores.get(architecture_id(a), nothing) for a in candidates]
        # A diverged model still has an accuracy (of always predicting the first class); it counts as failed.
        accuracies = [accuracy if math.isfinite(loss) else math.nan for loss, accuracy, _ in values]
        losses = [loss for loss, _, _ in values]
        merits = [merit(self.config.metric, *each) for each in zip(accuracies, losses, strict=True)]
        searcher.tell(candidates, merits, losses)
        if self.config.metric != "accuracy":  # the searcher does not keep them
            pairs = zip(candidates, accuracies, strict=True)
            new = {architecture_id(a): accuracy for a, accuracy in pairs if math.isfinite(accuracy)}
            state = state.with_data(self._accuracies, {**state.data.get(self._accuracies, {}), **new})
        return state.with_data(self.name, searcher.state())

    def _tau_row(self, scores: Scores, central: Scores) -> Row:
        names = [n for n in scores if n in central and all(map(math.isfinite, (*scores[n][:2], *central[n][:2])))]
        tau = math.nan  # for fewer than two models
        if len(names) > 1:
            merits = [[merit(self.config.metric, s[n][1], s[n][0]) for n in names] for s in (scores, central)]
            tau, _ = kendall_tau(*merits)
        values = {"model": "supernet", "tier": self.goal.name, "split": "validation", "metric": "kendall_tau_federated"}
        return "evaluations", {**values, "value": tau, "samples": len(names)}

    def end(self, state: RunState) -> RoundUpdate:
        """Stores the winner, and returns one row per candidate, marked if it is on the final Pareto front."""
        history, goal = self._searcher(state).history, self.goal
        feasible = [s for s in history if s.feasible]
        if len(history) < goal.budget:
            # Valid for a small tier, or if sampling finds no new model, but fewer than configured.
            logger.warning("%s: the search asked for %d models and found %d", goal.name, goal.budget, len(history))
        front = {s.architecture for s in pareto_front(history)}
        won = winner(feasible).architecture if feasible else None
        if history and won is None:
            logger.warning(
                "%s: none of %d models has a finite score, so that there is no winner", self.name, len(history)
            )
        measured = history
        if self.config.metric != "accuracy":  # the searcher was told losses
            known = state.data.get(self._accuracies, {})
            measured = [replace(s, metric=known.get(architecture_id(s.architecture), math.nan)) for s in history]
        if won is not None:
            state = with_winner(state, goal.name, won)
        # The rows hold the history from here on; without removal every later checkpoint would contain it.
        state = state.without_data(self.name, self._pending, self._accuracies, self._central)
        return RoundUpdate(state, candidate_rows(self.world, goal.name, measured, front, won))


def _scores(results: Iterable[ClientResult]) -> Scores:
    """The measured scores per architecture, pooled over results; a failed result has none."""
    parts: dict[str, list[tuple[float, float, int]]] = {}
    for result in results:
        measured = {(m.architecture, m.metric): m for m in result.measurements}
        for (name, metric), m in measured.items():
            if metric == "loss":
                parts.setdefault(name, []).append((m.value, measured[name, "accuracy"].value, m.samples))
    return {name: _pooled(of_results) for name, of_results in parts.items()}


def _pooled(scores: Sequence[tuple[float, float, int]]) -> tuple[float, float, int]:
    """The means of losses and metrics, weighted by samples (sequences, of a text); NaN without samples."""
    total = sum(samples for _, _, samples in scores)
    if total == 0:
        return (math.nan, math.nan, 0)
    loss, metric = (sum(s[i] * s[2] for s in scores if s[2]) / total for i in (0, 1))
    return (loss, metric, total)


def candidate_rows(
    world: World,
    tier: str,
    scored: Iterable[Scored],
    front: Container[Architecture],
    won: Architecture | None = None,
) -> list[Row]:
    """One row of the table `candidates` per scored architecture.

    `tier` is the tier or target of the search, `front` the candidates on its Pareto front, `won` the one that the
    search chose, None if it chose none.
    """
    macs, parameters = world.macs_table, world.space.cost_table("parameters")
    return [
        (
            "candidates",
            {
                "tier": tier,
                "generation": s.generation,
                "architecture": architecture_id(s.architecture),
                "macs": macs.cost(s.architecture),
                "parameters": int(parameters.cost(s.architecture)),
                "loss": s.loss,
                "metric": s.metric,
                "feasible": s.feasible,
                "on_front": s.architecture in front,
                "winner": s.architecture == won,
            },
        )
        for s in scored
    ]
