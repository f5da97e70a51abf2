"""Stage 2 of FedorAS: per tier, a search over paths of the trained supernet, scored by the server or by clients."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np

from fedloom.platform.clients.assignments import Assignment, ClientResult, Measurement
from fedloom.platform.clients.networks import ESTIMATED
from fedloom.platform.clients.scoring import CALIBRATION_SAMPLES, ScoreSubnets
from fedloom.platform.federation.algorithm import (
    SUPERNET,
    Plan,
    RoundResult,
    RoundUpdate,
    Row,
    RunState,
    Stage,
    choose_cohort,
    for_client,
    for_server,
)
from fedloom.platform.federation.selection import Cohort
from fedloom.platform.federation.world import World, expected_macs
from fedloom.platform.methods.candidates import candidate_rows
from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.search.base import Interval, Scored, Searcher, merit, pareto_front, winner
from fedloom.platform.search.config import SearchConfig, SearchProblem, build_searcher, generations_left, try_searcher
from fedloom.platform.search.predictors import kendall_tau
from fedloom.platform.settings import ONE_OR_MORE, UP_TO_A_MILLION
from fedloom.platform.spaces.capabilities import with_subspaces
from fedloom.platform.spaces.genome import Genome
from fedloom.platform.spaces.slices import Architecture, architecture_id, bytes_of, extract, parse_architecture
from fedloom.tiers.costs import CostTable

logger = logging.getLogger(__name__)

WINNERS = "winners"
CLIENT_SCORES = "client_scores"
UNIFORM = ComponentSpec("uniform")


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


def check_validation_data(world: World, *, federated: bool = False) -> None:
    """Raises ValueError if there is no validation data for a search, or none of clients for a federated one."""
    if not (world.data.sizes("validation").sum() if federated else world.data.num_central("validation")):
        raise ValueError(
            f"data.validation_share={world.config.data.validation_share:g} leaves no validation samples to search "
            "with: raise it, or give each client more samples"
        )


def check_statistics(world: World) -> None:
    """Raises ValueError if slices are to be scored whose running statistics cannot be estimated without such data."""
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

    def __init__(self, world: World, config: TierSearchConfig, goal: "Goal", genome: Genome | None = None) -> None:
        check_validation_data(world, federated=config.scoring == "federated")
        self.world, self.config, self.goal, self.genome = world, config, goal, genome
        self.name = f"search/{goal.name}"
        self.federated = config.scoring == "federated"
        self.budget = goal.budget
        try_searcher(self._problem)
        self._live = self._fresh()  # a cache: `_searcher` rebuilds it from the state whenever it does not fit

    @property
    def _problem(self) -> SearchProblem:
        space, goal = self.world.space, self.goal
        seed = self.world.config.seed_for("search")
        genome = space.genome if self.genome is None else self.genome
        return SearchProblem(space.options, genome, goal.table, goal.interval, seed, self.budget, self.config)

    def _fresh(self) -> Searcher:
        return build_searcher(self._problem)

    def _searcher(self, state: RunState) -> Searcher:
        saved = state.data[self.name]
        if self._live.state() != saved:
            self._live = self._fresh()
            self._live.restore(saved)
        return self._live

    @property
    def counted(self) -> str:
        """Generations, unless cohorts of clients score parts of one."""
        return "rounds" if self.federated else "generations"

    def begin(self, state: RunState) -> RunState:
        """Starts with a new searcher."""
        return state.with_data(self.name, self._fresh().state())

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
        """Those of the models that are still to be scored."""
        scored = len(self._searcher(state).history) if self.name in state.data else 0
        everything = self.world.data.num_central("validation")
        is_estimated = self.config.statistics == ESTIMATED and self.world.space.keeps_statistics
        samples = self.config.validation_share * everything
        samples += min(CALIBRATION_SAMPLES, everything) if is_estimated else 0
        if self.federated:
            clients = self.config.scoring_rounds * self.config.clients_per_round
            own = clients * everything / self.world.num_clients
            samples = own + (samples if self.config.compare_with_central else 0.0)
        interval = self.goal.interval
        macs = expected_macs(self.world, self.goal.table, interval.lower, interval.upper)
        return max(0, self.budget - scored) * samples * macs

    def plan(self, state: RunState) -> Plan:
        """The generation's candidates, for the server's workers or a cohort of clients."""
        candidates = self._searcher(state).ask()
        if not self.federated:
            return Plan(self._central(state, candidates), SUPERNET, chunk_size=1)
        pending = state.data.get(self._pending, [])
        assignments = self._clients(state, candidates, len(pending))
        if self.config.compare_with_central and len(pending) == 0:
            assignments += self._central(state, candidates)
        return Plan(assignments, SUPERNET, chunk_size=1)

    @property
    def _pending(self) -> str:
        return f"{self.name}/{CLIENT_SCORES}"

    def _central(self, state: RunState, candidates: Sequence[Architecture]) -> list[Assignment]:
        size, version = self.config.candidates_per_task, state.version(SUPERNET)
        alike = sorted(candidates, key=architecture_id)  # those of a task compute once what they begin with
        groups = [tuple(alike[i : i + size]) for i in range(0, len(alike), size)]
        share, statistics = self.config.validation_share, self.config.statistics
        tasks = [ScoreSubnets(group, version, share=share, statistics=statistics) for group in groups]
        return [for_server(self.name, state.round, task) for task in tasks]

    def _clients(self, state: RunState, candidates: Sequence[Architecture], part: int) -> list[Assignment]:
        cohort = self._cohort(state.round - part, part)
        sent_bytes = bytes_of(extract(state.weights(SUPERNET), self._union(candidates)))
        version, statistics = state.version(SUPERNET), self.config.statistics
        task = ScoreSubnets(tuple(candidates), version, sent_bytes=sent_bytes, statistics=statistics)
        ordered = self.world.in_plan_order(cohort.client_ids)
        return [for_client(self.world, self.name, state.round, cohort, c, task) for c in ordered]

    def _cohort(self, first_round: int, part: int) -> Cohort:
        """The part-th cohort of a generation; a single draw for the whole generation makes its clients distinct."""
        size = self.config.clients_per_round
        wanted = size * self.config.scoring_rounds
        whole = choose_cohort(self.world, self.name, first_round, self.goal.eligible, wanted, UNIFORM, {})
        own = tuple(c for i, c in enumerate(whole.client_ids) if i % self.config.scoring_rounds == part)
        return Cohort(own, whole.probability, whole.reason)

    def _union(self, candidates: Iterable[Architecture]) -> Mapping[str, Any]:
        """The slices of the union of the candidates' operators, which is sent once."""
        space = with_subspaces(self.world.space, "scoring=federated")
        kept = tuple(tuple(sorted(set(options))) for options in zip(*candidates, strict=True))
        return space.subspace_slices(kept)

    def merge(self, state: RunState, _plan: Plan, result: RoundResult) -> RoundUpdate:
        """Collects scores, and tells the searcher when those of the whole generation are complete."""
        central = [r for r in result.client_results if r.client_id is None]
        if not self.federated:
            return RoundUpdate(self._tell(state, _scores(central)))
        pending = [
            *state.data.get(self._pending, []),
            _scores(r for r in result.client_results if r.client_id is not None),
        ]
        rows: list[Row] = []
        if central:
            state = state.with_data(f"{self.name}/central", _scores(central))
        if len(pending) < self.config.scoring_rounds:
            return RoundUpdate(state.with_data(self._pending, pending))
        scores = _pooled(pending)
        if self.config.compare_with_central:
            rows.append(self._tau_row(scores, state.data[f"{self.name}/central"]))
        return RoundUpdate(self._tell(state.with_data(self._pending, []), scores), rows)

    def _tell(self, state: RunState, scores: "Scores") -> RunState:
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
            told = zip(candidates, accuracies, strict=True)
            new = {architecture_id(a): accuracy for a, accuracy in told if math.isfinite(accuracy)}
            state = state.with_data(self._accuracies, {**state.data.get(self._accuracies, {}), **new})
        return state.with_data(self.name, searcher.state())

    @property
    def _accuracies(self) -> str:
        return f"{self.name}/accuracies"

    def _measured(self, state: RunState) -> list[Scored]:
        """The searcher's history with accuracies, also where it was told losses."""
        history = self._searcher(state).history
        if self.config.metric == "accuracy":
            return history
        known = state.data.get(self._accuracies, {})
        return [replace(s, metric=known.get(architecture_id(s.architecture), math.nan)) for s in history]

    def _tau_row(self, scores: "Scores", central: "Scores") -> Row:
        names = [n for n in scores if n in central and all(map(math.isfinite, (*scores[n][:2], *central[n][:2])))]
        tau = math.nan  # of fewer than two models
        if len(names) > 1:
            merits = [[merit(self.config.metric, s[n][1], s[n][0]) for n in names] for s in (scores, central)]
            tau, _ = kendall_tau(*merits)
        values = {"model": "supernet", "tier": self.goal.name, "split": "validation", "metric": "kendall_tau_federated"}
        return "evaluations", {**values, "value": tau, "samples": len(names)}

    def end(self, state: RunState) -> RoundUpdate:
        """Stores the winner, and returns one row per candidate, marked if it is on the final Pareto front."""
        history = self._searcher(state).history
        feasible = [s for s in history if s.feasible]
        if len(history) < self.budget:
            # Valid for a small tier, or if sampling finds no new model, but fewer than configured.
            logger.warning("%s: the search asked for %d models and found %d", self.goal.name, self.budget, len(history))
        front = {s.architecture for s in pareto_front(history)}
        won = winner(feasible).architecture if feasible else None
        rows = candidate_rows(self.world, self.goal.name, self._measured(state), front, won)
        if won is not None:
            winners = {**state.data.get(WINNERS, {}), self.goal.name: architecture_id(won)}
            state = state.with_data(WINNERS, winners)
        # The rows hold the history from here on; without removal every later checkpoint would contain it.
        return RoundUpdate(state.without_data(self.name, self._pending, self._accuracies, f"{self.name}/central"), rows)


