"""OFA: the full network is trained, then teaches ever smaller subnets (Cai et al. 2020, Sec. 3.3).

    first:        clients train the full network, which then becomes the teacher
    depths open:  for every batch, add up the gradients of 2 random subnets of full width and of the open depths
    widths open:  sort the channels of every block by their L1 norm;
                  for every batch, add up the gradients of 4 random subnets of any depth and of the open widths
    within a phase, depths (or widths) open one by one, larger ones first, after equal numbers of rounds
    a subnet minimises cross entropy + lambda KL(the teacher's outputs || its own)

All data at one client (data.num_clients=1) is OFA as published. In a federation every client trains the whole supernet,
which is averaged, and also receives the teacher. CompOFA (Sahni et al. 2021) couples the width of a stage with its
depth (space.coupled=true), so that there are few subnets, all of which open after the teacher's rounds (depth_share=0).
The last phase alone, without a teacher, is SuperFedNAS' multi-stage baseline. No space here has elastic kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import TYPE_CHECKING, Annotated

import torch

from fedloom.platform.clients.assignments import places_of
from fedloom.platform.clients.local_rules import refuse_extra_passes
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.objectives import check_divergence, taught_loss
from fedloom.platform.clients.scoring import ScoreSubnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import batch_sizes
from fedloom.platform.federation.algorithm import SUPERNET, TrainingStage, fresh_supernet, to_all
from fedloom.platform.federation.method import Method, SharedTraining
from fedloom.platform.federation.stopping import check_scored
from fedloom.platform.federation.training_config import TrainingConfig, check_training, rules_of
from fedloom.platform.methods.evaluation import EvaluationConfig, kept_model
from fedloom.platform.methods.superfednas import Shrinking, family_of, searched
from fedloom.platform.methods.tier_models import refuse_what_stays
from fedloom.platform.methods.tier_search import check_statistics
from fedloom.platform.search.targets import TargetSearchConfig
from fedloom.platform.seeding import stream
from fedloom.platform.settings import NOT_EMPTY, PART, UP_TO_A_THOUSAND, ZERO_OR_MORE
from fedloom.platform.spaces.capabilities import HasSortedChannels, with_sorted_channels
from fedloom.platform.spaces.genome import CoupledStage
from fedloom.platform.spaces.slices import Slice

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.platform.clients.assignments import Assignment, ClientResult
    from fedloom.platform.clients.networks import Network
    from fedloom.platform.clients.objectives import Objective
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.federation.algorithm import Plan, Round, RoundResult, RunState
    from fedloom.platform.federation.method import Stage
    from fedloom.platform.federation.world import World
    from fedloom.platform.spaces.slices import Architecture, Weights

TEACHER = "teacher/"
"""Prefix of the teacher's tensors in the tensor group that also holds the supernet's."""

# -- configuration ----------------------------------------------------------------------------------------------------


@dataclass
class OFATrainingConfig(TrainingConfig):
    """Training in phases; by default with the shares of OFA's epochs."""

    full_share: Annotated[float, PART, "share of the rounds, from the first, that train the full network"] = 0.375
    depth_share: Annotated[float, PART, "share of the rounds, after these, in which only depths open"] = 0.3125
    subnets_per_batch: Annotated[
        list[Annotated[int, UP_TO_A_THOUSAND]],
        "random subnets per batch, whose gradients are summed: two numbers, while depths open and while widths open",
    ] = field(default_factory=lambda: [2, 4])
    teaching: Annotated[float, ZERO_OR_MORE, "lambda, the weight of the teacher's outputs in a subnet's loss"] = 1.0
    sort_channels: Annotated[bool, "whether channels are sorted by importance before widths open"] = True
    evaluate: Annotated[
        list[Annotated[str, NOT_EMPTY]], "subnets that are scored on validation data every evaluate_every rounds"
    ] = field(default_factory=lambda: ["smallest", "largest"])


@dataclass
class OFAConfig:
    """Training, search and final evaluation."""

    name: str = "ofa"
    family: Annotated[list[Annotated[str, NOT_EMPTY]], "subnets (smallest, largest, 'd=1,0,2,1 e=.14') to evaluate"] = (
        field(default_factory=lambda: ["smallest", "largest"])
    )
    train: OFATrainingConfig = field(default_factory=OFATrainingConfig)
    search: TargetSearchConfig = field(default_factory=TargetSearchConfig)
    evaluation: EvaluationConfig = field(default_factory=lambda: EvaluationConfig(clients_per_tier=0))


