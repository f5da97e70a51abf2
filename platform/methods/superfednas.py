"""SuperFedNAS: an elastic supernet trained by a federation, searched for any target without training.

    in every round: a distribution heuristic gives each selected client a subnet (the largest, the smallest, random);
                    clients train their slices of the supernet, which are averaged where they overlap;
                    with MaxNet the largest subnet's client has the share beta_t, the others share the rest
    in the end:     predictors of accuracy are fitted on sampled subnets, and each target's best subnets are verified

The same stages give its baselines: single-stage (random + overlap), multi-stage (clients train the whole supernet with
progressive shrinking), iFedAvg over a family and FedAvg of one subnet (`separately`).
Papers: SuperFed (MaxNet), SuperFedNAS.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Annotated, Any, Literal

import numpy as np

from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.scoring import ScoreSubnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.federation.algorithm import (
    SUPERNET,
    KeptModel,
    Plan,
    Round,
    RoundResult,
    RoundTasks,
    RunState,
    TrainingStage,
    fresh_supernet,
    from_generator,
    to_all,
)
from fedloom.platform.federation.method import Method, SharedTraining, Stage
from fedloom.platform.federation.training_config import EPOCHS, TrainingConfig, check_training, cohort_size, rules_of
from fedloom.platform.federation.world import World
from fedloom.platform.methods.distribution import (
    FEWEST_FOR_SANDWICH,
    HEURISTICS,
    NEED_A_FAMILY,
    SANDWICHES,
    Distribution,
    Served,
    check_heuristic,
    count_served,
    distribute,
)
from fedloom.platform.methods.evaluation import (
    EvaluationConfig,
    EvaluationJob,
    EvaluationStage,
    everybody,
    kept_model,
)
from fedloom.platform.methods.shares import SHARES_RULES, SharesConfig, Sharing, check_shares, shares_of
from fedloom.platform.methods.shrinking import FEWEST_OF_SANDWICH, Shrinking
from fedloom.platform.methods.target_search import search_stages, targets_of
from fedloom.platform.methods.tier_search import WINNERS, check_statistics
from fedloom.platform.plugins import Registry
from fedloom.platform.search.targets import TargetSearchConfig
from fedloom.platform.seeding import stream
from fedloom.platform.settings import (
    BELOW_ONE,
    NOT_EMPTY,
    ONE_OR_MORE,
    PART,
    UP_TO_A_THOUSAND,
    ZERO_OR_MORE,
    ComponentName,
)
from fedloom.platform.spaces.capabilities import with_depths
from fedloom.platform.spaces.slices import Architecture, architecture_id, parse_architecture

SEARCHED = "searched"
"""The name of models found by the search, sliced from the supernet without further training."""
ALONE = "alone"
"""The name of models trained without a supernet."""
SERVED = "served"
"""The state's counters of how often each client got the largest and the smallest subnet."""

# -- configuration ----------------------------------------------------------------------------------------------------


@dataclass
class DistributionConfig:
    """The distribution of subnets to clients."""

    heuristic: Annotated[str, ComponentName("distribution heuristic"), "how subnets are assigned"] = "tracking_sandwich"
    tier_aware: Annotated[bool, "give no client a subnet above its tier's budget in the round"] = False


@dataclass
class ShrinkingConfig:
    """Progressive shrinking on clients that train the whole supernet (multi-stage PS+FL)."""

    subnets_per_batch: Annotated[int, UP_TO_A_THOUSAND, "random subnets per batch, whose gradients are summed"] = 4
    depth_share: Annotated[float, PART, "share of the rounds, from the first, in which only depths are drawn"] = 0.5
    sandwich: Annotated[
        bool | None, "of these subnets the first is the largest and the last the smallest (FedSup); null: no"
    ] = None
    distillation: Annotated[
        float | None, PART, "sandwich: weight of the largest's outputs in the others' losses; null: 0"
    ] = None


