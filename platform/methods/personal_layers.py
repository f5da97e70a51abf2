"""Personal layers: clients share a part of the network's tensors, and each client keeps the others to itself.

weights <- fresh
in every round: a selected client takes its own personal tensors (fresh ones in its first round) and the shared ones,
                trains both on its data (FedRep: first the personal ones alone, then the shared ones alone),
                keeps the personal tensors, and sends the shared ones;
                the server averages the shared tensors
at the end:     every client's network, the shared tensors with its own, is scored on its own test data

`method.personal` names the personal tensors, and thereby chooses the method:

    FedPer (Arivazhagan et al. 2019, Alg. 1 and 2)   [classifier]
    FedRep (Collins et al. 2021, Alg. 1)             [classifier], with train.personal_epochs above 0
    FedBN (Li et al. 2021, Alg. 1)                   [batch_norms], parameters and running statistics
    LG-FedAvg (Liang et al. 2020, Alg. 1)            ["*", "!classifier"]

A client that has never taken part has the fresh personal tensors, which are the same for all clients and never sent.
FedRep's epochs freeze parameters only; running statistics of batch norms are updated in both kinds of epochs.

Two rounds of two clients agree with the authors' code up to rounding. What the code does beyond the papers is left out.
FedRep's code ends with a round in which all clients train only their classifiers, for at least ten epochs; weights, not
biases, decay by .0001; and with torch before 2.0, momentum moves the frozen part. LG-FedAvg's code starts from weights
of hundreds of rounds of FedAvg, shares the last two or three layers, and reports each client's network of the round
that was best on test data. The code of FedBN, LG-FedAvg and, on CIFAR and MNIST, FedRep weights all clients equally,
which is `method.train.weighting=plain`. In PFLlib running statistics are never sent; here they are, unless
`method.personal` names them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated

from torch import nn

from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.evaluation import BatchNorm
from fedloom.platform.clients.local_rules import local_rule
from fedloom.platform.clients.networks import Account, Network, OfSubnet, Subnet
from fedloom.platform.clients.scoring import PERSONAL
from fedloom.platform.clients.trainer import (
    Train,
    TrainedNetwork,
    ValidationUse,
    client_samples,
    train_network,
    trained_outcome,
    update_of,
)
from fedloom.platform.clients.training import Optimizer, Step, batch_sizes
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.trees import rows_of
from fedloom.platform.federation.algorithm import Round
from fedloom.platform.federation.method import Method, Stage
from fedloom.platform.federation.training_config import rules_of
from fedloom.platform.federation.world import World
from fedloom.platform.methods.silos import (
    WEIGHTS,
    SiloTrainingConfig,
    SubnetConfig,
    only,
    subnet_stages,
    tested_outcome,
    under,
)
from fedloom.platform.settings import NOT_EMPTY, ZERO_OR_MORE
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.initialisation import on_meta
from fedloom.platform.spaces.slices import Architecture, SliceMap, Weights, bytes_of
from fedloom.platform.words import shown

CLASSIFIER, BATCH_NORMS = "classifier", "batch_norms"
"""Keywords of `method.personal` for layers whose names differ between networks."""


@dataclass
class PersonalTrainingConfig(SiloTrainingConfig):
    """Training of the clients."""

    personal_epochs: Annotated[
        int, ZERO_OR_MORE, "first epochs that train only personal tensors, the rest only shared; 0: all train both"
    ] = 0


@dataclass
class PersonalConfig(SubnetConfig):
    """One architecture, of which every client keeps a part to itself."""

    name: str = "personal_layers"
    personal: Annotated[
        list[Annotated[str, NOT_EMPTY]],
        "tensors that stay with a client: name patterns (head.*), classifier, batch_norms; a ! before one shares it",
    ] = field(default_factory=lambda: [CLASSIFIER])
    train: PersonalTrainingConfig = field(default_factory=PersonalTrainingConfig)


# -- which tensors are personal ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PersonalLayers(OfSubnet):
    """A subnet whose tensors named in `personal` are neither sent nor averaged."""

    personal: frozenset[str]

    def on(self, worker: Worker, assignment: Assignment | None = None) -> Network:
        """The whole network, which the client trains."""
        return self.subnet.on(worker, assignment)

    def account(self, worker: Worker, assignment: Assignment, batches: Sequence[int]) -> Account:
        """The subnet's MACs, with the bytes and the parameters of the shared tensors."""
        cost = super().account(worker, assignment, batches)
        tensors = worker.tensors_of(worker.subnet(self.subnet.architecture))
        personal_tensors = {name: tensor for name, tensor in tensors.items() if name in self.personal}
        parameters = sum(tensor.numel() for tensor in personal_tensors.values() if tensor.requires_grad)
        return replace(
            cost, size_bytes=cost.size_bytes - bytes_of(personal_tensors), parameters=cost.parameters - parameters
        )

    def held(self, space: SearchSpace) -> SliceMap:
        """The shared tensors only."""
        return {name: piece for name, piece in super().held(space).items() if name not in self.personal}


