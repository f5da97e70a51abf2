"""kNN-Per (Marfoq et al. 2022): FedAvg, then each silo mixes in a k-nearest-neighbour prediction from its own data.

Settings of SPIDER, App. B.1.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.clients.assignments import Assignment, ClientResult, Measurement, client_of, places_of
from fedloom.platform.clients.evaluation import Score
from fedloom.platform.clients.networks import Network, Subnet
from fedloom.platform.clients.objectives import logits_of
from fedloom.platform.clients.scoring import GLOBAL, PERSONAL
from fedloom.platform.clients.trainer import client_samples
from fedloom.platform.clients.training import Samples
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.trees import single
from fedloom.platform.federation.method import Method, Stage
from fedloom.platform.federation.world import World
from fedloom.platform.methods.silos import (
    SubnetConfig,
    check_classes,
    check_validation,
    final_measurements,
    scored_outcome,
    subnet_stages,
)
from fedloom.platform.seeding import torch_stream
from fedloom.platform.settings import POSITIVE, UP_TO_A_MILLION
from fedloom.platform.spaces.slices import Weights

SHARES = tuple(i / 10 for i in range(11))
"""The candidate mixing weights of the neighbours' prediction (SPIDER, App. B.1)."""
BATCH = 256


@dataclass
class KnnPerConfig(SubnetConfig):
    """FedAvg, then every silo mixes in the prediction of its nearest samples.

    With `train.use_validation`, as in the paper, FedAvg also trains on validation data, the silos' stores include them,
    and the mixing weight is chosen by cross-validation on the store. Otherwise the weight is chosen on validation data,
    which are then neither trained on nor stored.
    """

    name: str = "knn_per"
    neighbours: Annotated[int, UP_TO_A_MILLION, "number of nearest samples"] = 10
    scale: Annotated[float, POSITIVE, "sigma, in units of the mean distance to the neighbours"] = 1.0


@dataclass(frozen=True)
class ScoreNearest:
    """Scores the predictions share * neighbours + (1 - share) * shared model on a silo's test data.

    The data store holds the features of the silo's training data and, with `use_validation`, of its validation data.
    The share is the one with the highest accuracy: with `use_validation` on the store itself, where every sample is
    predicted by its neighbours among the others (leave-one-out cross-validation), otherwise on the validation data.
    Ties go to the smallest share.

    Attributes:
        neighbours: k; a silo with fewer samples uses all of them.
        scale: sigma in exp(-distance / sigma), in units of the mean distance to the neighbours.
    """

    subnet: Subnet
    neighbours: int = 10
    scale: float = 1.0
    use_validation: bool = True

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Measures `global`, `personal`, and the chosen share."""
        network, client_id = self.subnet.on(worker), client_of(assignment)
        worker.load(network.module, weights, network.slices)
        worker.set_mode(network.module, training=False)
        generator = torch_stream(worker.spec.training_seed, "score", *places_of(assignment))
        store = _single(client_samples(worker, assignment, use_validation=self.use_validation))
        with worker.randomness(network.module, generator):
            return self._scored(worker, network, store, client_id)

    def _scored(self, worker: Worker, network: Network, store: tuple[Tensor, Tensor], client_id: int) -> ClientResult:
        features, store_logits = features_and_logits(network, store[0])

        def mixture(queries: Tensor, logits: Tensor, *, leave_one_out: bool = False) -> tuple[Tensor, Tensor]:
            classes, k, scale = logits.shape[1], self.neighbours, self.scale
            near = nearest_labels(queries, features, store[1], classes, k, scale, leave_one_out=leave_one_out)
            return near, logits.double().softmax(dim=1)

        passes = len(store[1])
        if self.use_validation:
            share = best_share(*mixture(features, store_logits, leave_one_out=True), store[1])
        else:
            x, y = _single(worker.client_data(client_id, "validation"))
            passes += len(y)
            share = best_share(*mixture(*features_and_logits(network, x)), y)
        x, y = _single(worker.client_data(client_id, "test"))
        near, predicted = mixture(*features_and_logits(network, x))
        mixed = score_of(share * near + (1 - share) * predicted, y)
        rows = (
            *final_measurements(worker, GLOBAL, network, score_of(predicted, y)),
            *final_measurements(worker, PERSONAL, network, mixed),
            Measurement(PERSONAL, network.name, None, "neighbour_share", share, 0),
        )
        return scored_outcome(worker, network, mixed, rows, passes + len(y))


def _single(data: Samples) -> tuple[Tensor, Tensor]:
    return single(data[0], "knn_per"), single(data[1], "knn_per")


@torch.no_grad()
def features_and_logits(network: Network, x: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs of the last linear layer (n, d), and the logits (n, classes)."""
    layers = [part for part in network.module.modules() if isinstance(part, nn.Linear)]
    if not layers:
        raise ValueError("kNN-Per reads the features before a linear classifier, and this network has none")
    features: list[Tensor] = []
    hook = layers[-1].register_forward_pre_hook(lambda _layer, inputs: features.append(inputs[0]))
    try:
        logits = [logits_of(network.forward(x_B)) for x_B in torch.split(x, BATCH)]
    finally:
        hook.remove()
    return torch.cat(features), torch.cat(logits)


