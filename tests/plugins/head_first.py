"""A method of two stages, as one fine-tunes: first the classifier alone is trained, then all from there.

stage head:   FedAvg of fresh weights, but clients leave everything below the last layer as it is
stage whole:  FedAvg of everything, with `shrink` times the learning rate
"""

from dataclasses import dataclass, field, replace
from typing import Annotated

from torch import Tensor

from fedloom.platform.clients.local_rules import LocalClient
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.scoring import ScoreSubnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import Correction
from fedloom.platform.federation.algorithm import Initial, Round, TrainingStage, from_generator, to_all
from fedloom.platform.federation.method import Method, Stage
from fedloom.platform.federation.training_config import TrainingConfig, check_training, rules_of
from fedloom.platform.federation.world import World
from fedloom.platform.methods.evaluation import EvaluationConfig, EvaluationJob, EvaluationStage, everybody
from fedloom.platform.settings import ONE_OR_MORE, SHARE

BODY, WHOLE = "head", "whole"


@dataclass
class HeadFirstConfig:
    """The space's largest network."""

    name: str = "head_first"
    head_rounds: Annotated[int, ONE_OR_MORE, "rounds in which the classifier alone is trained"] = 2
    shrink: Annotated[float, SHARE, "the second stage's learning rate as a share of the first's"] = 0.3
    train: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


def only_the_head(_client: LocalClient) -> Correction:
    """The gradients of all but the last layer, by the names that the spaces give it, become zero."""

    def correct(name: str, _parameter: Tensor, gradient: Tensor) -> None:
        if not {"classifier", "head"} & {*name.split(".")}:
            gradient.zero_()

    return correct


def stages(config: HeadFirstConfig, world: World) -> list[Stage]:
    """Head, whole, evaluation."""
    subnet = Subnet(world.space.largest, stand_alone=True)
    head = replace(config.train, rounds=config.head_rounds, local_rule=f"{__name__}:only_the_head")
    whole = replace(config.train, lr=config.shrink * config.train.lr)
    fresh = from_generator(world, lambda g: world.space.initial_subnet_weights(subnet.architecture, g), BODY)

    def client(round_: Round) -> Train:
        return Train(subnet, round_.local, round_.rules.weighting)

    def training(name: str, part: TrainingConfig, initial: Initial) -> TrainingStage:
        check_training(part, "method.train", world.num_clients)
        rules, score = rules_of(part, "method.train"), [ScoreSubnet(subnet, name, "validation")]
        start = {"initial": initial, "tasks": to_all(client)}
        return TrainingStage(world, part, rules, name=name, group=name, score=lambda _state: score, **start)

    sequence = [training(BODY, head, fresh), training(WHOLE, whole, lambda state: state.weights(BODY))]
    job = EvaluationJob("", WHOLE, subnet, WHOLE, everybody(world), kept=WHOLE)
    return [*sequence, EvaluationStage(world, config.evaluation, lambda _state: [job])]


METHOD = Method(HeadFirstConfig, stages, kind="shared", lacks=("candidates",))
