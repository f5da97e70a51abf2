"""Random NAS: random architectures of each tier, trained from fresh weights; the best on validation data is kept.

The baseline of FedorAS, Tab. 13 and App. F.1, where about 40 models in all cost as much as FedorAS.

for each tier, `models` times:
    draw a new architecture within the tier's bounds
    train it by FedAvg on the clients of the tier and above
    score it on validation data; keep the better of it and the best so far
evaluate every tier's best model
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.scoring import ScoreSubnet
from fedloom.platform.federation.algorithm import Plan, RoundResult, RoundUpdate, RunState
from fedloom.platform.federation.method import Method, Stage
from fedloom.platform.federation.selection import for_server
from fedloom.platform.federation.training_config import TrainingConfig, check_training
from fedloom.platform.federation.world import World
from fedloom.platform.methods.evaluation import (
    EvaluationConfig,
    EvaluationJob,
    EvaluationStage,
    OneRound,
    group_name,
    tier_job,
)
from fedloom.platform.methods.fedoras import tier_stage
from fedloom.platform.methods.tier_search import candidate_rows, check_validation_data, winner_of, with_winner
from fedloom.platform.search.base import METRIC_TEXT, Interval, Metric, Scored, merit, pareto_front, winner
from fedloom.platform.search.config import SearchConfig, SearchProblem
from fedloom.platform.search.generations import RandomSearch
from fedloom.platform.settings import UP_TO_A_THOUSAND
from fedloom.platform.spaces.slices import Architecture, architecture_id, parse_architecture

logger = logging.getLogger(__name__)

SCORES = "random_nas"
"""The JSON value that holds per tier the scores of its models so far: architecture, metric and loss."""


@dataclass
class RandomNasConfig:
    """FedAvg of random architectures of each tier, as FedorAS trains rand-init (Tab. 11)."""

    name: str = "random_nas"
    models: Annotated[int, UP_TO_A_THOUSAND, "number of architectures that are trained per tier"] = 10
    metric: Annotated[Metric | None, f"{METRIC_TEXT}; null: accuracy"] = None
    train: TrainingConfig = field(default_factory=lambda: TrainingConfig(rounds=500, lr=0.1, schedule="cosine"))
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


class ContestStage(OneRound):
    """Scores a tier's newest model on validation data, and keeps the better of it and the best so far."""

    def __init__(
        self, world: World, tier: int, number: int, architecture: Architecture, metric: str, *, last: bool
    ) -> None:
        """`last` says whether this is the tier's last model, after which the candidates' rows are written."""
        self.world, self.tier, self.metric, self.last = world, world.tiers[tier], metric, last
        self.number, self.architecture = number, architecture
        self.name = f"choice_{number}/{self.tier.name}"

    def plan(self, state: RunState) -> Plan:
        """The server scores the model."""
        task = ScoreSubnet(Subnet(self.architecture, stand_alone=True), model_name(self.number), "validation")
        return Plan([for_server(self.name, state.round, task)], self._group(self.number))

    def _group(self, number: int) -> str:
        return group_name(self.tier.name, model_name(number))

    def merge(self, state: RunState, _plan: Plan, result: RoundResult) -> RoundUpdate:
        """Adds the score; a model without a finite loss counts as failed."""
        (report,) = result.client_results
        finite = report.loss is not None and report.metric is not None and math.isfinite(report.loss)
        score = [architecture_id(self.architecture), report.metric if finite else None, report.loss]
        known = state.data.get(SCORES, {})
        scores = [*known.get(self.tier.name, []), score]
        return RoundUpdate(state.with_data(SCORES, {**known, self.tier.name: scores}))

    def end(self, state: RunState) -> RoundUpdate:
        """The state without the weights of the tier's other models than the best."""
        history = self._history(state.data[SCORES][self.tier.name])
        ranked = [replace(s, metric=merit(self.metric, s.metric, s.loss)) for s in history]
        feasible = [scored for scored in ranked if scored.feasible]
        won = winner(feasible) if feasible else None
        best = None if won is None else won.generation
        losers = [self._group(i) for i in range(len(history)) if i != best and self._group(i) in state.groups]
        state = state.without_groups(*losers)
        if won is not None:
            state = with_winner(state, self.tier.name, won.architecture)
        if not self.last:
            return RoundUpdate(state)
        front = {scored.architecture for scored in pareto_front(ranked)}
        chosen = None if won is None else won.architecture
        return RoundUpdate(state, candidate_rows(self.world, self.tier.name, history, front, chosen))

    def _history(self, scores: Sequence[Sequence[Any]]) -> list[Scored]:
        """The scores so far; a model's generation is its number."""

        def scored(number: int, name: str, metric: float | None, loss: float | None) -> Scored:
            architecture = parse_architecture(name)
            value, lost = (math.nan if x is None else x for x in (metric, loss))
            return Scored(
                architecture, value, lost, self.world.cost_table.cost(architecture), number, metric is not None
            )

        return [scored(number, *score) for number, score in enumerate(scores)]


def model_name(number: int) -> str:
    """The name of a tier's model while several compete."""
    return f"random_{number}"


def drawn(world: World, tier: int, models: int) -> list[Architecture]:
    """Distinct random architectures within the tier's bounds; fewer than `models` if there are fewer."""
    space, interval = world.space, Interval(world.tiers[tier].lower, world.tiers[tier].upper)
    seed, config = world.config.seed_for("search"), SearchConfig(offspring=models)
    problem = SearchProblem(space.options, space.genome, world.cost_table, interval, seed, models, config)
    return RandomSearch(problem).ask()


def best_jobs(world: World, state: RunState) -> list[EvaluationJob]:
    """The evaluation of every tier's best model."""
    jobs: list[EvaluationJob] = []
    for index, tier in enumerate(world.tiers):
        architecture = winner_of(state, tier.name)
        groups = [group for group in state.groups if group.startswith(group_name(tier.name, "random_"))]
        if architecture is not None and groups:
            jobs.append(tier_job(world, index, "random_nas", Subnet(architecture, stand_alone=True), groups[0]))
    return jobs


def stages(config: RandomNasConfig, world: World) -> list[Stage]:
    """Per tier and model the training and the choice, then the evaluation of the best ones."""
    check_training(config.train, "method.train", world.num_clients)
    check_validation_data(world)
    sequence: list[Stage] = []
    for tier in range(len(world.tiers)):
        architectures = drawn(world, tier, config.models)
        if len(architectures) < config.models:
            logger.warning(
                "%s: method.models asks for %d models, but its bounds hold only %d",
                *(world.tiers[tier].name, config.models, len(architectures)),
            )
        for number, architecture in enumerate(architectures):
            last = number == len(architectures) - 1
            sequence.append(tier_stage(world, config.train, tier, model_name(number), "method.train", architecture))
            sequence.append(ContestStage(world, tier, number, architecture, config.metric or "accuracy", last=last))
    jobs = EvaluationStage(world, config.evaluation, lambda state: best_jobs(world, state), len(world.tiers))
    return [*sequence, jobs]


METHOD = Method(RandomNasConfig, stages, kind="tiers")
