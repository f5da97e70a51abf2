"""FedDF: ensemble distillation on the server, also between different networks (Lin et al. 2020, Alg. 1 and 3).

    in every round: each client trains its tier's network
                    the network of each kind becomes the mean of the clients' networks of that kind
    server, then:   for every batch d of unlabelled inputs, for each kind p:
                    x_p <- one step of Adam on KL(softmax(mean of all clients' logits on d) || softmax(x_p's logits))
    at the end:     a tier's model is the network of its kind

A kind is an architecture. The networks that clients have sent are equal teachers, whatever their kind. The unlabelled
inputs are the server's validation data without labels, never test data; so validation scores are measured on inputs
that were distilled on. Adam's learning rate falls along half a cosine within a round. The paper stops distillation
early, by the accuracy on validation data; here a round has `steps` steps. With 0 steps this is FedAvg of each kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, cast

import numpy as np
import torch
from torch import Tensor

from fedloom.platform.averaging.aggregators import KeptUpdates
from fedloom.platform.averaging.average import Update
from fedloom.platform.averaging.weighting import weighting_traits
from fedloom.platform.clients.assignments import ClientResult, TaskError
from fedloom.platform.clients.networks import Network, OfSubnet, Subnet
from fedloom.platform.clients.objectives import check_divergence, divergence, logits_of
from fedloom.platform.clients.scoring import ScoreSubnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import LocalSGD, Optimizer, batch_indices
from fedloom.platform.data.on_device import moved, upload
from fedloom.platform.data.trees import Tree, taken
from fedloom.platform.federation.algorithm import (
    SUPERNET,
    Plan,
    PostRoundWork,
    Round,
    RoundResult,
    RoundTasks,
    RoundUpdate,
    TrainingStage,
    from_generator,
)
from fedloom.platform.federation.method import Method
from fedloom.platform.federation.selection import for_server
from fedloom.platform.federation.training_config import TrainingConfig, check_training, rules_of
from fedloom.platform.methods.evaluation import EvaluationConfig, EvaluationJob, EvaluationStage, group_name, tier_job
from fedloom.platform.methods.silos import under
from fedloom.platform.methods.tier_models import largest_of_tiers
from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.seeding import torch_stream
from fedloom.platform.settings import NOT_EMPTY, ONE_OR_MORE, POSITIVE, SHARE, ZERO_OR_MORE
from fedloom.platform.spaces.initialisation import on_meta
from fedloom.platform.spaces.slices import Architecture, Slice, SliceMap, Weights, architecture_id

if TYPE_CHECKING:
    from fedloom.platform.clients.assignments import Assignment
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.federation.algorithm import RunState
    from fedloom.platform.federation.method import Stage
    from fedloom.platform.federation.world import World
    from fedloom.platform.spaces.base import SearchSpace

MOST_ARCHITECTURES = 100_000
"""In spaces with more architectures, a tier's largest network is not searched for."""
AT_ONCE = 256
"""Samples per forward pass of a teacher."""


@dataclass
class DistillationConfig:
    """The server's distillation after averaging."""

    steps: Annotated[int, ZERO_OR_MORE, "distillation steps per round, each on one batch; 0: FedAvg"] = 100
    batch_size: Annotated[int, ONE_OR_MORE, "unlabelled samples per step"] = 128
    lr: Annotated[float, POSITIVE, "the server's learning rate (Adam)"] = 0.001
    share: Annotated[float, SHARE, "share of the server's validation samples that are distilled on, unlabelled"] = 1.0


