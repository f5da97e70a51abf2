"""Shared by the methods that scale width or depth: a network size per tier, and the tiers' models at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import numpy as np

from fedloom.platform.clients.assignments import Assignment, ClientResult, client_of
from fedloom.platform.clients.evaluation import estimate_statistics
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.objectives import OBJECTIVES, masks_in_mean
from fedloom.platform.clients.scoring import ScoreSubnets, loaded_subnet, statistics_of, statistics_update
from fedloom.platform.clients.trainer import Train
from fedloom.platform.data.trees import rows_of
from fedloom.platform.federation.algorithm import (
    SUPERNET,
    Plan,
    Round,
    RoundResult,
    RoundTasks,
    RoundUpdate,
    TrainingStage,
    fresh_supernet,
)
from fedloom.platform.federation.method import Stage
from fedloom.platform.federation.selection import Choice, Cohort, for_client
from fedloom.platform.federation.training_config import TrainingConfig, check_training, rules_of
from fedloom.platform.methods.evaluation import EvaluationConfig, EvaluationJob, EvaluationStage, group_name, tier_job
from fedloom.platform.methods.tier_search import check_statistics
from fedloom.platform.seeding import stream
from fedloom.platform.settings import ONE_OR_MORE
from fedloom.platform.spaces.base import LeadingSpace
from fedloom.platform.spaces.slices import Architecture, Weights, bytes_of, extract
from fedloom.tiers.devices import EVALUATION_FACTOR

if TYPE_CHECKING:
    from fedloom.platform.clients.networks import Countable
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.federation.algorithm import RunState
    from fedloom.platform.federation.world import World
    from fedloom.platform.spaces.base import SearchSpace


@dataclass
class WidthConfig:
    """The settings that the methods with a size per tier have in common."""

    name: str = ""
    train: TrainingConfig = field(default_factory=TrainingConfig)
    statistics_clients: Annotated[
        int | None, ONE_OR_MORE, "clients that measure each tier's batch norms at the end; null: all"
    ] = None
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


def plainly_weighted() -> TrainingConfig:
    """Training in which all clients have equal weight."""
    return TrainingConfig(weighting="plain")


def tier_stages(
    world: World,
    model: str,
    train: TrainingConfig,
    evaluation: EvaluationConfig,
    network: Callable[[Round, int], Countable],
    *,
    client: Callable[[Round, int, Train], Train] = lambda _round, _client_id, task: task,
    more: Callable[[Weights], Weights] = lambda _weights: {},
    after: Callable[[RunState, Plan, RoundResult], RunState] = lambda state, _plan, _result: state,
    countable: bool = True,
    statistics_clients: int | None = None,
) -> list[Stage]:
    """Training of each client's `network` (given the round and the client's id), the tiers' models, their evaluation.

    `model` is the models' name in the tables; `client` replaces a client's training task; `more` returns further
    tensors of the server, given the initial weights; `after` changes the state after every round; `countable` says
    whether its costs are known without training; at the end, `statistics_clients` clients (None: all) measure each
    tier's batch norms, if subnets need estimated statistics.
    """
    if (train.privacy.clip is not None or train.privacy.secure) and world.space.keeps_statistics:
        raise ValueError(
            f"method.train.privacy: {model}'s clients measure batch norms without noise or masks at the end; use "
            "space.norm=none"
        )
    if train.evaluate_every:
        check_statistics(world)
    check_training(train, "method.train", world.num_clients)
    rules, shown = rules_of(train, "method.train"), tuple(dict.fromkeys(largest_of_tiers(world)))

    def task(round_: Round, client_id: int) -> Train:
        return client(round_, client_id, Train(network(round_, client_id), round_.local, rules.weighting))

    def initial(state: RunState) -> Weights | None:
        weights = fresh_supernet(world)(state)
        return weights if weights is None else {**weights, **more(weights)}

    training = TrainingStage(
        *(world, train, rules),
        name=SUPERNET,
        initial=initial,
        tasks=lambda round_: RoundTasks([task(round_, client_id) for client_id in round_.client_ids]),
        score=lambda state: [ScoreSubnets(shown, state.version(SUPERNET))],
        after=after,
        countable=countable,
    )
    models = TierModelsStage(world, model, statistics_clients)
    return [training, models, EvaluationStage(world, evaluation, models.jobs, len(world.tiers))]


def of_widths(space: SearchSpace, who: str) -> LeadingSpace:
    """The space, if its only decision is the width, or the rank of adapters; ValueError for any other."""
    if not isinstance(space, LeadingSpace):
        raise ValueError(
            f"{who} cannot use space {space.name}, whose subnets are not widths of one network: choose "
            "space.name=cnn_width, resnet_width, lstm_width, width with a network of your own, or space.lora.ranks"
        )
    return space


def refuse_what_stays(train: TrainingConfig, who: str, why: str) -> None:
    """Raises ValueError for rules that keep tensors between rounds, and for clients that keep state or weights."""
    if train.asynchronous is not None:
        raise ValueError(
            f"method.train.asynchronous={train.asynchronous}: {who} {why}, so answers from older weights would not "
            "fit: leave it out (null); method.train.arrivals alone selects more clients than it waits for"
        )
    if train.optimizer_state == "kept":
        raise ValueError(
            f"method.train.optimizer_state=kept: {who} {why}, so the state that clients keep would not fit: use fresh"
        )
    if "top_k" in train.processors:
        raise ValueError(
            f"method.train.processors: {who} {why}, so what top_k has not yet sent would not fit: use sparsify, which "
            "keeps nothing"
        )
    if train.server != "replace" or train.local_rule not in ("sgd", "fedprox"):
        raise ValueError(
            f"method.train.local_rule={train.local_rule} and method.train.server={train.server}: {who} {why}, so what "
            "rules keep would not fit: use sgd or fedprox, and replace"
        )


def refuse_masked_rows(world: World, who: str) -> None:
    """Raises ValueError for an objective that masks a classifier's rows in the mean, in networks with several ones."""
    if masks_in_mean(OBJECTIVES.make(world.spec.objective)):
        raise ValueError(
            f"objective.name=masked_classes: {who}'s networks have several classifiers, and only the rows of one would "
            "be left out of the mean: set objective.options.in_mean=false"
        )


