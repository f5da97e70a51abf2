"""FedProto (Tan et al. 2022, Alg. 1): clients share the mean features of their classes, and no weights.

C <- nothing; w_i <- fresh
in every round: a selected client trains its own w_i by
                    loss(x, y) + pull * mean square (features(x) - C[y]),   the second only for classes in C
                and sends, for each of its classes j, C_i[j], the mean features of its n_ij samples, and n_ij;
                the server averages them: C[j] = sum_i n_ij C_i[j] / sum_i n_ij   (Eq. 6); without a sender C[j] stays
at the end:     every client's w_i is scored on its own test data, by the C[j] nearest to a sample's features (Eq. 4)

Features are the inputs of the network's last linear layer. The distance is taken per sample, as in the authors' code,
not for the client's means (Eq. 8). Eq. 6 also divides by the number of clients, which would shrink a prototype with
every client that has the class; that is left out. An update has one tensor per class, weighted by its number of
samples. A client that has never taken part has the fresh network.

The authors' code differs from the paper in what it sends, averages and scores. It sends the features that the batches
of the last epoch had while the network was still training, averages the clients' means with equal weights, and scores
by the nearest prototype among the client's own classes. With features after training and samples as weights, it gives
the networks of this file up to rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.averaging.average import Update
from fedloom.platform.clients.assignments import Assignment, ClientResult, Measurement
from fedloom.platform.clients.evaluation import EVALUATED
from fedloom.platform.clients.networks import Network, Subnet
from fedloom.platform.clients.objectives import Objective
from fedloom.platform.clients.scoring import PERSONAL, own_test_data, score_loaded, score_network, validation_scores
from fedloom.platform.clients.trainer import ValidationUse, client_samples, train_network, trained_outcome
from fedloom.platform.clients.training import LocalSGD, Outputs, Samples
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.on_device import moved
from fedloom.platform.data.trees import single
from fedloom.platform.federation.algorithm import Round, RunState, to_all
from fedloom.platform.federation.method import Method, Stage
from fedloom.platform.federation.world import World
from fedloom.platform.methods.personal_layers import refuse_shared, with_own
from fedloom.platform.methods.silos import (
    WEIGHTS,
    SiloTraining,
    SiloTrainingConfig,
    SubnetConfig,
    check_classes,
    checked_silos,
    final_measurements,
    fresh_subnet,
    scored_outcome,
    validation_use,
)
from fedloom.platform.settings import ZERO_OR_MORE
from fedloom.platform.spaces.initialisation import on_meta
from fedloom.platform.spaces.slices import Slice, Weights, bytes_of
from fedloom.platform.words import shown

PROTOTYPE = "prototype/"
"""Prefix of the names of the shared tensors (features,), followed by the class; zeros until a client has sent one."""
FAR = -1e9
"""The logit of a class without a prototype."""


@dataclass
class FedProtoTrainingConfig(SiloTrainingConfig):
    """Training of the clients."""

    pull: Annotated[float, ZERO_OR_MORE, "lambda: the pull of features towards their class's prototype"] = 1.0


@dataclass
class FedProtoConfig(SubnetConfig):
    """A network per client, whose features are pulled towards shared prototypes."""

    name: str = "fedproto"
    train: FedProtoTrainingConfig = field(default_factory=FedProtoTrainingConfig)


# -- features and prototypes ------------------------------------------------------------------------------------------


def classifier_of(module: nn.Module) -> nn.Linear:
    """The last linear layer; ValueError if there is none."""
    layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
    if not layers:
        raise ValueError("fedproto reads the features before a linear classifier, and this network has none")
    return layers[-1]


@contextmanager
def features_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """A list that holds the features (B, features) of the module's last batch."""
    last: list[Tensor] = []

    def remember(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        last[:] = inputs[:1]

    hook = classifier_of(module).register_forward_pre_hook(remember)
    try:
        yield last
    finally:
        hook.remove()


def prototypes_in(weights: Weights, device: torch.device) -> tuple[Tensor, Tensor]:
    """The prototypes (classes, features), and which of them are known (classes,)."""
    named = moved({name: tensor for name, tensor in weights.items() if name.startswith(PROTOTYPE)}, device)
    prototypes = torch.stack([named[f"{PROTOTYPE}{label}"] for label in range(len(named))])
    return prototypes, prototypes.any(dim=1)


@torch.no_grad()
def mean_features(network: Network, data: Samples, last: list[Tensor]) -> dict[int, tuple[Tensor, int]]:
    """For every class in the data, the loaded network's mean features (features,) and the number of samples."""
    (x, y), batches = (single(tree, "fedproto") for tree in data), list[Tensor]()
    for x_B in torch.split(x, EVALUATED):
        network.forward(x_B)
        batches.append(last[0])
    features = torch.cat(batches)
    classes, counts = torch.unique(y, return_counts=True)
    return {
        int(each): (features[y == each].double().mean(dim=0).float(), int(count))
        for each, count in zip(classes.tolist(), counts.tolist(), strict=True)
    }


def pulled_loss(
    last: list[Tensor],
    prototypes: Tensor,
    known: Tensor,
    pull: float,
    objective: Objective,
    outputs: Outputs,
    targets: Any,
) -> Tensor:
    """The loss plus the pull; samples of classes without a prototype are not pulled, but count in the mean."""
    (features,) = last
    goals = torch.where(known[targets].unsqueeze(1), prototypes[targets], features.detach())
    return objective.loss(outputs, targets) + pull * F.mse_loss(features, goals)


# -- a client ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainProto:
    """One round of a client; `pull` is lambda."""

    subnet: Subnet
    local: LocalSGD
    pull: float
    validation: ValidationUse = "trained"

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Trains the client's network; the update holds prototypes, the client's state the network."""
        network, start = self.subnet.on(worker), with_own(assignment, weights)
        data = client_samples(worker, assignment, use_validation=self.validation == "trained")
        prototypes, known = prototypes_in(weights, worker.device)
        with features_of(network.module) as last:
            loss = partial(pulled_loss, last, prototypes, known, self.pull)
            pulled = replace(network, loss=loss, compilable=False)
            trained = train_network(worker, assignment, pulled, start, data, self.local).checked()
            worker.set_mode(network.module, training=False)
            means = mean_features(network, data, last)
        sent = {f"{PROTOTYPE}{label}": mean for label, (mean, _) in means.items()}
        counts = {f"{PROTOTYPE}{label}": float(count) for label, (_, count) in means.items()}
        samples = sum(count for _, count in means.values())
        result = trained_outcome(trained, samples, Update(sent, {name: Slice(name) for name in sent}, counts))
        scores = validation_scores(worker, assignment, network, PERSONAL) if self.validation == "scored" else ()
        personal_weights = {f"{WEIGHTS}{name}": tensor for name, tensor in trained.tensors.items()}
        forward_macs = network.macs * samples
        return replace(
            result,
            bytes_down=bytes_of({n: t for n, t in weights.items() if n.startswith(PROTOTYPE)}),
            macs=result.macs + forward_macs,
            forward_macs=forward_macs,
            measurements=scores,
            state={**trained.state, **personal_weights},
        )


@dataclass(frozen=True)
class ScoreProto:
    """Scores a client's network on its test data, by the nearest prototype and by its own classifier."""

    subnet: Subnet

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Measures `personal` by prototypes, and the metric `classifier_accuracy`."""
        network, personal_weights, data = (
            self.subnet.on(worker),
            with_own(assignment, weights),
            own_test_data(worker, assignment),
        )
        prototypes, known = prototypes_in(weights, worker.device)
        by_classifier = score_network(worker, assignment, network, personal_weights, data)
        with features_of(network.module) as last:

            def nearest(x: Any) -> Tensor:
                network.forward(x)
                return torch.where(known, -torch.cdist(last[0].float(), prototypes).square(), FAR)

            score = score_loaded(worker, assignment, replace(network, forward=nearest), data)
        rows = final_measurements(worker, PERSONAL, network, score)
        metric = Measurement(
            PERSONAL, network.name, "test", "classifier_accuracy", by_classifier.metric, by_classifier.samples
        )
        return scored_outcome(worker, network, score, (*rows, metric), 2 * score.samples)  # by either classifier


# -- stages -----------------------------------------------------------------------------------------------------------


def stages(config: FedProtoConfig, world: World) -> list[Stage]:
    """Training of the clients' networks, and their evaluation."""
    train, rules = config.train, checked_silos(world, config.train)
    refuse_shared(train, "fedproto's clients send prototypes alone")
    for name, allowed in (("server", "replace"), ("weighting", "fedavg")):
        if getattr(train, name) != allowed:
            raise ValueError(
                f"method.train.{name}={shown(getattr(train, name))}: fedproto's server averages prototypes, weighted "
                f"by the samples of their class; use {allowed}"
            )
    check_classes(world)
    subnet = Subnet(world.architecture(config.architecture, "method.architecture"), stand_alone=True)
    classifier = classifier_of(on_meta(partial(world.space.build_subnet, subnet.architecture)))
    if classifier.out_features < (classes := world.spec.space.num_classes):
        raise ValueError(
            "method=fedproto needs a last linear layer with an output per class, and this network's has "
            f"{classifier.out_features} for {classes} classes"
        )
    unknown = {f"{PROTOTYPE}{label}": (classifier.in_features,) for label in range(classifier.out_features)}
    fresh = fresh_subnet(world, subnet)

    def initial(state: RunState) -> Weights:
        """The network with which every client starts, which is never sent, and prototypes of zeros."""
        return {**(fresh(state) or {}), **{name: torch.zeros(shape) for name, shape in unknown.items()}}

    def client(round_: Round) -> TrainProto:
        return TrainProto(
            subnet, round_.local, train.pull, validation_use(trained=train.use_validation, scored=round_.scored)
        )

    training = SiloTraining(
        *(world, train, rules),
        name=config.name,
        initial=initial,
        tasks=to_all(client),
        test=lambda _state: ScoreProto(subnet),
    )
    return training.and_evaluation()


METHOD = Method(FedProtoConfig, stages, kind="silos", own="model", lacks=("candidates", "models"))