def layers_of(space: SearchSpace, architecture: Architecture, patterns: list[str]) -> PersonalLayers:
    """The architecture with the tensors that `method.personal` names; a later pattern overrules an earlier one.

    Raises ValueError for a pattern that matches no tensor.
    """
    subnet, module = Subnet(architecture, stand_alone=True), on_meta(partial(space.build_subnet, architecture))
    names, personal = [*subnet.held(space)], set[str]()
    parts = dict(module.named_modules())
    linear = [name for name, part in parts.items() if isinstance(part, nn.Linear)]
    words = {CLASSIFIER: linear[-1:], BATCH_NORMS: [n for n, part in parts.items() if isinstance(part, BatchNorm)]}
    for pattern in patterns:
        asked = pattern.removeprefix("!")
        if asked in words:
            matched = {name for name in names if name.rpartition(".")[0] in words[asked]}
        else:
            matched = {name for name in names if fnmatchcase(name, asked)}
        if not matched:
            raise ValueError(
                f"method.personal: {pattern!r:.60} matches no tensor of the network; give {' or '.join(words)}, or a "
                f"pattern of the names {', '.join(names):.160}..."
            )
        personal = personal - matched if pattern.startswith("!") else personal | matched
    return PersonalLayers(subnet, frozenset(personal))


def with_own(assignment: Assignment, weights: Weights) -> Weights:
    """The received tensors, with those that the client has kept replaced by its own."""
    return {**weights, **under(assignment.state or {}, WEIGHTS)}


# -- a client ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainPersonal(Train):
    """A client of FedAvg that keeps a part of the network; with `personal_epochs` it trains that part first."""

    network: PersonalLayers
    personal_epochs: int = 0

    @property
    def subnet(self) -> Subnet:
        """The whole network."""
        return self.network.subnet

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Trains the network; the update holds the shared tensors, the client's state the personal ones."""
        network, personal = self.network.on(worker, assignment), self.network.personal
        data = client_samples(worker, assignment, use_validation=self.use_validation, processors=self.processors)
        samples = rows_of(data[1])
        alone = len(batch_sizes(samples, replace(self.local, epochs=self.personal_epochs)))

        def steps(sgd: Optimizer) -> Step:
            return OneAfterTheOther(sgd, personal, alone) if self.personal_epochs else sgd

        start = with_own(assignment, weights)
        trained = train_network(worker, assignment, network, start, data, self.local, steps).checked()
        # Only what is sent is counted and processed.
        trained = replace(trained, parameters=tuple(name for name in trained.parameters if name not in personal))
        result = self.finished(worker, assignment, trained, samples, weights)
        return replace(result, measurements=tuple(replace(m, model=PERSONAL) for m in result.measurements))

    def outcome(self, trained: TrainedNetwork, samples: int) -> ClientResult:
        """The result with an update of the shared tensors only, or without an update if there are none."""
        personal = self.network.personal
        shared = trained.tensors.keys() - personal
        update = only(update_of(trained, samples, self.weighting, self.share), shared)
        personal_weights = {f"{WEIGHTS}{name}": tensor for name, tensor in trained.tensors.items() if name in personal}
        result = trained_outcome(trained, samples, update)
        return replace(result, update=update if shared else None, state={**trained.state, **personal_weights} or None)