Scores = dict[str, Any]
"""Per architecture its loss, metric and number of samples."""


def _scores(reports: Iterable[ClientResult]) -> Scores:
    """Scores pooled over reports, weighted by samples; failed reports have none."""
    by_name: dict[str, dict[str, list[Measurement]]] = {}
    for report in reports:
        for m in report.measurements:
            by_name.setdefault(m.architecture, {}).setdefault(m.metric, []).append(m)
    return {name: _weighted(values["loss"], values["accuracy"]) for name, values in by_name.items()}


def _weighted(losses: list[Measurement], metrics: list[Measurement]) -> tuple[float, float, int]:
    samples = np.array([m.samples for m in losses], dtype=np.float64)
    total = samples.sum()
    if total == 0:
        return (float("nan"), float("nan"), 0)
    loss = float(sum(m.value * m.samples for m in losses if m.samples) / total)
    metric = float(sum(m.value * m.samples for m in metrics if m.samples) / total)
    return (loss, metric, int(total))


def _pooled(parts: Sequence[Scores]) -> Scores:
    names = list(dict.fromkeys(name for part in parts for name in part))
    pooled: Scores = {}
    for name in names:
        values = [part[name] for part in parts if name in part and part[name][2] > 0]
        samples = sum(v[2] for v in values)
        if samples:
            means = [sum(v[i] * v[2] for v in values) / samples for i in (0, 1)]
            pooled[name] = (means[0], means[1], samples)
    return pooled
