"""Federated training of an elastic supernet, or of one of its subnets alone: who gets what, and what it counts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from fedloom.platform.averaging.shares import Shares, SharesConfig, Sharing, check_shares, shares_rule
from fedloom.platform.clients.execution import Assignment, Task
from fedloom.platform.clients.tasks import ScoreSubnet, TrainSubnet, TrainSupernet, architecture_id
from fedloom.platform.clients.training import LocalSGD, TrainingConfig, check_training, cohort_size, learning_rate
from fedloom.platform.federation.distribution import (
    FEWEST_FOR_SANDWICH,
    NEED_A_FAMILY,
    SANDWICHES,
    Handout,
    count_served,
    distribute,
    heuristic,
)
from fedloom.platform.federation.stage import KeptModel, Merged, Plan, RoundResult
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.world import SERVER, World
from fedloom.platform.methods.rows import evaluation_rows
from fedloom.platform.methods.supernet_stage import SUPERNET
from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.spaces.base import Architecture
from fedloom.platform.spaces.elastic import ElasticSpace

SERVED = "served"
"""The counters of who had the largest and the smallest subnet, in the run's state."""
ALONE = "alone"
"""The model that was trained without a supernet."""
TRAVELS = ("slices", "supernet")


@dataclass
class DistributionConfig:
    """Which client gets which subnet: random, sandwich, tracking_sandwich, static, dynamic, or module:function.

    With `tier_aware` no client gets a subnet above its tier's budget of the round.
    """

    heuristic: str = "tracking_sandwich"
    tier_aware: bool = False


@dataclass
class ShrinkingConfig:
    """Progressive shrinking on the clients, where the whole supernet travels (multi-stage PS+FL).

    Every batch adds up the gradients of `subnets_per_batch` random subnets; in the first `depth_share` of the rounds
    only depths are drawn, with the widest blocks, then widths, too.
    """

    subnets_per_batch: int = 4
    depth_share: float = 0.5


@dataclass
class ElasticTrainingConfig(TrainingConfig):
    """Training of an elastic supernet (SuperFed, Sec. 4; plain SGD, clip 1).

    `travels` is slices (each client its subnet) or supernet (all of it to everybody; see `shrinking`). `weighting` is
    fedavg (a client counts its samples), plain, or another rule of `platform.weighting`. `evaluate` names subnets that
    are scored on validation data every `evaluate_every` rounds.
    """

    rounds: int = 1500
    clients_per_round: int | None = 8
    epochs: int = 5
    batch_size: int = 64
    momentum: float = 0.0
    clip_norm: float = 1.0
    travels: str = "slices"
    distribution: DistributionConfig = field(default_factory=DistributionConfig)
    shares: SharesConfig = field(default_factory=SharesConfig)
    shrinking: ShrinkingConfig = field(default_factory=ShrinkingConfig)
    evaluate: list[str] = field(default_factory=lambda: ["smallest", "largest"])


def check_elastic_training(
    config: ElasticTrainingConfig, key: str, num_clients: int, family: int, *, separately: bool = False
) -> None:
    """Raises ValueError for values that no training can run with; `key` is the configuration key of the stage."""
    check_training(config, key, num_clients)
    check_shares(config.shares, f"{key}.shares")
    if config.travels not in TRAVELS:
        raise ValueError(f"{key}.travels={config.travels!r}: allowed are {', '.join(TRAVELS)}")
    name = config.distribution.heuristic
    try:
        heuristic(name)
    except ValueError as error:
        raise ValueError(f"{key}.distribution.heuristic: {error}") from error
    hands_out = config.travels == "slices" and not separately  # else all clients of a round get the same
    if hands_out and name in SANDWICHES and cohort_size(config, num_clients) < FEWEST_FOR_SANDWICH:
        raise ValueError(
            f"{key}.clients_per_round={config.clients_per_round}: {name} needs at least {FEWEST_FOR_SANDWICH}, one for "
            "the largest, one for the smallest and one for a random subnet; raise it, or choose another heuristic"
        )
    if config.distribution.tier_aware and not hands_out:
        raise ValueError(
            f"{key}.distribution.tier_aware=true: where all clients get the same model nobody's budget is looked at; "
            "use travels=slices and a supernet, or leave it out"
        )
    if hands_out and name in NEED_A_FAMILY and family < 1:
        raise ValueError(f"{key}.distribution.heuristic={name} hands out a fixed family: give method.family")
    if config.shrinking.subnets_per_batch < 1:
        raise ValueError(f"{key}.shrinking.subnets_per_batch={config.shrinking.subnets_per_batch}: must be at least 1")
    if not 0 <= config.shrinking.depth_share <= 1:
        raise ValueError(f"{key}.shrinking.depth_share={config.shrinking.depth_share}: must be between 0 and 1")


def bag_of(architecture: Architecture) -> str:
    """The bag of a subnet that is trained alone."""
    return f"{ALONE}-{architecture_id(architecture)}"


def elastic_space(world: World) -> ElasticSpace:
    """The run's space; ValueError if it is not an elastic one."""
    if not isinstance(world.space, ElasticSpace):
        raise ValueError(f"{world.config.space.name} is not an elastic space: choose resnet_elastic or tcn_elastic")
    return world.space


def named_subnet(space: ElasticSpace, text: str, key: str) -> Architecture:
    """The subnet of a configured text; ValueError naming the configuration key and the field outside the space."""
    try:
        return space.parse(text)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


