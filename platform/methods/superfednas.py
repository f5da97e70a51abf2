"""SuperFedNAS: an elastic supernet trained by a federation, searched for any target without training.

    in every round: a distribution heuristic gives each selected client a subnet (the largest, the smallest, random);
                    clients train their slices of the supernet, which are averaged where they overlap;
                    with MaxNet the largest subnet's client has the share beta_t, the others share the rest
    at the end:     predictors of accuracy are fitted on sampled subnets, and each target's best subnets are verified

The same stages give its baselines: single-stage (random + overlap), multi-stage (clients train the whole supernet with
progressive shrinking), iFedAvg over a family and FedAvg of one subnet (`separately`).
Papers: SuperFed (MaxNet), SuperFedNAS.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Annotated, Any, Literal, cast

from torch import Tensor

from fedloom.platform.clients.assignments import Assignment, Task, places_of
from fedloom.platform.clients.local_rules import refuse_extra_passes
from fedloom.platform.clients.networks import Account, DrawingNetwork, Network, Subnet
from fedloom.platform.clients.objectives import DistilledLoss, check_divergence
from fedloom.platform.clients.scoring import ScoreSubnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.trees import rows_of
from fedloom.platform.federation.algorithm import (
    SUPERNET,
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
from fedloom.platform.federation.stopping import check_scored
from fedloom.platform.federation.training_config import (
    EPOCHS,
    TrainingConfig,
    answers_per_round,
    check_training,
    rules_of,
)
from fedloom.platform.federation.world import World
from fedloom.platform.methods.distribution import (
    FEWEST_FOR_SANDWICH,
    HEURISTICS,
    INDEPENDENT,
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
    clients_of_tier,
    everybody,
    kept_model,
)
from fedloom.platform.methods.shares import SHARES_RULES, Shares, SharesConfig, Sharing, check_shares, shares_of
from fedloom.platform.methods.target_search import search_stages, targets_of
from fedloom.platform.methods.tier_search import WINNERS, check_statistics
from fedloom.platform.plugins import ComponentSpec, Registry
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
from fedloom.platform.spaces.base import SearchSpace, supernet_tensors
from fedloom.platform.spaces.capabilities import with_depths
from fedloom.platform.spaces.slices import (
    Architecture,
    Slice,
    SliceMap,
    architecture_id,
    bytes_of,
    parse_architecture,
)

logger = logging.getLogger(__name__)

SEARCHED = "searched"
"""The name of models found by the search, sliced from the supernet without further training."""
ALONE = "alone"
"""The name of models trained without a supernet."""
SERVED = "served"
"""The state's counters of how often each client got the largest and the smallest subnet."""
FEWEST_OF_SANDWICH = 2
"""The fewest subnets of a sandwich's batch: the largest and the smallest."""

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
        bool | None, "the first of these subnets is the largest, the last the smallest (FedSup); null: no"
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


