"""FedorAS: federated search of an architecture per tier of devices (Dudziak et al., TMLR 2022).

1. train    the supernet: each client receives a random subspace within its communication budget and trains one random
            path per batch within its tier's budget; operators are averaged by the samples that went through them (OPA)
2. search   per tier: the supernet's paths within the tier's bounds, scored with its weights
   slices   each winner is cut from the supernet, with running statistics that are estimated for it, if it has any
3. finetune per tier: FedAvg of the winner, from the supernet's weights, on the clients of that tier and above
(rand_init) the same from fresh weights, as a baseline
4. evaluate every tier's models

Where paper and code leave a choice: because "different, but possibly overlapping, subspaces can be selected for each
client in a round" (Sec. 3.1), each client gets its own; with `communication.one_per_round`, one is drawn per round.
Operators outside a batch's path are not updated; with `idle_momentum`, momentum still moves them, as in the authors'
version of torch. Perplexity is the exponential of the mean loss over all targets of a test set, not the mean of the
batches' exponentials, which is larger; over clients it is the mean of the clients' own perplexities.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, cast

import numpy as np
from annotated_types import Interval
from torch import Tensor

from fedloom.platform.clients.assignments import Assignment, places_of
from fedloom.platform.clients.local_rules import refuse_extra_passes
from fedloom.platform.clients.networks import AVERAGED, ESTIMATED, Account, DrawingNetwork, Network, Subnet
from fedloom.platform.clients.scoring import CALIBRATION_SAMPLES, EstimateStatistics, ScoreSubnet, ScoreSubnets
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import Trained
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.trees import rows_of
from fedloom.platform.federation.algorithm import (
    SUPERNET,
    Plan,
    Round,
    RoundResult,
    RoundTasks,
    RoundUpdate,
    RunState,
    TrainingStage,
    fresh_supernet,
    from_generator,
    to_all,
)
from fedloom.platform.federation.method import Method, SharedTraining, Stage
from fedloom.platform.federation.selection import for_server
from fedloom.platform.federation.stopping import check_scored
from fedloom.platform.federation.training_config import EPOCHS, TrainingConfig, check_training, cohort_size, rules_of
from fedloom.platform.federation.world import World
from fedloom.platform.methods.evaluation import EvaluationConfig, EvaluationJob, EvaluationStage, group_name, tier_job
from fedloom.platform.methods.fedoras_sampling import PathSampler, communication_limit, path_sampler, sample_subspace
from fedloom.platform.methods.tier_search import TierSearchConfig, TierSearchStage, tier_goals, winner_of
from fedloom.platform.seeding import stream
from fedloom.platform.settings import ONE_OR_MORE, POSITIVE, ZERO_OR_MORE, ComponentName
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.capabilities import with_subspaces
from fedloom.platform.spaces.slices import Architecture, SliceMap, Subspace, Weights, extract, subspace_id
from fedloom.tiers.budgets import least_share
from fedloom.tiers.costs import size_of

if TYPE_CHECKING:
    from fedloom.platform.federation.config import RunConfig

logger = logging.getLogger(__name__)

FROM_SUPERNET = "supernet_init"
"""The name of models sliced from the supernet without further training; others have tensor groups of their own."""

# -- configuration ----------------------------------------------------------------------------------------------------


@dataclass
class CommunicationConfig:
    """The communication budget of a client."""

    unit: Annotated[
        Literal["fraction", "parameters", "bytes"], "fraction (of the supernet's parameters), parameters or bytes"
    ] = "fraction"
    value: Annotated[float, POSITIVE, "the budget in this unit"] = 0.5
    one_per_round: Annotated[
        bool,
        "all clients of a round get one subspace, plus what a tier needs for a path in its budget; false: one each",
    ] = False


@dataclass
class SupernetConfig(TrainingConfig):
    """Stage 1 (FedorAS, Tab. 9)."""

    rounds: Annotated[int, ZERO_OR_MORE, "number of rounds"] = 500
    epochs: Annotated[int, EPOCHS, "passes of a client over its training data per round"] = 50
    batch_size: Annotated[int, ONE_OR_MORE, "samples per step; a path is drawn for each"] = 128
    min_contributors: Annotated[int, ONE_OR_MORE, "operators trained by fewer clients keep their weights"] = 2
    weighting: Annotated[str, ComponentName("weighting rule"), "weights of a client's tensors in the mean"] = "opa"
    paths: Annotated[Literal["greedy", "rejection"], "sampler of paths within a budget"] = "greedy"
    evaluate_paths: Annotated[int, Interval(ge=0, le=1_000_000), "number of random paths scored on validation data"] = 8
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)


@dataclass
class FedorASConfig:
    """The three stages and the rand-init baseline; a stage with `rounds` 0 is skipped."""

    name: str = "fedoras"
    train: SupernetConfig = field(default_factory=SupernetConfig)
    search: TierSearchConfig = field(default_factory=TierSearchConfig)
    finetune: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(rounds=100, clients_per_round=6, lr=0.01, schedule="cosine")
    )
    rand_init: TrainingConfig = field(default_factory=lambda: TrainingConfig(rounds=500, lr=0.1, schedule="cosine"))
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


PUBLISHED_RATIOS = {"CIFAR-10": 5.6, "Speech Commands": 3.4}
"""`epochs_per_operator` at the paper's settings."""