@dataclass
class ElasticTrainingConfig(TrainingConfig):
    """Training of an elastic supernet (SuperFed, Sec. 4; plain SGD, clip 1)."""

    rounds: Annotated[int, ZERO_OR_MORE, "number of rounds"] = 1500
    clients_per_round: Annotated[int | None, ONE_OR_MORE, "number of clients per round; null: all"] = 8
    epochs: Annotated[int, EPOCHS, "passes of a client over its training data per round"] = 5
    batch_size: Annotated[int, ONE_OR_MORE, "samples per step of a client's SGD"] = 64
    momentum: Annotated[float, BELOW_ONE, "momentum of the clients' SGD"] = 0.0
    clip_norm: Annotated[float, ZERO_OR_MORE, "limit of the gradient's norm, 0 for none"] = 1.0
    travels: Annotated[
        Literal["slices", "supernet"], "what clients get: slices (a subnet each) or supernet (all; see shrinking)"
    ] = "slices"
    distribution: DistributionConfig = field(default_factory=DistributionConfig)
    shares: SharesConfig = field(default_factory=SharesConfig)
    shrinking: ShrinkingConfig = field(default_factory=ShrinkingConfig)
    evaluate: Annotated[
        list[Annotated[str, NOT_EMPTY]], "subnets that are scored on validation data every evaluate_every rounds"
    ] = field(default_factory=lambda: ["smallest", "largest"])


@dataclass
class SuperFedNASConfig:
    """Training, search and final evaluation."""

    name: str = "superfednas"
    family: Annotated[
        list[Annotated[str, NOT_EMPTY]],
        "subnets (smallest, largest, 'd=1,0,2,1 e=.14') to evaluate; static and dynamic distribute them to clients",
    ] = field(default_factory=lambda: ["smallest", "largest"])
    separately: Annotated[bool, "train each member of the family by itself (iFedAvg; FedAvg if there is one)"] = False
    train: ElasticTrainingConfig = field(default_factory=ElasticTrainingConfig)
    search: TargetSearchConfig = field(default_factory=TargetSearchConfig)
    evaluation: EvaluationConfig = field(default_factory=lambda: EvaluationConfig(clients_per_tier=0))


def _own_rules(config: ElasticTrainingConfig) -> dict[str, tuple[Registry[Any], str]]:
    """The rules that an elastic supernet's training has beside those of every stage."""
    return {
        "distribution.heuristic": (HEURISTICS, config.distribution.heuristic),
        "shares.rule": (SHARES_RULES, config.shares.rule),
    }


def _check_training(config: ElasticTrainingConfig, num_clients: int, family: int, *, separately: bool) -> None:
    """Raises ValueError for invalid values."""
    key, name = "method.train", config.distribution.heuristic
    check_training(config, key, num_clients)
    hands_out = config.travels == "slices" and not separately  # else all clients of a round get the same
    if hands_out and name in SANDWICHES and cohort_size(config, num_clients) < FEWEST_FOR_SANDWICH:
        raise ValueError(
            f"{key}.clients_per_round={config.clients_per_round}: {name} needs at least {FEWEST_FOR_SANDWICH}, one for "
            "the largest, one for the smallest and one for a random subnet; raise it, or choose another heuristic"
        )
    if config.distribution.tier_aware and not hands_out:
        raise ValueError(
            f"{key}.distribution.tier_aware=true: where all clients get the same model no budget is looked at; "
            "use travels=slices and a supernet, or leave it out"
        )
    shrinking = config.shrinking
    if shrinking.distillation and not shrinking.sandwich:
        raise ValueError(
            f"{key}.shrinking.distillation needs {key}.shrinking.sandwich=true: the largest subnet teaches"
        )
    if shrinking.sandwich and shrinking.subnets_per_batch < FEWEST_OF_SANDWICH:
        raise ValueError(
            f"{key}.shrinking.subnets_per_batch={shrinking.subnets_per_batch}: a sandwich has a largest and a smallest "
            f"subnet; give {FEWEST_OF_SANDWICH} or more"
        )
    if hands_out and name in NEED_A_FAMILY and family < 1:
        raise ValueError(f"{key}.distribution.heuristic={name} hands out a fixed family: give method.family")