def nearest_labels(
    queries: Tensor,
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    neighbours: int,
    scale: float,
    *,
    leave_one_out: bool = False,
) -> Tensor:
    """Class probabilities (n, classes) from the labels of the nearest features, weighted by exp(-distance / sigma).

    With `leave_one_out`, the queries are the features, and none is a neighbour of itself; a single one has no neighbour
    and probabilities of 0. Source: Marfoq et al. 2022, Eq. 7; sigma is `scale` times a query's mean distance to its
    neighbours, so that `scale` is comparable between networks.
    """
    k = min(neighbours, len(features) - leave_one_out)
    probabilities = torch.zeros((len(queries), num_classes), dtype=torch.float64, device=queries.device)
    if k == 0:
        return probabilities
    # All distances at once would take gigabytes for a silo with thousands of samples.
    for first in range(0, len(queries), BATCH):
        rows = slice(first, first + BATCH)
        every = torch.cdist(queries[rows].double(), features.double())
        if leave_one_out:
            every.diagonal(first).fill_(torch.inf)
        distances, nearest = every.topk(k, largest=False)
        sigma = scale * distances.mean(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        probabilities[rows].scatter_add_(1, labels[nearest], (-distances / sigma).softmax(dim=1))
    return probabilities


def best_share(near: Tensor, predicted: Tensor, y: Tensor) -> float:
    """The share with the highest accuracy; ties go to the smallest, and without samples it is 0."""
    if len(y) == 0:
        return 0.0
    mixed = [(share * near + (1 - share) * predicted).argmax(dim=1) for share in SHARES]
    accuracies = torch.stack([(classes == y).double().mean() for classes in mixed]).cpu().tolist()
    return SHARES[accuracies.index(max(accuracies))]


def score_of(probabilities: Tensor, y: Tensor) -> Score:
    """Mean negative log-likelihood and accuracy of predicted probabilities."""
    if len(y) == 0:
        return Score(torch.nan, torch.nan, 0)
    losses, correct = F.nll_loss(probabilities.clamp_min(1e-12).log(), y), probabilities.argmax(dim=1) == y
    loss, metric = torch.stack([losses.double(), correct.double().mean()]).cpu().tolist()
    return Score(loss, metric, len(y))


def stages(config: KnnPerConfig, world: World) -> list[Stage]:
    """FedAvg, then the evaluation with nearest neighbours."""
    if len(world.space.input_shape) != 3:
        shape, data = world.space.input_shape, world.config.data.dataset
        raise ValueError(f"method=knn_per classifies images, and {data} has samples of {shape}")
    check_classes(world)
    use_validation = config.train.use_validation
    if not use_validation:
        check_validation(world, "choose the mixing weight")
    return subnet_stages(
        world, config, lambda subnet: ScoreNearest(subnet, config.neighbours, config.scale, use_validation)
    )


METHOD = Method(KnnPerConfig, stages, kind="silos", lacks=("candidates", "models"))
