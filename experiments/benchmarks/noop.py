"""A method whose clients only return what they received, so that a run consists of the platform's own work.

Its data set has one number per sample and its space one linear layer; the weights shared in a round are a separate
group of any size, so that a supernet of 200 M parameters needs no module.
"""

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.platform.averaging.average import Update
from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.arrays import Arrays
from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.algorithm import TrainingStage, to_all
from fedloom.platform.federation.method import Method, Stage
from fedloom.platform.federation.training_config import TrainingConfig, check_training, rules_of
from fedloom.platform.federation.world import World
from fedloom.platform.settings import ONE_OR_MORE, ZERO_OR_MORE
from fedloom.platform.spaces.operator_choice import Candidate, OperatorChoiceSpace
from fedloom.platform.spaces.slices import Slice, Weights, bytes_of
from fedloom.platform.spaces.space_config import SpaceConfig

HERE = "fedloom.experiments.benchmarks.noop"
NAME = "noop"
CLASSES = 2


@dataclass(frozen=True)
class Return:
    """Waits, and returns the received weights unchanged.

    `rest_s` stands for the client's training: while it rests, the processor is free for others.
    """

    rest_s: float = 0.0

    def run(self, _worker: Worker, _assignment: Assignment, weights: Weights) -> ClientResult:
        """The update that every client of a round sends."""
        if self.rest_s:
            time.sleep(self.rest_s)
        update = Update(weights, {name: Slice(name) for name in weights}, dict.fromkeys(weights, 1.0))
        size_bytes = bytes_of(weights)
        return ClientResult(
            update=update, samples=1, steps=1, loss=0.0, metric=0.0, bytes_down=size_bytes, bytes_up=size_bytes
        )


@dataclass
class NoOpConfig:
    """Training rounds without training."""

    name: str = f"{HERE}:METHOD"
    train: TrainingConfig = field(default_factory=TrainingConfig)
    parameters: Annotated[int, ONE_OR_MORE, "scalars of the shared weights"] = 1000
    tensors: Annotated[int, ONE_OR_MORE, "tensors of equal size that they are divided into"] = 10
    rest_s: Annotated[float, ZERO_OR_MORE, "seconds that a client waits before it answers"] = 0.0

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The initial weights. Ones, because pages of zeros that nobody wrote to need no memory."""
        size = max(1, self.parameters // self.tensors)
        return {f"part{i:04d}": torch.ones(size) for i in range(self.tensors)}


def stages(config: NoOpConfig, world: World) -> list[Stage]:
    """The platform's own training stage."""
    check_training(config.train, "method.train", world.num_clients)
    rules = rules_of(config.train, "method.train")
    tasks = to_all(lambda _round: Return(config.rest_s))
    initial = config.weights
    return [TrainingStage(world, config.train, rules, name=NAME, group=NAME, initial=lambda _: initial, tasks=tasks)]


METHOD = Method(NoOpConfig, stages, kind="shared", lacks=("candidates", "evaluations", "models"))


def numbers(_config: DataConfig, *, samples: int = 100) -> Arrays:
    """A data set of zeros (n, 1), for as many clients as there are samples."""
    train, test = ((np.zeros((n, 1), np.float32), np.arange(n) % CLASSES) for n in (samples, 2 * CLASSES))
    return Arrays(train=train, test=test, class_names=[str(label) for label in range(CLASSES)])


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(1, CLASSES)

    def forward(self, x: Tensor, layers: "list[nn.Module]") -> Tensor:
        y: Tensor = self.classifier(layers[0](x.flatten(1)))
        return y


def line(_config: SpaceConfig) -> OperatorChoiceSpace:
    """A space with one architecture of one linear layer, which nobody trains."""
    only = [[Candidate("identity", nn.Identity)]]
    return OperatorChoiceSpace(name="benchmark_line", input_shape=(1,), layers=only, build_fixed=_Linear)
