"""FedAvg of one architecture (McMahan et al. 2017), and with other rules FedProx, FedAdam and the like.

weights <- fresh
in every round: the selected clients train the weights on their data (local rule),
                the server averages their updates (weighting) and updates the weights (server rule)
                (tier: only clients of that tier and above, whose devices afford it; FedorAS, Fig. 1)
in the end: the weights are scored on the test set, and on every client's own test data
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated

from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.scoring import ScoreSubnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.federation.algorithm import Method, Round, TrainingStage, from_generator, to_all
from fedloom.platform.federation.training_config import TrainingConfig, check_training, rules_of
from fedloom.platform.methods.evaluation import EvaluationConfig, EvaluationJob, EvaluationStage, everybody
from fedloom.platform.settings import NOT_EMPTY, ONE_OR_MORE

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedloom.platform.clients.assignments import Task
    from fedloom.platform.federation.algorithm import RunState, Stage
    from fedloom.platform.federation.world import World
    from fedloom.platform.spaces.slices import Weights

MODEL = "fedavg"
"""The name of the stage, its tensor group, and the model in the tables."""
DEPLOYED = "deployed"
"""The tensor group of a model whose weights are not those that were trained."""


@dataclass
class FedAvgConfig:
    """One architecture, trained from fresh weights."""

    name: str = "fedavg"
    architecture: Annotated[
        str | None, NOT_EMPTY, "smallest, largest, or options such as 0-0-3; null: the space's first"
    ] = None
    tier: Annotated[
        int | None, ONE_OR_MORE, "clients of this tier and above train (1 is the lowest); null: all, whatever it costs"
    ] = None
    train: TrainingConfig = field(default_factory=TrainingConfig)
    evaluate: Annotated[bool, "whether the final model is scored and stored"] = True
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


def dense(subnet: Subnet, round_: Round) -> Train:
    """A client of FedAvg."""
    return Train(subnet, round_.local, round_.rules.weighting)


@dataclass(frozen=True)
class Deployment:
    """A model that is used with other weights than it is trained with.

    Attributes:
        score: the task that scores the trained weights as the model is used.
        weights: the model's weights, from its architecture and the trained ones.
    """

    score: Callable[[Subnet], Task]
    weights: Callable[[Subnet, Weights], dict[str, Tensor]]


def fedavg_stages(
    config: FedAvgConfig,
    world: World,
    model: str,
    client: Callable[[Subnet, Round], Train] = dense,
    deployment: Deployment | None = None,
) -> list[Stage]:
    """Training of one architecture, then the final evaluation; `model` names all three: stage, group, model."""
    check_training(config.train, "method.train", world.num_clients)
    subnet = Subnet(world.architecture(config.architecture, "method.architecture"), stand_alone=True)
    rules = rules_of(config.train, "method.train")
    training = TrainingStage(
        *(world, config.train, rules),
        name=model,
        group=model,
        initial=from_generator(world, lambda g: world.space.initial_subnet_weights(subnet.architecture, g), model),
        tasks=to_all(partial(client, subnet)),
        eligible=able(world, config.tier, subnet),
        score=lambda _state: [deployment.score(subnet) if deployment else ScoreSubnet(subnet, model, "validation")],
        macs=lambda _state: world.macs_table.cost(subnet.architecture),
    )

    def deployed(state: RunState) -> RunState:
        if deployment is None or model not in state.groups:
            return state
        return state.with_group(DEPLOYED, deployment.weights(subnet, state.weights(model)))

    job = EvaluationJob("", model, subnet, DEPLOYED if deployment else model, everybody(world), kept=model)
    evaluation = EvaluationStage(world, config.evaluation, lambda _state: [job], models=1, prepare=deployed)
    return [training, evaluation] if config.evaluate else [training]


def able(world: World, lowest: int | None, subnet: Subnet) -> np.ndarray:
    """Who may train: all clients, or those of a tier (from 1) and above; ValueError if that tier cannot afford it."""
    if lowest is None:
        return world.everyone
    if lowest > len(world.tiers):
        raise ValueError(f"method.tier={lowest}: there are {len(world.tiers)} tiers")
    tier, cost = world.tiers[lowest - 1], world.cost_table.cost(subnet.architecture)
    if cost > tier.upper:
        raise ValueError(
            f"method.tier={lowest}: {tier.name} may spend {tier.upper:.6g} {world.cost_table.measure}, architecture "
            f"{world.space.label(subnet.architecture)} costs {cost:.6g}; give a higher tier or a smaller one"
        )
    clients = world.eligible_by_tier[lowest - 1]
    if not len(clients):
        raise ValueError(f"method.tier={lowest}: no client is of {tier.name} or above; change tiers.shares")
    return clients


def stages(config: FedAvgConfig, world: World) -> list[Stage]:
    """Training, then the final evaluation."""
    return fedavg_stages(config, world, MODEL)


METHOD = Method(FedAvgConfig, stages, kind="shared", lacks=("candidates",))