def _check_training(config: ElasticTrainingConfig, num_clients: int, family: int, *, separately: bool) -> None:
    """Raises ValueError for invalid values."""
    key, name = "method.train", config.distribution.heuristic
    check_training(config, key, num_clients)
    slot = "clients_per_round" if config.arrivals is None else "arrivals"
    hands_out = config.travels == "slices" and not separately  # else all clients of a round get the same
    if hands_out and name in SANDWICHES and answers_per_round(config, num_clients) < FEWEST_FOR_SANDWICH:
        raise ValueError(
            f"{key}.{slot}={getattr(config, slot)}: {name} needs at least {FEWEST_FOR_SANDWICH}, one for "
            "the largest, one for the smallest and one for a random subnet; raise it, or choose another heuristic"
        )
    if config.distribution.tier_aware and not hands_out:
        raise ValueError(
            f"{key}.distribution.tier_aware=true: budgets are ignored where all clients get the same model; "
            "use travels=slices and a supernet, or leave it out"
        )
    if hands_out and name in SANDWICHES and config.arrivals is not None and config.asynchronous is None:
        logger.warning(
            "%s.arrivals=%s: the slowest clients are given up, on equal devices always that with the largest subnet, "
            "which %s gives out in every round: set %s.asynchronous=fedbuff, or choose another heuristic",
            *(key, config.arrivals, name, key),
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
    choices = {"distribution.heuristic": (name, INDEPENDENT), "shares.rule": (config.shares.rule, ("overlap",))}
    for option, (chosen, sound) in choices.items() if config.privacy.noise and hands_out else ():
        if chosen not in sound:
            raise ValueError(
                f"{key}.{option}={chosen}: what a client trains, or weighs, depends on who else takes part, so that a "
                f"client's influence is larger than its own update and {key}.privacy.noise would promise too much; use "
                f"{' or '.join(filter(None, [', '.join(sound[:-1]), sound[-1]]))}"
            )


# -- what a client trains, if the whole supernet travels ---------------------------------------------------------------


@dataclass(frozen=True)
class Shrinking:
    """The whole supernet, trained along several random subnets per batch, whose gradients are summed.

    Progressive shrinking (once-for-all, Cai et al. 2020; SuperFedNAS' multi-stage baseline) draws all subnets; with
    `widest`, these have full width and random depth. The `sandwich` of FedSup (Kim and Yun 2022, after slimmable
    networks) trains the largest first and the smallest last in every batch, and random ones between them, which learn
    with weight `distillation` from the largest's outputs (in-place distillation). Where clients receive a subnet each
    (E-FedSup), see `travels=slices` and the heuristics of distribution.
    """

    subnets_per_batch: int = 4
    widest: bool = False
    sandwich: bool = False
    distillation: float = 0.0

    def on(self, worker: Worker, assignment: Assignment) -> Network:
        """The supernet module, called with another subnet in every pass."""
        module, draws, spent_macs = worker.supernet, self._draws(worker, assignment), [0.0]
        taught = DistilledLoss(self.distillation, passes=self.subnets_per_batch) if self.distillation else None

        def forward(x_B: Tensor) -> Tensor:
            architecture = next(draws)
            spent_macs[0] += worker.spec.macs_table.cost(architecture) * rows_of(x_B)
            outputs = cast(Tensor, module(x_B, architecture))
            if taught is not None:
                taught.passed(outputs)
            return outputs

        loss, passes = None if taught is None else taught.loss, self.subnets_per_batch
        whole = self.held(worker.space)
        return DrawingNetwork(module, forward, whole, 0.0, passes=passes, loss=loss, spent_macs=spent_macs)

    def account(self, worker: Worker, assignment: Assignment, batches: Sequence[int]) -> Account:
        """The cost of the subnets that training draws for these batches."""
        draws, macs_of = self._draws(worker, assignment), worker.spec.macs_table.cost
        macs = 0.0
        for size in batches:
            for _ in range(self.subnets_per_batch):
                macs += macs_of(next(draws)) * size
        tensors = supernet_tensors(worker.space)
        parameters = sum(tensor.numel() for tensor in tensors.values() if tensor.requires_grad)
        return Account(macs, bytes_of(tensors), parameters)

    def held(self, space: SearchSpace) -> SliceMap:
        """The whole supernet, of which a space of operators' largest subnet is only a part."""
        return {name: Slice(name) for name in supernet_tensors(space)}

    def _draws(self, worker: Worker, assignment: Assignment) -> Iterator[Architecture]:
        rng, space = stream(worker.spec.training_seed, "subnets", *places_of(assignment)), worker.space
        sample = with_depths(space, "travels=supernet").sample_depth if self.widest else space.sample
        ends = {0: space.largest, self.subnets_per_batch - 1: space.smallest} if self.sandwich else {}
        while True:
            for index in range(self.subnets_per_batch):
                yield ends[index] if index in ends else sample(rng)


@dataclass(frozen=True)
class TrainShare(Train):
    """Training whose update's weights are multiplied by `share`, which the server sets."""

    share: float = field(default=1.0, compare=False)  # clients with different shares train alike and can be stacked


# -- stages -----------------------------------------------------------------------------------------------------------


def supernet_stage(world: World, config: ElasticTrainingConfig, family: tuple[Architecture, ...]) -> TrainingStage:
    """Trains the supernet, with subnets and shares per client, or as a whole with progressive shrinking."""
    space, slices = world.space, config.travels == "slices"
    if not slices and config.shrinking.depth_share > 0:
        with_depths(space, "method.train.travels=supernet")
    own_rules: dict[str, tuple[Registry[Any], str]] = {
        "distribution.heuristic": (HEURISTICS, config.distribution.heuristic),
        "shares.rule": (SHARES_RULES, config.shares.rule),
    }
    rules, clients = rules_of(config, "method.train", own_rules), answers_per_round(config, world.num_clients)
    if not slices:
        refuse_extra_passes(rules.local, "method.train")
    taught = config.shrinking.distillation or 0.0
    check_divergence(world.data.dataset, "method.train.shrinking.distillation", taught)
    heuristic, shares_rule = rules.more["distribution.heuristic"], rules.more["shares.rule"]

    def distribution(index: int, client_ids: tuple[int, ...], served: Served, draw: int = 0) -> Distribution:
        """A heuristic's input for a cohort of a round: the clients in ascending order, and their budgets."""
        aware = config.distribution.tier_aware
        budgets = tuple(world.training_budget(c, SUPERNET, index) if aware else inf for c in client_ids)
        further = (draw,) if draw else ()  # a first cohort draws as in a round that waits for all
        rng = stream(world.config.seed_for("training"), "distribution", SUPERNET, index, *further)
        return Distribution(space, world.cost_table, index, client_ids, budgets, family, served, rng)

    if slices:
        check_heuristic(heuristic, distribution(0, tuple(range(clients)), {}))
        check_shares(shares_rule, config.shares, clients)

    def give(round_: Round) -> RoundTasks:
        client_ids, served = tuple(sorted(round_.client_ids)), round_.state.data[SERVED]
        # A client that takes a lost one's place is no sandwich of its own, which would be the largest subnet each time.
        few = round_.draw > 0 and len(client_ids) < FEWEST_FOR_SANDWICH and heuristic.name in SANDWICHES
        rule = ComponentSpec("random") if few else heuristic
        subnets = distribute(rule, distribution(round_.index, client_ids, served, round_.draw))
        tasks = [TrainShare(Subnet(subnets[c]), round_.local, rules.weighting) for c in round_.client_ids]
        if config.arrivals is not None:  # those that answer first get shares then
            return RoundTasks(tasks)
        shares = shared(round_.state.round, tasks)
        tasks = [replace(task, share=share) for task, share in zip(tasks, shares.values, strict=True)]
        return RoundTasks(tasks, shares.schedules)

    def shared(index: int, tasks: Sequence[Task]) -> Shares:
        is_largest = tuple(isinstance(task, Train) and task.network == Subnet(space.largest) for task in tasks)
        return shares_of(shares_rule, Sharing(config.shares, index, config.rounds, is_largest))

    def among(index: int, tasks: Sequence[Task]) -> tuple[Sequence[float], Mapping[str, float]]:
        shares = shared(index, tasks)
        return shares.values, shares.schedules

    def is_widest(index: int) -> bool:
        """Whether all subnets of a round have the full width, if clients get the whole supernet."""
        return index < config.shrinking.depth_share * config.rounds

    def whole(round_: Round) -> Train:
        widest = is_widest(round_.index)
        shrinking = config.shrinking
        network = Shrinking(shrinking.subnets_per_batch, widest, bool(shrinking.sandwich), taught)
        return Train(network, round_.local, rules.weighting)

    def after(state: RunState, plan: Plan, _result: RoundResult) -> RunState:
        subnets = {  # also of clients that failed
            a.client_id: a.task.network.architecture
            for a in plan.assignments
            if a.client_id is not None and isinstance(a.task, Train) and isinstance(a.task.network, Subnet)
        }
        return state.with_data(SERVED, count_served(state.data[SERVED], subnets, space, world.cost_table))

    evaluated = [Subnet(world.architecture(text, "method.train.evaluate")) for text in config.evaluate]
    if config.evaluate_every:
        check_scored(world.config.stop, "method.train.evaluate", names_some=bool(evaluated))
    if evaluated and config.evaluate_every:
        check_statistics(world)
    return TrainingStage(
        *(world, config, rules),
        name=SUPERNET,
        initial=fresh_supernet(world),
        tasks=give if slices else to_all(whole),
        score=lambda _state: [ScoreSubnet(subnet, SUPERNET, "validation") for subnet in evaluated],
        after=after,
        settled=lambda state: slices or not is_widest(state.round),
        shares=among if slices else None,
        # Any subnet can later be sliced from the stored supernet, without training.
        keep=lambda state: [kept_model(world, SUPERNET, space.largest, tensors=state.weights(SUPERNET))],
        data={SERVED: {}},
    )


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
        keep=lambda state: [kept_model(world, group, architecture, tensors=state.weights(group))],
    )