def epochs_per_operator(config: "RunConfig", space: SearchSpace) -> float | None:
    """Training epochs per operator of the supernet, as a multiple of those of rand-init's network.

    Each operator of a layer is taken to be on equally many paths; the tasks' classifiers are not operators. None
    without rand-init. A supernet far below the paper's ratios is hardly trained: comparing it with rand-init says
    little.
    """
    method, num_clients = config.method, config.data.num_clients
    supernet, alone = (
        stage.rounds * cohort_size(stage, num_clients) * stage.epochs for stage in (method.train, method.rand_init)
    )
    layers = space.options[:-1] if config.space.heads else space.options
    share = sum(1 / operators for operators in layers) / len(layers)
    return supernet * share / alone if alone else None


# -- what a client trains ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paths:
    """A subspace of the supernet that is trained along one random path per batch.

    Attributes:
        subspace: the operators that the client receives.
        budget: the largest cost of a path, in the run's cost measure.
        sampler: the path sampler's name.
    """

    subspace: Subspace
    budget: float
    sampler: str = "greedy"

    def on(self, worker: Worker, assignment: Assignment) -> Network:
        """The supernet module, called with another random path for every batch."""
        space, module, macs_of = with_subspaces(worker.space, "fedoras"), worker.supernet, worker.spec.macs_table.cost
        sampler, rng = self.draws(worker, assignment)
        through: Counter[tuple[int, int]] = Counter()
        spent_macs = [0.0]

        def forward(x_B: Tensor) -> Tensor:
            path = sampler.sample(rng)
            through.update(dict.fromkeys(enumerate(path), rows_of(x_B)))
            spent_macs[0] += macs_of(path) * rows_of(x_B)
            return cast(Tensor, module(x_B, path))

        return PathsNetwork(
            module,
            forward,
            space.subspace_slices(self.subspace),
            macs=0.0,
            subspace=subspace_id(self.subspace),
            owner_of=space.owner_of,
            through=through,
            spent_macs=spent_macs,
        )

    def account(self, worker: Worker, assignment: Assignment, batches: Sequence[int]) -> Account:
        """The cost of the paths that training draws for these batches."""
        sampler, rng = self.draws(worker, assignment)
        macs = sum(worker.spec.macs_table.cost(sampler.sample(rng)) * size for size in batches)
        size_bytes, parameters = (size_of(worker.space.cost_table(m), self.subspace) for m in ("bytes", "parameters"))
        return Account(macs, size_bytes, int(parameters), subspace=subspace_id(self.subspace))

    def held(self, space: SearchSpace) -> SliceMap:
        """The tensors of the fixed part and of the kept operators."""
        return with_subspaces(space, "fedoras").subspace_slices(self.subspace)

    def draws(self, worker: Worker, assignment: Assignment) -> tuple[PathSampler, np.random.Generator]:
        """The sampler and the random stream of the client's paths."""
        sampler = path_sampler(self.sampler, worker.spec.cost_table, self.subspace, self.budget)
        return sampler, stream(worker.spec.training_seed, "paths", *places_of(assignment))


@dataclass(frozen=True)
class PathsNetwork(DrawingNetwork):
    """A network that also counts the samples through each operator."""

    owner_of: Mapping[str, tuple[int, int] | None] = field(default_factory=dict)
    through: Counter[tuple[int, int]] = field(default_factory=Counter)

    def seen(self, figures: Trained) -> Mapping[str, int]:
        """All samples for the fixed part; for an operator the samples whose path contained it."""
        owners = {name: self.owner_of[name] for name in self.slices}
        whole, through = figures.seen_samples, self.through
        return {name: whole if owner is None else through.get(owner, 0) for name, owner in owners.items()}


