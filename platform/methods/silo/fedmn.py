"""FedMN: a shared modular network, of which every silo uses the modules that a shared router chooses for its data.

Source: Wang et al. 2022 (ICDM), "Personalized Federated Learning via Heterogeneous Modular Networks"; rounds as in
SPIDER, App. B.1. As fedloom reads it:

1. Pre-training: FedAvg of the whole network, every module on; the router neither travels nor is trained.
2. Then, in every round, a silo receives the router, draws its modules, and receives these alone; it trains both, and
   sends both back. A module is averaged over the silos that chose it, by samples; the fixed part and the router over
   all of them.
3. In the end every silo uses what the router chooses without noise, and adapts it to its own data.

Neither a silo's data nor what the router reads of them is ever sent; which modules it chose is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from torch import Tensor

from fedloom.platform.clients.assignments import (
    Assignment,
    Outcome,
    Task,
    places_of,
)
from fedloom.platform.clients.mixed import Kept
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
from fedloom.platform.federation.stage import Stage
from fedloom.platform.federation.training import SUPERNET, Round, Slots, TrainingStage, from_generator, to_all
from fedloom.platform.federation.training_config import Rules
from fedloom.platform.federation.world import World
from fedloom.platform.methods.method import Method
from fedloom.platform.methods.silo.router import (
    PREFIX,
    Router,
    chosen,
    embedding_of,
    initial_router,
    logistic_noise,
    received_router,
    straight_through,
)
from fedloom.platform.methods.silo.scoring import adapted_outcome
from fedloom.platform.methods.silo.silos import AdaptationConfig, SiloTrainingConfig, adaptation, checked_silos
from fedloom.platform.methods.stages.evaluation import ClientEvaluation
from fedloom.platform.seeding import torch_stream
from fedloom.platform.settings import POSITIVE, ZERO_OR_MORE
from fedloom.platform.spaces.offers import summing_options
from fedloom.platform.spaces.slices import Weights


@dataclass
class FedMnTrainingConfig(SiloTrainingConfig):
    """Training of the silos: `rounds` in all, the first `pretraining_rounds` of them with every module on.

    The lower the `temperature`, the less do modules learn that were far from being drawn otherwise.
    """

    pretraining_rounds: Annotated[int, ZERO_OR_MORE, "rounds with every module on; the first of all rounds"] = 500
    router_lr: Annotated[float, POSITIVE, "the router's learning rate, the same in all rounds"] = 0.01
    temperature: Annotated[float, POSITIVE, "of the sigmoid whose gradients the gates have"] = 1.0


@dataclass
class FedMnConfig:
    """Pre-training and training with the router, then every silo's own choice of modules, adapted to its data."""

    name: str = "fedmn"
    train: FedMnTrainingConfig = field(default_factory=FedMnTrainingConfig)
    adapt: AdaptationConfig = field(default_factory=lambda: AdaptationConfig(epochs=1))


@dataclass(frozen=True)
class TrainModular:
    """One round of a silo: it chooses modules by the router and noise, and trains them and the router on its data.

    One draw per module holds for the round, as only what is chosen travels; so only the chosen modules' gates have
    gradients. The router takes SGD's steps at its own rate, without weight decay.

    Attributes:
        router_lr: the router's learning rate.
        temperature: of the gates' gradients.
        joined: whether validation data joins the training data.
        scored: whether the trained modules are scored on validation data, if it has not joined.
    """

    local: LocalSGD
    router_lr: float
    temperature: float
    rules: Rules
    joined: bool = True
    scored: bool = False

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """The update holds the chosen modules, the fixed part and the router; nothing stays with the silo."""
        data = client_samples(worker, assignment, joined=self.joined)
        gates = Gates.drawn(worker, assignment, weights, data, self.temperature)
        network = Kept(chosen(gates.hard), gates).on(worker)

        def both(sgd: SGD) -> Step:
            router_local = replace(self.local, lr=self.router_lr, weight_decay=0.0)
            return Steps([sgd, SGD(router_local, dict(gates.router.named_parameters()))])

        shared = train_network(worker, assignment, network, weights, data, self.local, rule=self.rules.local, step=both)
        unseen = self.scored and not self.joined
        scores = validation_scores(worker, assignment, network) if unseen else ()
        router = {f"{PREFIX}{name}": tensor.detach() for name, tensor in gates.router.state_dict().items()}
        update = with_more(update_of(shared, len(data[1]), self.rules.weighting), router)
        return replace(trained_outcome(shared, len(data[1]), update), measurements=scores)


class Gates:
    """A round's gates (decisions, options): `hard` is what was drawn, their gradients are those of the router now."""

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
        """One draw per module, from the silo's own stream."""
        router, embedding = routed(worker, weights, data)
        generator = torch_stream(worker.spec.training_seed, "modules", *places_of(assignment))
        noise = logistic_noise((len(router.options), max(router.options)), generator)
        return cls(router, embedding, noise.to(worker.device), temperature)

    def __call__(self) -> Tensor:
        return straight_through(self.router(self.embedding) + self.noise, self.hard, self.temperature)


class Steps:
    """One training step after the other, each over parameters of its own."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps

    def step(self) -> None:
        """Uses up the gradients."""
        for each in self.steps:
            each.step()


def routed(worker: Worker, weights: Weights, data: Samples) -> tuple[Router, Tensor]:
    """The router as it was received, and what it reads of these data."""
    classes = worker.spec.space.num_classes
    router = received_router(summing_options(worker.space, "fedmn"), classes, weights, worker.device)
    return router, embedding_of(data, classes)


@dataclass(frozen=True)
class ScoreModular:
    """Scores the modules that the router chooses for a silo without noise, before and after training on its data."""

    local: LocalSGD
    joined: bool = True

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """The rows of `global`, the shared modules as they are, and of `personal`, adapted."""
        data = client_samples(worker, assignment, joined=self.joined)
        router, embedding = routed(worker, weights, data)
        with torch.no_grad():
            network = Kept(chosen(router(embedding))).on(worker)
        return adapted_outcome(worker, assignment, network, weights, data, self.local)


def stages(config: FedMnConfig, world: World) -> list[Stage]:
    """Both phases of training, then the modules chosen for every silo, as shared and adapted."""
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
        """FedAvg of the whole network first, then of what each silo chooses."""
        joined, scored = train.use_validation, round_.scored
        if round_.index < train.pretraining_rounds:
            whole = Kept(space.largest_subspace)
            return Train(whole, round_.local, rules.weighting, rule=rules.local, joined=joined, scored=scored)
        return TrainModular(round_.local, train.router_lr, train.temperature, rules, joined, scored)

    router = frozenset(initial_router(space, classes, torch.Generator()))
    slots = Slots(
        initial=from_generator(world, initial, SUPERNET),
        assign=to_all(client),
        parameters=space.parameter_names | router,
    )
    task = ScoreModular(adaptation(world, config.adapt, train, train.lr), train.use_validation)
    training = TrainingStage(world, train, rules, slots, name=config.name)
    return [training, ClientEvaluation(world, lambda _state: task)]


METHOD = Method(FedMnConfig, stages, kind="silos", lacks=("candidates", "models"))
