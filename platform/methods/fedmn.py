"""FedMN: a shared modular network; a shared router chooses the modules that each silo uses, based on its data.

Source: Wang et al. 2022 (ICDM), "Personalized Federated Learning via Heterogeneous Modular Networks"; rounds as in
SPIDER, App. B.1. Interpretation in fedloom:

1. Pre-training: FedAvg of the whole network with every module on; the router is neither sent nor trained.
2. Then, in every round, a silo receives the router, draws its modules, and receives only these; it trains router and
   modules, and sends both back. A module is averaged over the silos that chose it, weighted by samples; the fixed part
   and the router over all silos of the round.
3. At the end every silo uses the modules that the router chooses without noise, and adapts them to its own data.

A module is one option of one decision of the space, on or off. A silo sends neither its data nor the router's input
computed from them, but the server learns which modules it chose.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from fedloom.platform.clients.assignments import Assignment, ClientResult, Task, places_of
from fedloom.platform.clients.networks import MixedNetwork
from fedloom.platform.clients.scoring import validation_scores
from fedloom.platform.clients.trainer import (
    Train,
    ValidationUse,
    client_samples,
    train_network,
    trained_outcome,
    update_of,
    with_more,
)
from fedloom.platform.clients.training import LocalSGD, Optimizer, Samples, Step
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.on_device import upload
from fedloom.platform.data.trees import single
from fedloom.platform.federation.algorithm import SUPERNET, Round, RunState, from_generator, to_all
from fedloom.platform.federation.method import Method, Stage
from fedloom.platform.federation.training_config import Rules
from fedloom.platform.federation.world import World
from fedloom.platform.methods.silos import (
    AdaptationConfig,
    SiloTraining,
    SiloTrainingConfig,
    adaptation,
    adapted_outcome,
    check_classes,
    checked_silos,
    refuse_feddyn,
    validation_use,
)
from fedloom.platform.seeding import torch_stream
from fedloom.platform.settings import POSITIVE, ZERO_OR_MORE
from fedloom.platform.spaces.capabilities import SumsOptions, summing_options
from fedloom.platform.spaces.initialisation import initialise, on_meta
from fedloom.platform.spaces.slices import Subspace, Weights

PREFIX = "router/"
"""Prefix of the router's tensors in the tensor group that also holds the network's."""
SIDE = 4
"""Height and width to which images are pooled."""
HIDDEN = 64
FIRST_LOGIT = 1.0
"""Every module's initial logit: it is chosen with probability .73, and always without noise."""


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


# -- the router: which modules a silo uses, from statistics of its data -----------------------------------------------


class Router(nn.Module):
    """Linear, ReLU, Linear: embedding (E,) -> logits (decisions, max options), -inf for options that do not exist."""

    def __init__(self, embedding_size: int, options: Sequence[int]) -> None:
        super().__init__()
        self.options = list(options)
        self.hidden = nn.Linear(embedding_size, HIDDEN)
        self.out = nn.Linear(HIDDEN, sum(options))

    def forward(self, embedding: Tensor) -> Tensor:
        """One logit per module, which is used with probability sigmoid(logit)."""
        logits: Tensor = self.out(F.relu(self.hidden(embedding)))
        return pad_sequence(list(torch.split(logits, self.options)), batch_first=True, padding_value=-math.inf)


def _build(space: SumsOptions, num_classes: int) -> Router:
    return Router(space.input_shape[0] * SIDE**2 + num_classes, space.options)