# -- stages -----------------------------------------------------------------------------------------------------------


def supernet_stage(world: World, config: SupernetConfig, statistics: str) -> TrainingStage:
    """Stage 1: each selected client gets a random subspace and its tier's budget.

    Its random paths are scored with these `statistics`, as the search scores them.
    """
    with_subspaces(world.space, "fedoras")
    sizes, limit = communication_limit(world.space, config.communication.unit, config.communication.value)
    sizes_by_tier = [world.tasks.table(sizes, tier) for tier in range(len(world.tiers))]
    # A tier whose clients could not train any path, in a round of the least budget, is refused before anything is
    # written.
    for tier, sizes, costs in zip(world.tiers, sizes_by_tier, world.costs_by_tier, strict=True):
        if tier.upper < costs.smallest:
            raise ValueError(
                f"{tier.name} may spend {tier.upper:.6g} {costs.measure}, the smallest path costs "
                f"{costs.smallest:.6g}: raise its upper bound"
            )
        least = max(least_share(world.budget) * tier.upper, costs.cost(world.space.cheapest(costs)))
        subspace = sample_subspace(sizes, limit, stream(0, "check"), costs, least)
        path_sampler(config.paths, costs, subspace, least)
    rules = rules_of(config, "method.train")
    refuse_extra_passes(rules.local, "method.train")

    def client(round_: Round, client_id: int) -> Train:
        whose = () if config.communication.one_per_round else (client_id,)
        rng = stream(world.config.seed_for("training"), "subspace", round_.stage, round_.index, *whose)
        tier = int(world.tier_of_client[client_id])
        train_budget = world.training_budget(client_id, round_.stage, round_.index)
        subspace = sample_subspace(sizes_by_tier[tier], limit, rng, world.costs_by_tier[tier], train_budget)
        return Train(Paths(subspace, train_budget, config.paths), round_.local, rules.weighting)

    if config.evaluate_every:
        check_scored(world.config.stop, "method.train.evaluate_paths=0", names_some=config.evaluate_paths > 0)

    def score(state: RunState) -> list[ScoreSubnets]:
        rng = stream(world.config.seed_for("training"), "evaluate_paths")
        paths = [world.space.sample(rng) for _ in range(config.evaluate_paths)]
        # The same paths for every task, so that the tasks' accuracies can be compared.
        of_tasks = [tuple((*path[:-1], task) for path in paths) for task in range(len(world.tasks.names))]
        return [
            ScoreSubnets(each, state.version(SUPERNET), statistics=statistics) for each in of_tasks or [tuple(paths)]
        ]

    return TrainingStage(
        *(world, config, rules),
        name=SUPERNET,
        initial=fresh_supernet(world),
        tasks=lambda round_: RoundTasks([client(round_, client_id) for client_id in round_.client_ids]),
        score=score,
    )


def tier_stage(
    world: World, config: TrainingConfig, tier: int, model: str, key: str, predetermined: Architecture | None = None
) -> TrainingStage:
    """FedAvg of one architecture on the clients of a tier and above.

    It is the tier's winner (stage 3, from the supernet's weights; rand-init, from fresh ones), or `predetermined`, from
    fresh weights.
    """
    name, space = world.tiers[tier].name, world.space
    rules = rules_of(config, key)

    def chosen(state: RunState) -> Architecture | None:
        return winner_of(state, name) if predetermined is None else predetermined

    def subnet(state: RunState) -> Subnet:
        architecture = chosen(state)
        assert architecture is not None, "a stage without a winner has no rounds"
        return Subnet(architecture, stand_alone=True)

    def initial(state: RunState) -> Weights | None:
        architecture = chosen(state)
        if architecture is None:  # a tier without a model
            return None
        if model == "rand_init" or predetermined is not None:
            draw = from_generator(world, lambda g: space.initial_subnet_weights(architecture, g), model, name)
            return draw(state)
        sliced = group_name(name, FROM_SUPERNET)
        if sliced in state.groups:
            cut = state.weights(sliced)
        else:
            cut = extract(state.weights(SUPERNET), space.slices(architecture))
        return {tensor_name: tensor.clone() for tensor_name, tensor in cut.items()}

    def client(round_: Round) -> Train:
        return Train(subnet(round_.state), round_.local, rules.weighting)

    def macs(state: RunState) -> float:
        architecture, bounds = chosen(state), world.tiers[tier]
        if architecture is None:  # not searched yet
            return world.expected_macs(world.cost_table, bounds.lower, bounds.upper)
        return world.macs_table.cost(architecture)

    return TrainingStage(
        *(world, config, rules),
        name=f"{model}/{name}",
        group=group_name(name, model),
        initial=initial,
        tasks=to_all(client),
        eligible=world.eligible_by_tier[tier],
        score=lambda state: [ScoreSubnet(subnet(state), model, "validation")],
        macs=macs,
        tier=name,
    )