@dataclass
class OneAfterTheOther:
    """Steps that train only the personal parameters, and after `personal_steps` only the shared ones (FedRep)."""

    sgd: Optimizer
    personal: frozenset[str]
    personal_steps: int
    made: int = 0

    def step(self) -> None:
        """Makes a step of one part; the other part has no gradient and does not change."""
        is_first = self.made < self.personal_steps
        for name, parameter in zip(self.sgd.names, self.sgd.parameters, strict=True):
            if (name in self.personal) != is_first:
                parameter.grad = None
        self.made += 1
        self.sgd.step()


@dataclass(frozen=True)
class ScorePersonal:
    """Scores the shared tensors with a client's own on its test data."""

    network: PersonalLayers

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Measures the model `personal`; a client that has never taken part has the fresh personal tensors."""
        network = self.network.on(worker, assignment)
        return tested_outcome(worker, assignment, PERSONAL, network, with_own(assignment, weights))


# -- stages -----------------------------------------------------------------------------------------------------------


def refuse_shared(train: SiloTrainingConfig, why: str) -> None:
    """Raises ValueError for a local rule that sends or corrects tensors of all parameters, as SCAFFOLD, FedDyn do."""
    rule = local_rule(rules_of(train, "method.train").local)
    if rule.shared or rule.server == "feddyn":
        does = "sends tensors" if rule.shared else "keeps a correction"
        raise ValueError(
            f"method.train.local_rule={train.local_rule} {does} for every parameter, but {why}; use sgd or fedprox"
        )


def check_layers(config: PersonalConfig, layers: PersonalLayers, world: World) -> None:
    """Raises ValueError for settings that the personal tensors do not allow."""
    train, trained = config.train, world.space.parameter_names & layers.subnet.held(world.space).keys()
    personal = trained & layers.personal
    refuse_shared(train, "method.personal keeps some with the clients")
    if train.personal_epochs >= train.epochs:
        raise ValueError(
            f"method.train.personal_epochs={train.personal_epochs} leaves none of method.train.epochs={train.epochs} "
            "to the shared tensors: give fewer, or 0 to train all in every epoch"
        )
    if train.personal_epochs and not trained > personal > frozenset():
        raise ValueError(
            f"method.train.personal_epochs={train.personal_epochs} trains one part after the other, and "
            f"method.personal={shown(config.personal)} names {'every' if personal else 'no'} parameter: name some, or "
            "give 0"
        )
    if not trained > personal and (train.processors or train.privacy.clip is not None or train.privacy.secure):
        raise ValueError(
            f"method.personal={shown(config.personal)} names every parameter, so that nothing is sent that "
            "method.train.processors or method.train.privacy could change: leave them out"
        )


def stages(config: PersonalConfig, world: World) -> list[Stage]:
    """Training of the shared and the personal tensors, then the evaluation of every client's network."""
    architecture = world.architecture(config.architecture, "method.architecture")
    layers = layers_of(world.space, architecture, config.personal)
    check_layers(config, layers, world)

    def client(_subnet: Subnet, round_: Round, validation: ValidationUse) -> TrainPersonal:
        weighting = round_.rules.weighting
        return TrainPersonal(layers, round_.local, weighting, validation, personal_epochs=config.train.personal_epochs)

    return subnet_stages(world, config, lambda _subnet: ScorePersonal(layers), client, sends_change=True)


METHOD = Method(PersonalConfig, stages, kind="silos", own="model", lacks=("candidates", "models"))
