"""FedAvg on handwritten digits, by hand (McMahan et al. 2017, Algorithm 1): the page to read first.

    python experiments/examples/fedavg_by_hand.py

It uses torch and three public parts of fedloom: the prepared data, a space with its networks, and `average`. Its result
is, to the last bit, that of:

    fedloom run experiment=fedavg_digits tiers.count=1 executor.stack_clients=off executor.chunk_size=10

The three settings only affect rounding: all clients are in one tier of devices, each is trained alone, and a round's
updates are added up in one go. The command does the same on any number of processes and devices, records what happened
to every client, and resumes after a crash; its rounds are in `platform/federation/algorithm.py`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedloom.platform.averaging.average import Update, average
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.federated import FederatedData
from fedloom.platform.data.partition import prepare_partition
from fedloom.platform.data.prepare import prepare_dataset
from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import Slice
from fedloom.platform.spaces.space_config import SpaceConfig

SEED, ROUNDS, CLIENTS, CLIENTS_PER_ROUND = 1, 60, 40, 10
EPOCHS, BATCH_SIZE, LR, MOMENTUM = 5, 16, 0.1, 0.9

Weights = dict[str, Tensor]


def federated_digits() -> FederatedData:
    """The digits, divided among the clients by a Dirichlet distribution over their classes."""
    config = DataConfig(dataset="digits", num_clients=CLIENTS, alpha=1.0)
    dataset = prepare_dataset(config)
    return FederatedData.open(dataset, prepare_partition(config, Dataset.open(dataset), SEED))


def batches(num_samples: int, generator: torch.Generator) -> list[Tensor]:
    """An epoch's batches of shuffled indices; a single sample at the end joins the batch before it."""
    sizes = [BATCH_SIZE] * (num_samples // BATCH_SIZE)
    rest = num_samples % BATCH_SIZE
    if rest == 1 and sizes:
        sizes[-1] += 1
    elif rest:
        sizes.append(rest)
    return [*torch.randperm(num_samples, generator=generator).split_with_sizes(sizes)]


def client_update(model: torch.nn.Module, weights: Weights, data: tuple[Any, Any], places: tuple[int, int]) -> Update:
    """What a client does: SGD from the received weights; it sends back its weights and its number of samples."""
    model.load_state_dict(weights)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    x, y = data
    round_, client_id = places
    generator = torch_stream(SEED, "batches", "fedavg", round_, client_id)
    for _ in range(EPOCHS):
        for batch in batches(len(y), generator):
            optimizer.zero_grad()
            images = x[batch].contiguous(memory_format=torch.channels_last)
            torch.autograd.backward(cross_entropy(model(images), y[batch]))
            optimizer.step()
    trained = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return Update(trained, {name: Slice(name) for name in trained}, dict.fromkeys(trained, float(len(y))))


def train(rounds: int = ROUNDS) -> Weights:
    """What the server does: draw clients, send them the weights, average what they send back."""
    data, space = federated_digits(), build_space(SpaceConfig(name="cnn_digits"))
    architecture = space.largest
    model = space.build_subnet(architecture).to(memory_format=torch.channels_last)
    weights: Weights = space.initial_subnet_weights(architecture, torch_stream(SEED, "fedavg"))
    for round_ in range(rounds):
        draw = stream(SEED, "select", "fedavg", round_)
        drawn = sorted(draw.choice(CLIENTS, CLIENTS_PER_ROUND, replace=False, shuffle=False).tolist())
        updates = [client_update(model, weights, data.client(c, "train"), (round_, c)) for c in drawn]
        weights = average(weights, updates)
    return weights


@torch.no_grad()
def test_accuracy(weights: Weights) -> float:
    """The share of the test images that the model classifies correctly."""
    data, space = federated_digits(), build_space(SpaceConfig(name="cnn_digits"))
    model = space.build_subnet(space.largest).eval()
    model.load_state_dict(weights)
    with data.reading_test():  # outside this block test data cannot be read
        x, y = data.central("test").tensors()
    return float((model(x).argmax(dim=1) == y).float().mean())


if __name__ == "__main__":
    print(f"test accuracy after {ROUNDS} rounds: {test_accuracy(train()):.4f}")