class ElasticStage:
    """Trains the supernet, or with `alone` one subnet from fresh weights of its own (FedAvg; iFedAvg's members)."""

    accountable = True

    def __init__(
        self,
        world: World,
        config: ElasticTrainingConfig,
        family: tuple[Architecture, ...] = (),
        alone: Architecture | None = None,
    ) -> None:
        self.world, self.config, self.family, self.alone = world, config, family, alone
        self.space = elastic_space(world)
        named = [named_subnet(self.space, text, "method.train.evaluate") for text in config.evaluate]
        self.evaluated = [alone] if alone else named
        self.name = SUPERNET if alone is None else f"{ALONE}/{architecture_id(alone)}"
        self.bag = SUPERNET if alone is None else bag_of(alone)
        self.heuristic, self.shares = heuristic(config.distribution.heuristic), shares_rule(config.shares.rule)

    def begin(self, state: RunState) -> RunState:
        """Fresh weights, and nobody served."""
        seed = self.world.config.seed_for("initialisation")
        if self.alone is not None:
            weights = self.space.initial_subnet_weights(self.alone, torch_stream(seed, self.bag))
            return state.with_bag(self.bag, weights)
        weights = self.space.initial_weights(torch_stream(seed, SUPERNET))
        return state.with_bag(SUPERNET, weights).with_data(SERVED, {})

    def rounds_left(self, state: RunState) -> int:
        """Rounds still to come."""
        return self.config.rounds - state.round

    def plan(self, state: RunState) -> Plan:
        """The round's cohort, each client with its task and its share."""
        world, round_ = self.world, state.round
        cohort = world.select(self.name, round_, world.eligible_by_tier[0], self.config.clients_per_round)
        given = self._given(state, cohort.client_ids)
        ordered = world.in_plan_order(cohort.client_ids)
        shares = self._shares(round_, [given[c] for c in ordered])
        assignments = [
            world.assign(self.name, round_, cohort, c, self._task(given[c], share, round_))
            for c, share in zip(ordered, shares.values, strict=True)
        ]
        if self.config.evaluate_every and round_ % self.config.evaluate_every == 0:
            assignments += self._scores(round_)
        return Plan(assignments, self.bag, {"lr": learning_rate(self.config, round_), **shares.schedules})

    def _given(self, state: RunState, client_ids: tuple[int, ...]) -> Mapping[int, Architecture]:
        if self.alone is not None:
            return dict.fromkeys(client_ids, self.alone)
        if self.config.travels == "supernet":
            return dict.fromkeys(client_ids, self.space.largest)
        world, round_ = self.world, state.round
        aware = self.config.distribution.tier_aware
        budgets = tuple(world.training_budget(c, self.name, round_) if aware else inf for c in client_ids)
        rng = stream(world.config.seed_for("training"), "distribution", self.name, round_)
        handout = Handout(
            self.space, world.cost_table, round_, client_ids, budgets, self.family, state.data[SERVED], rng
        )
        return distribute(self.heuristic, handout)

    def _shares(self, round_: int, architectures: list[Architecture]) -> Shares:
        if self.alone is not None or self.config.travels == "supernet":
            return Shares([1.0] * len(architectures))
        is_largest = tuple(architecture == self.space.largest for architecture in architectures)
        config, clients = self.config, cohort_size(self.config, self.world.num_clients)
        return self.shares(Sharing(config.shares, round_, config.rounds, clients, is_largest))

    def _task(self, architecture: Architecture, share: float, round_: int) -> Task:
        config = self.config
        local = LocalSGD.of(config, round_, augment=self.world.config.data.augment != "none")
        if self.alone is None and config.travels == "supernet":
            widest = round_ < config.shrinking.depth_share * config.rounds
            return TrainSupernet(local, config.shrinking.subnets_per_batch, widest, config.weighting, share)
        return TrainSubnet(architecture, local, config.weighting, share, stand_alone=self.alone is not None)

    def _scores(self, round_: int) -> list[Assignment]:
        alone = self.alone is not None
        tasks = [ScoreSubnet(a, ALONE if alone else SUPERNET, "validation", alone) for a in self.evaluated]
        return [Assignment(self.name, round_, None, SERVER, task) for task in tasks]

    def merge(self, state: RunState, plan: Plan, result: RoundResult) -> Merged:
        """Averages what the clients' slices cover, and counts who had the largest and the smallest."""
        weights = result.sums.finish(state.weights(self.bag), self.config.min_contributors)
        after = state.with_bag(self.bag, weights)
        if self.alone is None:
            after = after.with_data(SERVED, count_served(state.data[SERVED], given_in(plan), self.space))
        return Merged(after, evaluation_rows(result.reports))

    def end(self, state: RunState) -> Merged:
        """The weights are kept: any subnet can be cut from the supernet later, without training."""
        architecture = self.alone or self.space.largest
        kept = KeptModel(
            name=self.bag,
            tier="",
            architecture=architecture_id(architecture),
            macs=self.world.macs_table.cost(architecture),
            parameters=int(self.space.cost_table("parameters").cost(architecture)),
            tensors=state.weights(self.bag),
        )
        return Merged(state, models=[kept])


def given_in(plan: Plan) -> dict[int, Architecture]:
    """The subnet that each client of a plan was given, whatever became of it."""
    return {
        a.client_id: a.task.architecture
        for a in plan.assignments
        if a.client_id is not None and isinstance(a.task, TrainSubnet)
    }
