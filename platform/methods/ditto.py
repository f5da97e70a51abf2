"""Ditto (Li et al. 2021, Alg. 1): FedAvg plus a personal model per silo, regularised towards the shared one.

Settings of SPIDER, App. B.1.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated

from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.local_rules import pull_towards
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.scoring import PERSONAL, validation_scores
from fedloom.platform.clients.trainer import ValidationUse, client_samples, received, train_network
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import Round
from fedloom.platform.federation.method import Method, Stage
from fedloom.platform.federation.training_config import Rules
from fedloom.platform.federation.world import World
from fedloom.platform.methods.silos import (
    Personal,
    ScoreOwn,
    SiloTrainingConfig,
    SubnetConfig,
    begun,
    pair_outcome,
    resumed,
    subnet_stages,
)
from fedloom.platform.settings import ZERO_OR_MORE
from fedloom.platform.spaces.slices import Weights


@dataclass
class DittoTrainingConfig(SiloTrainingConfig):
    """Training of the silos."""

    pull: Annotated[float, ZERO_OR_MORE, "lambda: the pull towards the shared model; 0: local training only"] = 0.1


@dataclass
class DittoConfig(SubnetConfig):
    """FedAvg, and a personal model per silo."""

    name: str = "ditto"
    train: DittoTrainingConfig = field(default_factory=DittoTrainingConfig)


@dataclass(frozen=True)
class TrainDitto:
    """One round of a silo; `pull` is lambda, the strength of the pull towards the received weights."""

    subnet: Subnet
    local: LocalSGD
    pull: float
    rules: Rules
    validation: ValidationUse = "trained"

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Trains both models; the update holds only the shared one, the personal one stays in the silo's state."""
        silo = begun(assignment.state, weights)
        network = self.subnet.on(worker)
        data = client_samples(worker, assignment, use_validation=self.validation == "trained")

        shared = train_network(worker, assignment, network, weights, data, self.local).copied()
        pull = pull_towards(self.pull, received(worker, network, weights))
        resume = resumed(silo.momentum, pull)
        personal = train_network(worker, assignment, network, silo.weights, data, self.local.plain, resume)
        scores = validation_scores(worker, assignment, network, PERSONAL) if self.validation == "scored" else ()
        personal = personal.copied()
        after = Personal(personal.tensors, personal.momentum)
        return replace(pair_outcome(shared, personal, data, self.rules.weighting, after), measurements=scores)


def stages(config: DittoConfig, world: World) -> list[Stage]:
    """Training of both models, then the evaluation of the personal ones."""

    def client(subnet: Subnet, round_: Round, validation: ValidationUse) -> TrainDitto:
        return TrainDitto(subnet, round_.local, config.train.pull, round_.rules, validation)

    return subnet_stages(world, config, ScoreOwn, client)


METHOD = Method(DittoConfig, stages, kind="silos", own="model", lacks=("candidates", "models"))