# -- phases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Opened:
    """How much smaller than the full network subnets may be: by `blocks` in every stage, by `widths` steps in width."""

    blocks: int = 0
    widths: int = 0


def opened_in(config: OFATrainingConfig, space: HasSortedChannels, index: int) -> Opened:
    """What is open in a round: nothing while the full network trains, then one more step per equal part of a phase."""
    blocks = max(stage.most - stage.fewest for stage in space.genome.stages)
    widths = max(len(set(values)) for values in space.design.widths.values()) - 1
    first, second = config.full_share * config.rounds, (config.full_share + config.depth_share) * config.rounds
    if index < first:
        return Opened()
    if index < second:
        return Opened(min(blocks, 1 + int((index - first) / (second - first) * blocks)))
    if any(isinstance(stage, CoupledStage) for stage in space.genome.stages):
        return Opened(blocks, widths)
    return Opened(blocks, min(widths, 1 + int((index - second) / (config.rounds - second) * widths)))


# -- what a client trains ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenSubnets(Shrinking):
    """The whole supernet, trained along random open subnets, which the teacher teaches with weight `teaching`."""

    opened: Opened = Opened()
    teaching: float = 0.0

    def on(self, worker: Worker, assignment: Assignment) -> Network:
        """The supernet's module; the teacher is the largest subnet's module, with the weights loaded before."""
        network = super().on(worker, assignment)
        if not self.teaching:
            return network
        teacher, answers = worker.subnet(worker.space.largest), list["Tensor"]()
        turns = cycle(range(self.subnets_per_batch))

        def forward(x_B: Tensor) -> Tensor:
            if next(turns) == 0:
                with torch.no_grad():
                    answers[:] = [teacher(x_B)]
            outputs: Tensor = network.forward(x_B)
            return outputs

        def loss(objective: Objective, outputs: Tensor, targets: Tensor) -> Tensor:
            taught = taught_loss(objective, outputs, answers[0], targets)
            return objective.loss(outputs, targets) + self.teaching * taught

        return replace(network, forward=forward, loss=loss)

    def _draws(self, worker: Worker, assignment: Assignment) -> Iterator[Architecture]:
        rng = stream(worker.spec.training_seed, "subnets", *places_of(assignment))
        space = with_sorted_channels(worker.space, "ofa")
        kinds = space.design.widths.values()
        least = [sorted(set(values))[-1 - self.opened.widths :][0] for values in kinds]
        widths = [
            index
            for index, values in enumerate(zip(*kinds, strict=True))
            if all(value >= low for value, low in zip(values, least, strict=True))
        ]
        while True:
            yield tuple(space.genome.draw_near_largest(self.opened.blocks, widths, rng)[0].tolist())


@dataclass(frozen=True)
class TrainTaught(Train):
    """Training of subnets by the teacher, which the client receives with the supernet."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Loads the teacher and trains."""
        teacher = worker.subnet(worker.space.largest)
        worker.load(teacher, weights, {name: Slice(f"{TEACHER}{name}") for name in worker.tensors_of(teacher)})
        worker.set_mode(teacher, training=False)
        return self._with_teacher(worker, super().run(worker, assignment, weights))

    def account(self, worker: Worker, assignment: Assignment) -> ClientResult:
        """The costs of `run`."""
        return self._with_teacher(worker, super().account(worker, assignment))

    def _with_teacher(self, worker: Worker, result: ClientResult) -> ClientResult:
        """The result with the teacher's bytes and its forward passes."""
        largest = worker.space.largest
        macs = worker.spec.macs_table.cost(largest) * sum(batch_sizes(result.samples, self.local))
        down = result.bytes_down + int(worker.space.cost_table("bytes").cost(largest))
        return replace(result, macs=result.macs + macs, forward_macs=macs, bytes_down=down)


# -- stages -----------------------------------------------------------------------------------------------------------