@dataclass
class FedDFConfig:
    """A network per tier, trained by its clients and distilled from all of them."""

    name: str = "feddf"
    architectures: Annotated[
        list[Annotated[str, NOT_EMPTY]] | None,
        "smallest, largest or options such as 0-0-3 for each tier, or one for all; null: the largest each affords",
    ] = None
    train: TrainingConfig = field(default_factory=TrainingConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


def architectures_of(config: FedDFConfig, world: World) -> list[Architecture]:
    """Every tier's architecture; ValueError for one that its tier cannot afford, unless it is the one for all."""
    tiers, named = world.tiers, config.architectures
    if named is None:
        if world.space.num_architectures > MOST_ARCHITECTURES:
            raise ValueError(
                f"method.architectures: {world.space.name} has {world.space.num_architectures} architectures, too many "
                "to search for the largest that a tier affords: give one per tier, or one for all"
            )
        return largest_of_tiers(world)
    if len(named) not in (1, len(tiers)):
        raise ValueError(f"method.architectures has {len(named)} values for {len(tiers)} tiers: give one each, or one")
    chosen = [world.architecture(name, "method.architectures") for name in named]
    for tier, architecture in zip(tiers, chosen * (len(tiers) // len(chosen)), strict=True):
        cost = world.cost_table.cost(architecture)
        if cost > tier.upper and len(chosen) > 1:
            raise ValueError(
                f"method.architectures: {tier.name} may spend {tier.upper:.6g} {world.cost_table.measure}, "
                f"{world.space.label(architecture)} costs {cost:.6g}: choose a smaller one, or raise its upper bound"
            )
    return chosen * (len(tiers) // len(chosen))


# -- networks of several kinds in one group of tensors -----------------------------------------------------------------


def prefix_of(architecture: Architecture) -> str:
    """The prefix of the names of a kind's tensors."""
    return f"{architecture_id(architecture)}/"


@dataclass(frozen=True)
class OfKind(OfSubnet):
    """A stand-alone network whose tensors have its architecture as a prefix of their shared names."""

    def on(self, worker: Worker, assignment: Assignment) -> Network:
        """The network in the subnet's module."""
        network = self.subnet.on(worker, assignment)
        return replace(network, slices=self._shared(network.slices))

    def held(self, space: SearchSpace) -> SliceMap:
        """All tensors of its kind."""
        return self._shared(self.subnet.held(space))

    def _shared(self, slices: SliceMap) -> SliceMap:
        prefix = prefix_of(self.subnet.architecture)
        return {name: Slice(f"{prefix}{name}") for name in slices}


@dataclass(frozen=True)
class ScoreKind(ScoreSubnet):
    """Scores the network of a kind."""

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        return super().run(worker, assignment, under(weights, prefix_of(self.subnet.architecture)))


# -- the server's distillation -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distill:
    """Distils every kind's network from the clients' networks, the tensors `INDEX/NAME` of the assignment's state.

    `teachers` are the architectures of the clients' networks, by index.
    """

    kinds: tuple[Architecture, ...]
    teachers: tuple[Architecture, ...]
    config: DistillationConfig

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """The update holds all tensors of every kind, with weight 1."""
        assert assignment.state is not None, "the teachers"
        samples = worker.central_data("validation", self.config.share)
        generator = torch_stream(worker.spec.training_seed, "distillation", assignment.stage, assignment.round)
        size, steps = self.config.batch_size, self.config.steps
        batches = list(itertools.islice(batch_indices(len(samples), size, steps, generator), steps))
        drawn = torch.unique(torch.cat(batches))  # only these need the teachers' logits
        x = samples.tensors(drawn.numpy())[0]
        places = upload(torch.searchsorted(drawn, torch.cat(batches)), worker.device)
        batches = list(torch.split(places, [len(batch) for batch in batches]))
        taught = self._taught(worker, moved(assignment.state, worker.device), x, len(drawn))
        tensors = dict[str, Tensor]()
        for kind in self.kinds:
            network = OfKind(Subnet(kind, stand_alone=True)).on(worker, assignment)
            after = self._distilled(worker, network, weights, x, taught, batches, generator)
            tensors |= {f"{prefix_of(kind)}{name}": tensor for name, tensor in after.items()}
        slices = {name: Slice(name) for name in tensors}
        return ClientResult(update=Update(tensors, slices, dict.fromkeys(tensors, 1.0)), samples=len(drawn))

    def _taught(self, worker: Worker, state: Mapping[str, Tensor], x: Tree, count: int) -> Tensor:
        """The ensemble's mean logits (n, classes, ...)."""
        total: Tensor | None = None
        places = torch.split(torch.arange(count, device=worker.device), AT_ONCE)
        for index, architecture in enumerate(self.teachers):
            network = Subnet(architecture, stand_alone=True).on(worker)
            worker.load(network.module, under(state, f"{index}/"), network.slices)
            worker.set_mode(network.module, training=False)
            with torch.no_grad():
                logits = torch.cat([_logits(network, taken(x, part)) for part in places])
            total = logits if total is None else total + logits
        assert total is not None, "a round without updates distils nothing"
        return total / len(self.teachers)

    def _distilled(
        self,
        worker: Worker,
        network: Network,
        weights: Weights,
        x: Tree,
        taught: Tensor,
        batches: Sequence[Tensor],
        generator: torch.Generator,
    ) -> dict[str, Tensor]:
        """A kind's tensors after the server's steps."""
        tensors = worker.load(network.module, weights, network.slices)
        worker.set_mode(network.module, training=True)
        adam = LocalSGD(1, self.config.batch_size, self.config.lr, optimizer=ComponentSpec("adam"), cosine_to=0.0)
        parameters = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        optimizer = Optimizer(adam, parameters, steps=len(batches))
        with worker.randomness(network.module, generator):
            for batch in batches:
                loss = divergence(_logits(network, taken(x, batch)), taught[batch])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return {name: tensor.detach() for name, tensor in tensors.items()}


def _logits(network: Network, x_B: Tree) -> Tensor:
    logits = logits_of(network.forward(x_B))
    if logits.dim() < 2 or logits.shape[1] < 2:  # their softmax would be 1, whatever the network has learned
        raise TaskError(f"feddf distils a logit per class, and the network gives {tuple(logits.shape)} for a batch")
    return logits


# -- stages -----------------------------------------------------------------------------------------------------------


class DistilledTraining(TrainingStage):
    """A training stage after whose rounds the server distils the networks of all kinds."""

    kinds: tuple[Architecture, ...]
    distillation: DistillationConfig

    def plan(self, state: RunState) -> Plan:
        """The training stage's plan; the updates are kept, because distillation needs every client's network."""
        planned = super().plan(state)
        return replace(planned, keeps_updates=planned.keeps_updates or self.distillation.steps > 0)

    def merge(self, state: RunState, plan: Plan, result: RoundResult) -> RoundUpdate:
        """The training stage's update, plus the server's distillation, after which the last scores are taken."""
        merged = super().merge(state, plan, result)
        if not (self.distillation.steps and isinstance(result.sums, KeptUpdates) and result.sums.kept):
            return merged
        answered = {r.client_id for r in result.client_results if r.status == "ok"}
        tasks = [cast(Train, a.task) for a in plan.assignments if a.client_id is not None and a.client_id in answered]
        teachers = tuple(cast(OfKind, task.network).subnet.architecture for task in tasks)
        networks = {f"{i}/{n}": t for i, update in enumerate(result.sums.kept) for n, t in update.tensors.items()}
        task = Distill(self.kinds, teachers, self.distillation)
        assignment = replace(for_server(self.name, state.round, task), state=networks)

        def distilled(after: RunState, done: RoundResult) -> RoundUpdate:
            new = after.with_group(self.group, done.sums.finish(after.weights(self.group)).weights)
            return RoundUpdate(self.with_sent(new, state.round + 1), evaluation=self._last_scores(new))

        return replace(merged, evaluation=None, work=PostRoundWork(Plan([assignment], self.group), distilled))


def check_distillation(config: FedDFConfig, world: World) -> None:
    """Raises ValueError for settings that hide the trained networks from the server, and without data to distil on."""
    if not config.distillation.steps:
        return
    check_divergence(world.data.dataset, "method.distillation.steps", config.distillation.steps)
    train = config.train
    if train.privacy.clip is not None or train.privacy.noise or train.privacy.secure:
        raise ValueError(
            "method.train.privacy: feddf's server looks at every single network; use method.distillation.steps=0"
        )
    if weighting_traits(train.weighting).weighs_unheld:
        raise ValueError(
            f"method.train.weighting={train.weighting}: networks of several kinds have no tensors in common; use fedavg"
        )
    if train.local_rule == "fednova":
        raise ValueError(
            "method.train.local_rule=fednova: clients send normalised changes, not the networks that the server would "
            "learn from; use another local rule, or method.distillation.steps=0"
        )
    if train.asynchronous is not None:
        raise ValueError(
            f"method.train.asynchronous={train.asynchronous}: late networks are mixed with newer weights before the "
            "server could learn from them; leave it out (null), or use method.distillation.steps=0"
        )
    if not world.data.num_central("validation"):
        raise ValueError(
            "method.distillation needs unlabelled inputs, the server's validation data: raise data.validation_share"
        )


def stages(config: FedDFConfig, world: World) -> list[Stage]:
    """Training and distillation, then the evaluation of the tiers' models."""
    check_training(config.train, "method.train", world.num_clients)
    check_distillation(config, world)
    rules, chosen, space = rules_of(config.train, "method.train"), architectures_of(config, world), world.space
    kinds = tuple(dict.fromkeys(chosen))
    subnets = [Subnet(architecture, stand_alone=True) for architecture in chosen]

    def fresh(generator: torch.Generator) -> dict[str, Tensor]:
        drawn = {kind: space.initial_subnet_weights(kind, generator) for kind in kinds}
        return {
            f"{prefix_of(kind)}{name}": tensor for kind, weights in drawn.items() for name, tensor in weights.items()
        }

    def give(round_: Round) -> RoundTasks:
        networks = [OfKind(subnets[int(world.tier_of_client[client_id])]) for client_id in round_.client_ids]
        return RoundTasks([Train(network, round_.local, rules.weighting) for network in networks])

    scores = [ScoreKind(Subnet(kind, stand_alone=True), config.name, "validation") for kind in kinds]
    mean_macs = float(np.mean([world.macs_table.cost(chosen[tier]) for tier in world.tier_of_client.tolist()]))
    modules = {kind: on_meta(partial(space.build_subnet, kind)) for kind in kinds}
    training = DistilledTraining(
        *(world, config.train, rules),
        name=config.name,
        initial=from_generator(world, fresh, config.name),
        tasks=give,
        score=lambda _state: scores,
        macs=lambda _state: mean_macs,
        parameters=frozenset(f"{prefix_of(k)}{name}" for k, m in modules.items() for name, _ in m.named_parameters()),
    )
    training.kinds, training.distillation = kinds, config.distillation
    if config.distillation.steps:
        training.processing.check_acts_on_updates()
    if training.processing.needs_updates and config.distillation.steps:
        raise ValueError(
            f"attack.name={world.config.attack.name}: colluders only change averaged updates, not the networks that "
            "the server distils; use an attack whose clients work alone"
        )

    def of_tiers(state: RunState) -> RunState:
        for tier, architecture in zip(world.tiers, chosen, strict=True):
            if SUPERNET in state.groups:
                model = under(state.weights(SUPERNET), prefix_of(architecture))
                state = state.with_group(group_name(tier.name, config.name), model)
        return state

    def jobs(state: RunState) -> list[EvaluationJob]:
        groups = [group_name(tier.name, config.name) for tier in world.tiers]
        return [
            tier_job(world, i, config.name, subnets[i], group)
            for i, group in enumerate(groups)
            if group in state.groups
        ]

    return [training, EvaluationStage(world, config.evaluation, jobs, len(world.tiers), prepare=of_tiers)]


METHOD = Method(FedDFConfig, stages, kind="tiers", lacks=("candidates",))