def group_of(architecture: Architecture) -> str:
    """The tensor group of a subnet that is trained by itself."""
    return f"{ALONE}-{architecture_id(architecture)}"


def stages(config: SuperFedNASConfig, world: World) -> list[Stage]:
    """Training, search and final evaluation; or separate training of the family's members and their evaluation."""
    if set(world.space.options) == {1}:
        raise ValueError(f"superfednas cannot use space {world.space.name}, which has one architecture; use fedavg")
    if world.config.tiers.unsupported and not config.train.distribution.tier_aware:
        raise ValueError(
            "tiers.unsupported: superfednas gives clients any operator of the space; set "
            "method.train.distribution.tier_aware=true, or remove unsupported ones from space.operators"
        )
    family = family_of(world, config.family)
    _check_training(config.train, world.num_clients, len(family), separately=config.separately)
    if config.separately:
        if not family:
            raise ValueError("method.separately=true trains the members of method.family, which is empty: name some")
        clients = everybody(world)
        jobs = [
            EvaluationJob("", ALONE, Subnet(member, stand_alone=True), group_of(member), clients) for member in family
        ]
        final = EvaluationStage(world, config.evaluation, lambda _state: jobs, len(jobs))
        return [*(alone_stage(world, config.train, member) for member in family), final]
    return searched(world, supernet_stage(world, config.train, family), config.search, config.evaluation, family)


