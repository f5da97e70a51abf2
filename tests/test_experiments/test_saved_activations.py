"""What a training step keeps for its backward pass: counted by hand, and for SPIDER's supernet in both sizes."""

import pytest
import torch
from torch import nn

from fedloom.experiments.benchmarks.activations import here, published, saved_bytes, supernet
from fedloom.platform.spaces.darts import DartsDesign

SMALL = DartsDesign("darts_s2", (1, 8, 8), cells=3, channels=4, nodes=2)


def test_saved_storages_are_counted_once_and_parameters_not_at_all() -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    x = torch.zeros(4, 3)
    # The input, the ReLU's output (its own and the next layer's), the log-softmax and the targets, the loss's weight.
    assert saved_bytes([module], x) == 4 * (4 * 3 + 4 * 5 + 4 * 2) + 8 * 4 + 4
    assert saved_bytes([module, module], x) < 2 * saved_bytes([module], x), "the input is saved once"


def test_small_batches_tell_those_of_large_ones() -> None:
    network_of_nine = here(SMALL, batch=9)
    assert network_of_nine - here(SMALL, batch=8) == here(SMALL, batch=5) - here(SMALL, batch=4)
    assert network_of_nine < published(SMALL, batch=9), "what operators of a node compute alike is computed once"


@pytest.mark.parametrize(("channels", "models", "gb"), [(16, 1, 0.967), (32, 1, 1.934), (32, 2, 3.868)])
def test_the_memory_of_the_paper_fits_32_channels(channels: int, models: int, gb: float) -> None:
    """SPIDER, Tab. 3: 2.14 GB for one supernet and 4.18 GB for two, parameters included."""
    assert published(supernet(channels), models) / 1e9 == pytest.approx(gb, abs=5e-4)
