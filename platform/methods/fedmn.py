"""FedMN: a shared modular network; a shared router chooses the modules that each silo uses, based on its data.

Source: Wang et al. 2022 (ICDM), "Personalized Federated Learning via Heterogeneous Modular Networks"; rounds as in
SPIDER, App. B.1. Interpretation in fedloom:

1. Pre-training: FedAvg of the whole network with every module on; the router is neither sent nor trained.
2. Then, in every round, a silo receives the router, draws its modules, and receives only these; it trains router and
   modules, and sends both back. A module is averaged over the silos that chose it, weighted by samples; the fixed part
   and the router over all silos of the round.
3. In the end every silo uses the modules that the router chooses without noise, and adapts them to its own data.

A silo sends neither its data nor the router's input computed from them, but the server learns which modules it chose.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from torch import Tensor

from fedloom.platform.clients.assignments import (
    Assignment,
    ClientResult,
    Task,
    places_of,
)
from fedloom.platform.clients.mixed import MixedNetwork
from fedloom.platform.clients.trainer import (
    Train,
    client_samples,
    train_network,
    trained_outcome,
    update_of,
    validation_scores,
    with_more,
)
from fedloom.platform.clients.training import SGD, LocalSGD, Samples, Step
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import SUPERNET, Method, Round, RunState, Stage, from_generator, to_all
from fedloom.platform.federation.training_config import Rules
from fedloom.platform.federation.world import World
from fedloom.platform.methods.router import (
    PREFIX,
    Router,
    chosen,
    embedding_of,
    initial_router,
    logistic_noise,
    received_router,
    straight_through,
)
from fedloom.platform.methods.scoring import adapted_outcome
from fedloom.platform.methods.silo_stages import SiloTraining
from fedloom.platform.methods.silos import AdaptationConfig, SiloTrainingConfig, adaptation, checked_silos
from fedloom.platform.seeding import torch_stream
from fedloom.platform.settings import POSITIVE, ZERO_OR_MORE
from fedloom.platform.spaces.capabilities import summing_options
from fedloom.platform.spaces.slices import Weights


@dataclass
class FedMnTrainingConfig(SiloTrainingConfig):
    """Training of the silos: `rounds` in total, the first `pretraining_rounds` of them with every module on.

    A lower `temperature` gives smaller gradients to gates whose draw was far from the threshold.
    """

    pretraining_rounds: Annotated[int, ZERO_OR_MORE, "number of first rounds, with every module on"] = 500
    router_lr: Annotated[float, POSITIVE, "the router's learning rate, the same in all rounds"] = 0.01
    temperature: Annotated[float, POSITIVE, "temperature of the sigmoid that gives the gates' gradients"] = 1.0


@dataclass
class FedMnConfig:
    """Pre-training, training with the router, then adaptation of every silo's chosen modules to its data."""

    name: str = "fedmn"
    train: FedMnTrainingConfig = field(default_factory=FedMnTrainingConfig)
    adapt: AdaptationConfig = field(default_factory=lambda: AdaptationConfig(epochs=1))


@dataclass(frozen=True)
class TrainModular:
    """One round of a silo: it draws modules with the router's probabilities, and trains them and the router.

    Each module is drawn once per round, because only the chosen modules are sent; therefore only their gates have
    gradients. The router is trained by SGD with its own learning rate, without weight decay.

    Attributes:
        router_lr: the router's learning rate.
        temperature: the temperature of the gates' gradients.
        use_validation: whether to train on the validation data as well.
        scored: whether to score the trained modules on validation data (unless `use_validation`).
    """

    local: LocalSGD
    router_lr: float
    temperature: float
    rules: Rules
    use_validation: bool = True
    scored: bool = False

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """The update holds the chosen modules, the fixed part and the router; the silo keeps no state."""
        data = client_samples(worker, assignment, use_validation=self.use_validation)
        gates = Gates.drawn(worker, assignment, weights, data, self.temperature)
        network = MixedNetwork(chosen(gates.hard), gates).on(worker)

        def both(sgd: SGD) -> Step:
            router_local = replace(self.local, lr=self.router_lr, weight_decay=0.0)
            return Steps([sgd, SGD(router_local, dict(gates.router.named_parameters()))])

        shared = train_network(worker, assignment, network, weights, data, self.local, both)
        unseen = self.scored and not self.use_validation
        scores = validation_scores(worker, assignment, network) if unseen else ()
        router = {f"{PREFIX}{name}": tensor.detach() for name, tensor in gates.router.state_dict().items()}
        update = with_more(update_of(shared, len(data[1]), self.rules.weighting), router)
        return replace(trained_outcome(shared, len(data[1]), update), measurements=scores)