def family_of(world: World, texts: Sequence[str]) -> tuple[Architecture, ...]:
    """The subnets of `method.family`; ValueError for one that the space does not have, or that is named twice."""
    family: tuple[Architecture, ...] = ()
    for text in texts:
        architecture = world.architecture(text, "method.family")
        if architecture in family:
            raise ValueError(f"method.family: {text!r} is named twice: {world.space.label(architecture)}")
        family += (architecture,)
    return family


def searched(
    world: World,
    training: TrainingStage,
    search: TargetSearchConfig,
    evaluation: EvaluationConfig,
    family: tuple[Architecture, ...],
) -> list[Stage]:
    """The training of a supernet, the search in it, and the evaluation of the family and of what was found."""
    searches, clients = search_stages(world, search), everybody(world)
    jobs = [EvaluationJob("", SUPERNET, Subnet(member), SUPERNET, clients) for member in family]
    num_models = len(jobs) + (len(targets_of(world, search)) if searches else 0)
    final = EvaluationStage(world, evaluation, lambda state: [*jobs, *_winners(world, state)], num_models)
    return [training, *searches, final]


def _winners(world: World, state: RunState) -> list[EvaluationJob]:
    """The evaluation of every tier's winner (on the tier's clients) or target's winner (on all clients)."""
    jobs: list[EvaluationJob] = []
    tiers = {tier.name: index for index, tier in enumerate(world.tiers)}
    for name, text in state.data.get(WINNERS, {}).items():
        clients = clients_of_tier(world, tiers[name]) if name in tiers else everybody(world)
        jobs.append(EvaluationJob(name, SEARCHED, Subnet(parse_architecture(text)), SUPERNET, clients))
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
    budgets=lambda config: config.train.distribution.tier_aware,
)
