"""FedAvg of one architecture (McMahan et al. 2017), and with other rules FedProx, FedAdam and the like.

weights <- fresh
in every round: the selected clients train the weights on their data (local rule),
                the server averages their updates (weighting) and updates the weights (server rule)
                (tier: only clients of that tier and above, whose devices afford it; FedorAS, Fig. 1)
at the end: the weights are scored on the test set, and on every client's own test data
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated

from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.scoring import ScoreSubnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.federation.algorithm import Round, TrainingStage, from_generator, to_all
from fedloom.platform.federation.method import Method
from fedloom.platform.federation.training_config import TrainingConfig, check_training, rules_of
from fedloom.platform.methods.evaluation import EvaluationConfig, EvaluationJob, EvaluationStage, everybody
from fedloom.platform.settings import NOT_EMPTY, ONE_OR_MORE

if TYPE_CHECKING:
    from fedloom.platform.clients.assignments import Task
    from fedloom.platform.federation.method import Stage
    from fedloom.platform.federation.world import World

MODEL = "fedavg"
"""The name of the stage, its tensor group, and the model in the tables."""


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
    """The task of a FedAvg client."""
    return Train(subnet, round_.local, round_.rules.weighting)


def subnet_of(config: FedAvgConfig, world: World) -> Subnet:
    """The configured architecture, as a network of its own."""
    return Subnet(world.architecture(config.architecture, "method.architecture"), stand_alone=True)


def training(
    config: FedAvgConfig,
    world: World,
    model: str,
    client: Callable[[Subnet, Round], Train] = dense,
    score: Task | None = None,
) -> TrainingStage:
    """Federated training of one architecture; `model` names the stage, its tensor group and the model."""
    check_training(config.train, "method.train", world.num_clients)
    subnet = subnet_of(config, world)
    return TrainingStage(
        *(world, config.train, rules_of(config.train, "method.train")),
        name=model,
        group=model,
        initial=from_generator(world, lambda g: world.space.initial_subnet_weights(subnet.architecture, g), model),
        tasks=to_all(partial(client, subnet)),
        eligible=world.clients_from_tier(config.tier, subnet.architecture),
        score=lambda _state: [score or ScoreSubnet(subnet, model, "validation")],
        macs=lambda _state: world.macs_table.cost(subnet.architecture),
    )


def stages(config: FedAvgConfig, world: World) -> list[Stage]:
    """Training, then the final evaluation."""
    job = EvaluationJob("", MODEL, subnet_of(config, world), MODEL, everybody(world), kept=MODEL)
    evaluation = EvaluationStage(world, config.evaluation, lambda _state: [job], models=1)
    return [training(config, world, MODEL), *([evaluation] if config.evaluate else [])]


METHOD = Method(FedAvgConfig, stages, kind="shared", lacks=("candidates",))