def initial_router(space: SumsOptions, num_classes: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Initial tensors of the space's router, by their names in the shared tensor group.

    The second layer's weights are zero, so that all logits are initially `FIRST_LOGIT` for any data.
    """
    tensors = initialise(on_meta(partial(_build, space, num_classes)), generator)
    tensors["out.weight"].zero_()
    tensors["out.bias"].fill_(FIRST_LOGIT)
    return {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()}


def received_router(space: SumsOptions, num_classes: int, weights: Weights, device: torch.device) -> Router:
    """A new router module with the shared tensor group's values."""
    # Every tensor is loaded from main memory: moving the values to the device first would make the host wait.
    router = on_meta(partial(_build, space, num_classes)).to_empty(device=device)
    assert isinstance(router, Router), "that is what was built"
    router.load_state_dict({name: weights[f"{PREFIX}{name}"] for name in router.state_dict()})
    return router


def embedding_of(data: tuple[Tensor, Tensor], num_classes: int) -> Tensor:
    """The router's input for images (n, C, H, W) with labels (n,): (16 C + classes,), float32.

    It is the mean of the images, pooled to 4 x 4 per channel, followed by the labels' frequencies.
    """
    x, y = data
    # Averaging and pooling commute; averaging first allocates no tensor of the data's size.
    image = F.adaptive_avg_pool2d(x.mean(dim=0), SIDE)
    # Not `bincount`: the length of its result depends on the largest label, so the host would wait for the device.
    histogram = (y.unsqueeze(1) == torch.arange(num_classes, device=y.device)).sum(dim=0).to(image.dtype) / len(y)
    return torch.cat([image.flatten(), histogram])


def logistic_noise(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Standard logistic noise, float32: logit + noise > 0 with probability sigmoid(logit) (Maddison et al. 2017)."""
    # In double precision, and clamped away from 0, whose logit is infinite.
    uniform = torch.rand(tuple(shape), generator=generator, dtype=torch.float64).clamp_(min=2.0**-53)
    return torch.logit(uniform).float()


def chosen(scores: Tensor) -> Subspace:
    """The modules whose score (decisions, options) is above 0; a decision may have none."""
    rows = (scores > 0).cpu().tolist()  # one copy for all decisions
    return tuple(tuple(option for option, is_on in enumerate(row) if is_on) for row in rows)


def straight_through(scores: Tensor, hard: Tensor, temperature: float) -> Tensor:
    """Gates with the values `hard` (0 or 1) and the gradients of sigmoid(scores / temperature).

    Source: Bengio et al. 2013. `scores` are logits plus noise.
    """
    soft = torch.sigmoid(scores / temperature)
    # The parentheses make the gate exactly 0 or 1.
    return hard + (soft - soft.detach())


# -- what a silo does -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainModular:
    """One round of a silo: it draws modules with the router's probabilities, and trains them and the router.

    Each module is drawn once per round, because only the chosen modules are sent; therefore only their gates have
    gradients. The router is trained by SGD with its own learning rate, without weight decay.

    Attributes:
        router_lr: the router's learning rate.
        temperature: the temperature of the gates' gradients.
        validation: what the silo does with its validation data.
    """

    local: LocalSGD
    router_lr: float
    temperature: float
    rules: Rules
    validation: ValidationUse = "trained"

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """The update holds the chosen modules, the fixed part and the router; the silo keeps no state."""
        data = client_samples(worker, assignment, use_validation=self.validation == "trained")
        router, embedding = routed(worker, weights, data)
        generator = torch_stream(worker.spec.training_seed, "modules", *places_of(assignment))
        noise = upload(logistic_noise((len(router.options), max(router.options)), generator), worker.device)
        with torch.no_grad():
            hard = (router(embedding) + noise > 0).to(noise.dtype)

        def gates() -> Tensor:
            """The drawn values (decisions, options), with gradients that flow to the current router."""
            return straight_through(router(embedding) + noise, hard, self.temperature)

        def both(sgd: Optimizer) -> Step:
            router_local = replace(self.local, lr=self.router_lr, weight_decay=0.0)
            return TwoSteps(sgd, Optimizer(router_local, dict(router.named_parameters())))

        network = MixedNetwork(chosen(hard), gates).on(worker)

        shared = train_network(worker, assignment, network, weights, data, self.local, both)
        scores = validation_scores(worker, assignment, network) if self.validation == "scored" else ()
        trained = {f"{PREFIX}{name}": tensor.detach() for name, tensor in router.state_dict().items()}
        update = with_more(update_of(shared, len(data[1]), self.rules.weighting), trained)
        return replace(trained_outcome(shared, len(data[1]), update), measurements=scores)


@dataclass
class TwoSteps:
    """The training steps of the modules and of the router."""

    modules: Step
    router: Step

    def step(self) -> None:
        """One step of each."""
        self.modules.step()
        self.router.step()


def routed(worker: Worker, weights: Weights, data: Samples) -> tuple[Router, Tensor]:
    """The received router, and its input computed from these data."""
    classes = worker.spec.space.num_classes
    router = received_router(summing_options(worker.space, "fedmn"), classes, weights, worker.device)
    return router, embedding_of((single(data[0], "fedmn"), single(data[1], "fedmn")), classes)


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
    check_classes(world)
    refuse_feddyn(train, config.name, "a router")
    if train.pretraining_rounds > train.rounds:
        raise ValueError(
            f"method.train.pretraining_rounds={train.pretraining_rounds}: must be between 0 and method.train.rounds, "
            f"the number of all rounds ({train.rounds})"
        )
    space, classes = summing_options(world.space, "fedmn"), world.config.space.num_classes

    def initial(generator: torch.Generator) -> dict[str, Tensor]:
        return {**space.initial_weights(generator), **initial_router(space, classes, generator)}

    def client(round_: Round) -> Task:
        """FedAvg of the whole network in pre-training, then of the modules that each silo chooses."""
        validation = validation_use(trained=train.use_validation, scored=round_.scored)
        if round_.index < train.pretraining_rounds:
            whole = MixedNetwork(space.largest_subspace)
            return Train(whole, round_.local, rules.weighting, validation)
        return TrainModular(round_.local, train.router_lr, train.temperature, rules, validation)

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
        settled=adapted,
        countable=False,  # it depends on the modules that the router draws
    )
    return training.and_evaluation()


METHOD = Method(FedMnConfig, stages, kind="silos", lacks=("candidates", "models"), needs=summing_options)
