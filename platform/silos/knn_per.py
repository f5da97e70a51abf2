"""kNN-Per (Marfoq et al. 2022): the shared model's prediction mixed with that of the nearest samples of a silo."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.clients.execution import Assignment, Measurement, Outcome
from fedloom.platform.clients.tasks import client_of, places_of
from fedloom.platform.clients.training import Score
from fedloom.platform.clients.worker import Worker
from fedloom.platform.seeding import torch_stream
from fedloom.platform.silos.network import GLOBAL, PERSONAL, Network, final_measurements, fixed_network
from fedloom.platform.silos.scoring import scored_outcome
from fedloom.platform.spaces.base import Architecture, Weights

SHARES = tuple(i / 10 for i in range(11))
"""Mixing weights of the neighbours that are tried (SPIDER, App. B.1)."""
BATCH = 256


@dataclass(frozen=True)
class ScoreNearest:
    """Scores the mixture share * neighbours + (1 - share) * shared model on a silo's test data.

    The data store is the silo's training data, by its features; the share is the one that is best on its validation
    data, the smallest of equals.

    Attributes:
        neighbours: k; all samples of a silo with fewer.
        scale: sigma in exp(-distance / sigma), in units of the mean distance to the neighbours.
    """

    architecture: Architecture
    neighbours: int = 10
    scale: float = 1.0

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> Outcome:
        """The rows of `global`, of `personal`, and of the share that was chosen."""
        network, client_id = fixed_network(worker, self.architecture), client_of(assignment)
        worker.load(network.module, weights, network.slices)
        worker.set_mode(network.module, training=False)
        generator = torch_stream(worker.spec.training_seed, "score", *places_of(assignment))
        with worker.randomness(network.module, generator):
            return self._scored(worker, network, client_id)

    def _scored(self, worker: Worker, network: Network, client_id: int) -> Outcome:
        store_x, store_y = worker.client_data(client_id, "train")
        features, _ = features_and_logits(network, store_x)

        def mixture(split: str) -> tuple[Tensor, Tensor, Tensor]:
            x, y = worker.client_data(client_id, split)
            queries, logits = features_and_logits(network, x)
            near = nearest_labels(queries, features, store_y, logits.shape[1], self.neighbours, self.scale)
            return near, logits.double().softmax(dim=1), y

        share = best_share(*mixture("validation"))
        near, predicted, y = mixture("test")
        own = score_of(share * near + (1 - share) * predicted, y)
        rows = (
            *final_measurements(GLOBAL, network, score_of(predicted, y)),
            *final_measurements(PERSONAL, network, own),
            Measurement(PERSONAL, network.name, None, "neighbour_share", share, 0),
        )
        return scored_outcome(network, own, rows)


@torch.no_grad()
def features_and_logits(network: Network, x: Tensor) -> tuple[Tensor, Tensor]:
    """What enters the last linear layer (n, d), and the logits (n, classes)."""
    kept: list[Tensor] = []
    with _inputs_of(_last_linear(network.module), kept):
        logits = [network.forward(x_B) for x_B in torch.split(x, BATCH)]
    return torch.cat(kept), torch.cat(logits)


def _last_linear(module: nn.Module) -> nn.Linear:
    found = [part for part in module.modules() if isinstance(part, nn.Linear)]
    if not found:
        raise ValueError("kNN-Per reads the features before a linear classifier, and this network has none")
    return found[-1]


@contextmanager
def _inputs_of(layer: nn.Linear, kept: list[Tensor]) -> Iterator[None]:
    handle = layer.register_forward_pre_hook(lambda _layer, args: kept.append(args[0]))
    try:
        yield
    finally:
        handle.remove()


def nearest_labels(
    queries: Tensor, features: Tensor, labels: Tensor, num_classes: int, neighbours: int, scale: float
) -> Tensor:
    """Probabilities (n, classes) by the labels of the nearest features, each weighing exp(-distance / sigma).

    Source: Marfoq et al. 2022, Eq. 7; sigma is `scale` times a query's mean distance to its neighbours, so that it
    means the same for any network.
    """
    k = min(neighbours, len(features))
    distances, places = torch.cdist(queries.double(), features.double()).topk(k, largest=False)
    sigma = scale * distances.mean(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    weights = (-distances / sigma).softmax(dim=1)
    return torch.zeros((len(queries), num_classes), dtype=torch.float64, device=queries.device).scatter_add_(
        1, labels[places], weights
    )


def best_share(near: Tensor, predicted: Tensor, y: Tensor) -> float:
    """The share with the highest accuracy; the smallest of equals, 0 without samples."""
    if len(y) == 0:
        return 0.0
    accuracies = [score_of(share * near + (1 - share) * predicted, y).metric for share in SHARES]
    return SHARES[accuracies.index(max(accuracies))]


def score_of(probabilities: Tensor, y: Tensor) -> Score:
    """Mean negative log-likelihood and accuracy of predicted probabilities."""
    if len(y) == 0:
        return Score(torch.nan, torch.nan, 0)
    loss = F.nll_loss(probabilities.clamp_min(1e-12).log(), y).item()
    return Score(loss, (probabilities.argmax(dim=1) == y).double().mean().item(), len(y))