# -- what a client does -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainShare(Train):
    """Training whose update counts as much as the server says: its weights are multiplied by `share`."""

    share: float = field(default=1.0, compare=False)  # clients of other shares train in the same way, also in a stack


# -- stages -----------------------------------------------------------------------------------------------------------


def supernet_stage(world: World, config: ElasticTrainingConfig, family: tuple[Architecture, ...]) -> TrainingStage:
    """Trains the supernet, with subnets and shares per client, or as a whole with progressive shrinking."""
    space, slices = world.space, config.travels == "slices"
    if not slices and config.shrinking.depth_share > 0:
        with_depths(space, "method.train.travels=supernet")
    rules, clients = rules_of(config, "method.train", _own_rules(config)), cohort_size(config, world.num_clients)
    heuristic, shares_rule = rules.more["distribution.heuristic"], rules.more["shares.rule"]
    given = partial(distribution_of, world, config, family)
    if slices:
        check_heuristic(heuristic, given(0, tuple(range(clients)), {}))
        check_shares(shares_rule, config.shares, clients)

    def give(round_: Round) -> RoundTasks:
        client_ids, served = tuple(sorted(round_.client_ids)), round_.state.data[SERVED]
        subnets = distribute(heuristic, given(round_.index, client_ids, served))
        architectures = [subnets[client_id] for client_id in round_.client_ids]
        is_largest = tuple(architecture == space.largest for architecture in architectures)
        shares = shares_of(shares_rule, Sharing(config.shares, round_.index, config.rounds, clients, is_largest))
        tasks = [
            TrainShare(Subnet(architecture), round_.local, rules.weighting, share=share)
            for architecture, share in zip(architectures, shares.values, strict=True)
        ]
        return RoundTasks(tasks, shares.schedules)

    def whole(round_: Round) -> Train:
        widest = round_.index < config.shrinking.depth_share * config.rounds
        shrinking = config.shrinking
        sandwich, distillation = bool(shrinking.sandwich), shrinking.distillation or 0.0
        network = Shrinking(shrinking.subnets_per_batch, widest, sandwich, distillation)
        return Train(network, round_.local, rules.weighting)

    def after(state: RunState, plan: Plan, _result: RoundResult) -> RunState:
        return state.with_data(SERVED, count_served(state.data[SERVED], given_in(plan), space))

    evaluated = [Subnet(world.architecture(text, "method.train.evaluate")) for text in config.evaluate]
    if evaluated and config.evaluate_every:
        check_statistics(world)
    return TrainingStage(
        *(world, config, rules),
        name=SUPERNET,
        initial=fresh_supernet(world),
        tasks=give if slices else to_all(whole),
        score=lambda _state: [ScoreSubnet(subnet, SUPERNET, "validation") for subnet in evaluated],
        after=after,
        # Any subnet can later be sliced from the stored supernet, without training.
        keep=lambda state: [_kept(world, state, SUPERNET, space.largest)],
        data={SERVED: {}},
    )


def distribution_of(
    world: World,
    config: ElasticTrainingConfig,
    family: tuple[Architecture, ...],
    index: int,
    client_ids: tuple[int, ...],
    served: Served,
) -> Distribution:
    """What a heuristic is given to choose the subnets of a round: clients in ascending order, and their budgets."""
    aware = config.distribution.tier_aware
    budgets = tuple(world.training_budget(c, SUPERNET, index) if aware else inf for c in client_ids)
    rng = stream(world.config.seed_for("training"), "distribution", SUPERNET, index)
    return Distribution(world.space, world.cost_table, index, client_ids, budgets, family, served, rng)


def alone_stage(world: World, config: ElasticTrainingConfig, architecture: Architecture) -> TrainingStage:
    """Trains one subnet from its own fresh weights (FedAvg, and the members of iFedAvg)."""
    group, subnet = group_of(architecture), Subnet(architecture, stand_alone=True)
    rules = rules_of(config, "method.train")
    return TrainingStage(
        *(world, config, rules),
        name=f"{ALONE}/{architecture_id(architecture)}",
        group=group,
        initial=from_generator(world, lambda g: world.space.initial_subnet_weights(architecture, g), group),
        tasks=to_all(lambda round_: Train(subnet, round_.local, rules.weighting)),
        macs=lambda _state: world.macs_table.cost(architecture),
        score=lambda _state: [ScoreSubnet(subnet, ALONE, "validation")],
        keep=lambda state: [_kept(world, state, group, architecture)],
    )