class Gates:
    """A round's gates (decisions, options): `hard` holds the drawn values, gradients flow to the current router."""

    def __init__(self, router: Router, embedding: Tensor, noise: Tensor, temperature: float) -> None:
        self.router, self.embedding, self.noise, self.temperature = router, embedding, noise, temperature
        with torch.no_grad():
            self.hard = (router(embedding) + noise > 0).to(noise.dtype)

    @classmethod
    def drawn(
        cls,
        worker: Worker,
        assignment: Assignment,
        weights: Weights,
        data: Samples,
        temperature: float,
    ) -> "Gates":
        """Draws every module once, from the silo's random stream."""
        router, embedding = routed(worker, weights, data)
        generator = torch_stream(worker.spec.training_seed, "modules", *places_of(assignment))
        noise = logistic_noise((len(router.options), max(router.options)), generator)
        return cls(router, embedding, noise.to(worker.device), temperature)

    def __call__(self) -> Tensor:
        return straight_through(self.router(self.embedding) + self.noise, self.hard, self.temperature)


class Steps:
    """Several training steps in sequence, each over its own parameters."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps

    def step(self) -> None:
        for each in self.steps:
            each.step()


def routed(worker: Worker, weights: Weights, data: Samples) -> tuple[Router, Tensor]:
    """The received router, and its input computed from these data."""
    classes = worker.spec.space.num_classes
    router = received_router(summing_options(worker.space, "fedmn"), classes, weights, worker.device)
    return router, embedding_of(data, classes)


@dataclass(frozen=True)
class ScoreModular:
    """Scores the modules that the router chooses for a silo without noise, before and after training on its data."""

    local: LocalSGD
    use_validation: bool = True

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Measures `global`, the shared modules, and `personal`, the adapted ones."""
        data = client_samples(worker, assignment, use_validation=self.use_validation)
        router, embedding = routed(worker, weights, data)
        with torch.no_grad():
            network = MixedNetwork(chosen(router(embedding))).on(worker)
        return adapted_outcome(worker, assignment, network, weights, data, self.local)


def stages(config: FedMnConfig, world: World) -> list[Stage]:
    """Both phases of training, then the evaluation of every silo's modules before and after adaptation."""
    train, rules = config.train, checked_silos(world, config.train)
    if train.pretraining_rounds > train.rounds:
        raise ValueError(
            f"method.train.pretraining_rounds={train.pretraining_rounds}: must be between 0 and method.train.rounds, "
            f"which are all rounds ({train.rounds})"
        )
    space, classes = summing_options(world.space, "fedmn"), world.config.space.num_classes

    def initial(generator: torch.Generator) -> dict[str, Tensor]:
        return {**space.initial_weights(generator), **initial_router(space, classes, generator)}

    def client(round_: Round) -> Task:
        """FedAvg of the whole network in pre-training, then of the modules that each silo chooses."""
        use_validation, scored = train.use_validation, round_.scored
        if round_.index < train.pretraining_rounds:
            whole = MixedNetwork(space.largest_subspace)
            return Train(whole, round_.local, rules.weighting, use_validation=use_validation, scored=scored)
        return TrainModular(round_.local, train.router_lr, train.temperature, rules, use_validation, scored)

    router = frozenset(initial_router(space, classes, torch.Generator()))
    task = ScoreModular(adaptation(world, config.adapt, train), train.use_validation)

    def adapted(state: RunState) -> bool:
        """The paper's accuracies are those of the second phase."""
        return state.round >= train.pretraining_rounds

    training = SiloTraining(
        *(world, train, rules),
        name=config.name,
        initial=from_generator(world, initial, SUPERNET),
        tasks=to_all(client),
        parameters=space.parameter_names | router,
        test=lambda _state: task,
        ready=adapted,
    )
    return training.and_evaluation()


METHOD = Method(FedMnConfig, stages, kind="silos", lacks=("candidates", "models"), needs=summing_options)
