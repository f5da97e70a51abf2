"""FedPer (Arivazhagan et al. 2019): silos share all layers but the last one, which each silo keeps to itself.

in every round a silo  trains the shared layers with its own last layer, sends the former and keeps the latter
the server             averages what is sent
in the end             every silo's network is scored on the silo's own test data
"""

from dataclasses import dataclass, field, replace

from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.trainer import client_samples, train_network, trained_outcome, update_of
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import to_all
from fedloom.platform.federation.method import Method, Stage
from fedloom.platform.federation.training_config import Rules
from fedloom.platform.federation.world import World
from fedloom.platform.methods import silos
from fedloom.platform.spaces.slices import Weights


@dataclass
class FedPerConfig:
    """The keys `method.*`."""

    name: str = "fedper"
    train: silos.SiloTrainingConfig = field(default_factory=silos.SiloTrainingConfig)


def is_own(name: str) -> bool:
    """Whether a tensor belongs to the last layer, by the names that the spaces give it."""
    return bool({"classifier", "head"} & {*name.split(".")})


@dataclass(frozen=True)
class TrainFedPer:
    """One round of a silo: plain data, which travels to the worker that does it."""

    subnet: Subnet
    local: LocalSGD
    rules: Rules
    use_validation: bool

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """The update holds the shared layers; the state is the silo's whole network, for the next round."""
        silo = silos.begun(assignment.state, weights)  # in a silo's first round the shared weights
        start = {name: silo.weights[name] if is_own(name) else tensor for name, tensor in weights.items()}
        data = client_samples(worker, assignment, use_validation=self.use_validation)
        trained = train_network(worker, assignment, self.subnet.on(worker), start, data, self.local).copied()
        update = update_of(trained, len(data[1]), self.rules.weighting)
        outcome = trained_outcome(
            trained, len(data[1]), silos.only(update, {n for n in update.tensors if not is_own(n)})
        )
        return replace(outcome, state={**silos.Personal(trained.tensors, {}).packed(), **trained.state})


def stages(config: FedPerConfig, world: World) -> list[Stage]:
    """Training, and the evaluation of every silo's network."""
    train, rules = config.train, silos.checked_silos(world, config.train)
    subnet = Subnet(world.space.largest, stand_alone=True)
    training = silos.SiloTraining(
        *(world, train, rules),
        name=config.name,
        initial=silos.fresh_subnet(world, subnet),
        tasks=to_all(lambda round_: TrainFedPer(subnet, round_.local, rules, train.use_validation)),
        test=lambda _state: silos.ScoreOwn(subnet),
    )
    return training.and_evaluation()


METHOD = Method(FedPerConfig, stages, kind="silos", own="model", lacks=("candidates", "models"))