def group_of(architecture: Architecture) -> str:
    """The tensor group of a subnet that is trained by itself."""
    return f"{ALONE}-{architecture_id(architecture)}"


def _kept(world: World, state: RunState, group: str, architecture: Architecture) -> KeptModel:
    return kept_model(world, group, architecture, tensors=state.weights(group))


def given_in(plan: Plan) -> Mapping[int, Architecture]:
    """The subnet given to each client of a plan, including clients that failed."""
    return {
        a.client_id: a.task.network.architecture
        for a in plan.assignments
        if a.client_id is not None and isinstance(a.task, Train) and isinstance(a.task.network, Subnet)
    }


def parse_family(config: SuperFedNASConfig, world: World) -> tuple[Architecture, ...]:
    """The family's subnets; ValueError for a subnet outside the space or named twice."""
    family: list[Architecture] = []
    for text in config.family:
        architecture = world.architecture(text, "method.family")
        if architecture in family:
            raise ValueError(f"method.family: {text!r} is named twice: {world.space.label(architecture)}")
        family.append(architecture)
    return tuple(family)


def stages(config: SuperFedNASConfig, world: World) -> list[Stage]:
    """Training, search and final evaluation; or separate training of the family's members and their evaluation."""
    family = parse_family(config, world)
    _check_training(config.train, world.num_clients, len(family), separately=config.separately)
    if config.separately:
        return _alone(world, config, family)
    sequence: list[Stage] = [supernet_stage(world, config.train, family), *search_stages(world, config.search)]
    jobs = [EvaluationJob("", SUPERNET, Subnet(member), SUPERNET, everybody(world)) for member in family]
    scored = len(jobs) + (len(targets_of(world, config.search)) if len(sequence) > 1 else 0)
    final = EvaluationStage(world, config.evaluation, lambda state: [*jobs, *_winners(world, state)], scored)
    return [*sequence, final]


def _alone(world: World, config: SuperFedNASConfig, family: tuple[Architecture, ...]) -> list[Stage]:
    if not family:
        raise ValueError("method.separately=true trains the members of method.family, which is empty: name some")
    training: list[Stage] = [alone_stage(world, config.train, member) for member in family]
    jobs = [
        EvaluationJob("", ALONE, Subnet(member, stand_alone=True), group_of(member), everybody(world))
        for member in family
    ]
    return [*training, EvaluationStage(world, config.evaluation, lambda _state: jobs, len(jobs))]


def _winners(world: World, state: RunState) -> list[EvaluationJob]:
    """The evaluation of every tier's winner (on the tier's clients) or target's winner (on all clients)."""
    jobs: list[EvaluationJob] = []
    tiers = {tier.name: index for index, tier in enumerate(world.tiers)}
    for name, text in state.data.get(WINNERS, {}).items():
        own: Sequence[int] | np.ndarray = everybody(world)
        if name in tiers:
            own = np.flatnonzero(world.tier_of_client == tiers[name])
        jobs.append(EvaluationJob(name, SEARCHED, Subnet(parse_architecture(text)), SUPERNET, own))
    return jobs


def _shared_training(config: SuperFedNASConfig) -> SharedTraining | None:
    """The supernet's training; None if subnets are trained separately.

    Training does not depend on the family unless the heuristic distributes it, which a user's heuristic may do.
    """
    if config.separately:
        return None
    name = config.train.distribution.heuristic
    hands_out = name in NEED_A_FAMILY or name not in HEURISTICS.known
    return SharedTraining(later=("search", "evaluation") if hands_out else ("search", "evaluation", "family"))


METHOD = Method(
    SuperFedNASConfig,
    stages,
    kind="subnets",
    searchable=lambda config: not config.separately,
    shared_training=_shared_training,
)