def stages(config: OFAConfig, world: World) -> list[Stage]:
    """Training in phases, search and final evaluation."""
    family = family_of(world, config.family)
    return searched(world, supernet_stage(world, config.train), config.search, config.evaluation, family)


def supernet_stage(world: World, config: OFATrainingConfig) -> TrainingStage:
    """Trains the full network, then its subnets in phases."""
    space = with_sorted_channels(world.space, "ofa")
    _check(config, world, space)
    rules, full = rules_of(config, "method.train"), Subnet(space.largest)
    refuse_extra_passes(rules.local, "method.train")

    def task(round_: Round) -> Train:
        opened = opened_in(config, space, round_.index)
        if opened == Opened():
            return Train(full, round_.local, rules.weighting)
        passes = config.subnets_per_batch[opened.widths > 0]
        subnets = OpenSubnets(passes, opened=opened, teaching=config.teaching)
        return (TrainTaught if config.teaching else Train)(subnets, round_.local, rules.weighting)

    def after(state: RunState, _plan: Plan, _result: RoundResult) -> RunState:
        """Makes the full network the teacher, and sorts channels before widths open."""
        weights, following = state.weights(SUPERNET), state.round + 1
        if following == config.rounds:
            return state
        before, then = (opened_in(config, space, index) for index in (state.round, following))
        if config.teaching and before == Opened() != then:
            weights = {**weights, **{f"{TEACHER}{n}": t for n, t in weights.items() if n in names}}
        if config.sort_channels and before.widths < 1 <= then.widths and weights:  # a dry run has none
            weights = space.with_sorted_channels(weights)
        return state.with_group(SUPERNET, weights)

    def without_teacher(state: RunState) -> RunState:
        weights = state.weights(SUPERNET)
        return state.with_group(SUPERNET, {n: t for n, t in weights.items() if not n.startswith(TEACHER)})

    def all_open(state: RunState) -> bool:
        return opened_in(config, space, state.round) == opened_in(config, space, config.rounds - 1)

    names = space.slices(space.largest)
    evaluated = [Subnet(world.architecture(text, "method.train.evaluate")) for text in config.evaluate]
    if config.evaluate_every:
        check_scored(world.config.stop, "method.train.evaluate", names_some=bool(evaluated))
    if evaluated and config.evaluate_every:
        check_statistics(world)
    return TrainingStage(
        *(world, config, rules),
        name=SUPERNET,
        initial=fresh_supernet(world),
        tasks=to_all(task),
        score=lambda _state: [ScoreSubnet(subnet, SUPERNET, "validation") for subnet in evaluated],
        after=after,
        settled=all_open,
        final=without_teacher,
        # Any subnet can later be sliced from the stored supernet, without training.
        keep=lambda state: [kept_model(world, SUPERNET, space.largest, tensors=state.weights(SUPERNET))],
    )


def _check(config: OFATrainingConfig, world: World, space: HasSortedChannels) -> None:
    """Raises ValueError for invalid values."""
    key = "method.train"
    check_training(config, key, world.num_clients)
    check_divergence(world.data.dataset, f"{key}.teaching", config.teaching)
    if len(config.subnets_per_batch) != 2:
        raise ValueError(
            f"{key}.subnets_per_batch={config.subnets_per_batch}: give two, one for opening depths and one for widths"
        )
    if config.full_share + config.depth_share > 1:
        raise ValueError(
            f"{key}.full_share={config.full_share:g} and depth_share={config.depth_share:g} are shares of the same "
            "rounds: together they may be at most 1"
        )
    if config.teaching and not config.full_share:
        raise ValueError(f"{key}.teaching={config.teaching:g} needs {key}.full_share above 0: the full network teaches")
    if config.depth_share and any(isinstance(stage, CoupledStage) for stage in space.genome.stages):
        raise ValueError(
            f"{key}.depth_share={config.depth_share:g}: with space.coupled=true widths open with depths; set it to 0"
        )
    if config.sort_channels:
        refuse_what_stays(config, "ofa", "sorts channels between rounds (sort_channels=true)")


METHOD = Method(
    OFAConfig,
    stages,
    kind="subnets",
    searchable=lambda _config: True,
    shared_training=lambda _config: SharedTraining(later=("search", "evaluation", "family")),
    needs=with_sorted_channels,
)