class SliceStage(Stage):
    """Cuts every tier's winner from the supernet; the server estimates its running statistics. One round per tier."""

    name = "slices"

    def __init__(self, world: World) -> None:
        self.world = world

    def _winners(self, state: RunState) -> list[tuple[str, Architecture]]:
        winners = [(tier.name, winner_of(state, tier.name)) for tier in self.world.tiers]
        return [(name, architecture) for name, architecture in winners if architecture is not None]

    def rounds_left(self, state: RunState) -> int:
        """One per tier with a winner."""
        return len(self._winners(state)) - state.round

    def macs_left(self, state: RunState) -> float:
        """The MACs of the forward passes that estimate statistics."""
        left = len(self.world.tiers) - state.round
        return max(0, left) * CALIBRATION_SAMPLES * self.world.expected_macs()

    def plan(self, state: RunState) -> Plan:
        """The server's estimate of one slice."""
        _, architecture = self._winners(state)[state.round]
        return Plan([for_server(self.name, state.round, EstimateStatistics(Subnet(architecture)))], SUPERNET)

    def merge(self, state: RunState, _plan: Plan, result: RoundResult) -> RoundUpdate:
        """The slice with its statistics, as a tensor group of its own."""
        tier, architecture = self._winners(state)[state.round]
        cut = extract(state.weights(SUPERNET), self.world.space.slices(architecture))
        return RoundUpdate(state.with_group(group_name(tier, FROM_SUPERNET), result.sums.finish(cut).weights))


def tier_jobs(world: World, state: RunState, models: Sequence[str]) -> list[EvaluationJob]:
    """The evaluation of the models of every tier with a winner."""
    jobs: list[EvaluationJob] = []
    for index, tier in enumerate(world.tiers):
        architecture = winner_of(state, tier.name)
        if architecture is None:
            continue
        for model in models:
            group = group_name(tier.name, model)
            stands_alone = group in state.groups  # a slice without statistics of its own uses the supernet's
            subnet = Subnet(architecture, stands_alone, AVERAGED)
            jobs.append(tier_job(world, index, model, subnet, group if stands_alone else SUPERNET))
    return jobs


def stages(config: FedorASConfig, world: World) -> list[Stage]:
    """The stages in order; every tier has its own search, fine-tuning and rand-init training."""
    for name, stage in (("train", config.train), ("finetune", config.finetune), ("rand_init", config.rand_init)):
        check_training(stage, f"method.{name}", world.num_clients)
    if world.config.dry_run and (ratio := epochs_per_operator(world.config, world.space)):
        published = ", ".join(f"{value} on {data_set}" for data_set, value in PUBLISHED_RATIOS.items())
        logger.warning("epochs per operator, supernet to rand-init: %.2f; the paper's: %s", ratio, published)
    tiers = range(len(world.tiers))
    sequence: list[Stage] = [supernet_stage(world, config.train, config.search.statistics)]
    sequence += [TierSearchStage(world, config.search, goal) for goal in tier_goals(world, config.search)]
    if config.search.scoring == "federated" and config.search.validation_share < 1:
        logger.warning(
            "method.search.validation_share=%g is for what the server scores: clients score on all of theirs",
            config.search.validation_share,
        )
    if config.search.statistics == ESTIMATED and world.space.keeps_statistics:
        sequence.append(SliceStage(world))
    sequence += [tier_stage(world, config.finetune, tier, "fine_tuned", "method.finetune") for tier in tiers]
    models = [FROM_SUPERNET, "fine_tuned"]
    if config.rand_init.rounds:
        sequence += [tier_stage(world, config.rand_init, tier, "rand_init", "method.rand_init") for tier in tiers]
        models.append("rand_init")
    num_models = len(models) * len(tiers)
    final = EvaluationStage(world, config.evaluation, lambda state: tier_jobs(world, state, models), num_models)
    return [*sequence, final]


METHOD = Method(
    FedorASConfig,
    stages,
    kind="tiers",
    shared_training=lambda _config: SharedTraining(later=("search", "finetune", "rand_init", "evaluation")),
    needs=with_subspaces,
    tasks=True,
    budgets=lambda _config: True,
)