def within(world: World, budget: float) -> list[Architecture]:
    """The architectures whose cost is within a budget, smallest first."""
    cost = world.cost_table.cost
    return sorted((a for a in world.space.enumerate() if cost(a) <= budget), key=cost)


def largest_of_tiers(world: World) -> list[Architecture]:
    """The largest network of every tier; ValueError for a tier that cannot train any."""
    largest = []
    for tier in world.tiers:
        affordable = within(world, tier.upper)
        if not affordable:
            least = world.cost_table.cost(world.space.smallest)
            raise ValueError(
                f"{tier.name} may spend {tier.upper:.6g} {world.cost_table.measure}, the smallest network costs "
                f"{least:.6g}: raise its upper bound, or make the space's smallest network smaller"
            )
        largest.append(affordable[-1])
    return largest


@dataclass(frozen=True)
class Statistics:
    """Measures a network's batch norms in one pass over a client's training data (HeteroFL's static batch norm)."""

    subnet: Subnet

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Sends the statistics, weighted by the client's samples."""
        module = loaded_subnet(worker, self.subnet, weights)
        x, _ = worker.client_data(client_of(assignment), "train")
        estimate_statistics(module, x)
        return replace(self.account(worker, assignment), update=statistics_update(module, float(rows_of(x))))

    def account(self, worker: Worker, assignment: Assignment) -> ClientResult:
        """The costs of `run`, counted without a pass."""
        samples = worker.data.size(client_of(assignment), "train")
        module = worker.subnet(self.subnet.architecture)
        return ClientResult(
            samples=samples,
            macs=worker.spec.macs_table.cost(self.subnet.architecture) * samples,
            bytes_down=bytes_of(worker.tensors_of(module)),
            bytes_up=bytes_of(statistics_of(module)),
            clock_factor=EVALUATION_FACTOR,
        )


class TierModelsStage(Stage):
    """Cuts every tier's model from the shared weights; clients then measure its running statistics, if it has any.

    One round per tier. The mean over clients, weighted by samples, replaces the trained statistics.
    """

    name = "tier_models"
    measures_statistics = True

    def __init__(self, world: World, model: str, clients: int | None) -> None:
        """`clients` is the number of clients that measure each tier's statistics, None for all."""
        self.world, self.model, self.clients = world, model, clients
        self.architectures = largest_of_tiers(world)

    def group(self, tier: int) -> str:
        """The tensor group of a tier's model."""
        return group_name(self.world.tiers[tier].name, self.model)

    def subnet(self, tier: int) -> Subnet:
        """A tier's network."""
        return Subnet(self.architectures[tier], stand_alone=True)

    def begin(self, state: RunState) -> RunState:
        """The state with the tiers' models."""
        if SUPERNET not in state.groups:
            return state
        for tier, architecture in enumerate(self.architectures):
            cut = extract(state.weights(SUPERNET), self.world.space.slices(architecture))
            state = state.with_group(self.group(tier), {name: tensor.clone() for name, tensor in cut.items()})
        return state

    def rounds_left(self, state: RunState) -> int:
        """One per tier, none for networks without running statistics."""
        needed = self.world.space.keeps_statistics and SUPERNET in state.groups
        return len(self.world.tiers) - state.round if needed else 0

    def macs_left(self, state: RunState) -> float:
        """The MACs of a pass over the clients' data per tier."""
        return self.world.evaluation_macs(2 * max(0, len(self.world.tiers) - state.round))

    def plan(self, state: RunState) -> Plan:
        """The measurement of one tier's statistics, by uniformly drawn clients with samples."""
        world, index = self.world, state.round
        eligible = np.flatnonzero(np.asarray(world.data.sizes("train")) > 0)
        rng = stream(world.config.seed_for("selection"), "statistics", index)
        choice = Choice(index, len(eligible), eligible, rng, True, lambda _: True, {}, lambda _: 0)
        drawn = choice.draw(self.clients) if self.clients is not None else tuple(eligible.tolist())
        cohort, task = Cohort(drawn, reason="statistics"), Statistics(self.subnet(index))
        planned = [for_client(world, self.name, index, cohort, c, task) for c in world.in_plan_order(drawn)]
        # A measurement, not a round of the simulated federation: without its dropout and deadline.
        return Plan([replace(a, dropped="", deadline_s=None) for a in planned], self.group(index))

    def merge(self, state: RunState, _plan: Plan, result: RoundResult) -> RoundUpdate:
        """The tier's model with the mean statistics."""
        group = self.group(state.round)
        if not result.sums.updates:
            raise ValueError(f"{self.name}: no client has measured the batch norms of {group}; see the table clients")
        return RoundUpdate(state.with_group(group, result.sums.finish(state.weights(group)).weights))

    def jobs(self, state: RunState) -> list[EvaluationJob]:
        """The evaluation of every tier's model, on the clients of the tier."""
        if SUPERNET not in state.groups:
            return []
        tiers = range(len(self.world.tiers))
        return [tier_job(self.world, tier, self.model, self.subnet(tier), self.group(tier)) for tier in tiers]
