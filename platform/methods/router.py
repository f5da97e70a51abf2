"""FedMN's routing hypernetwork (Wang et al. 2022): maps statistics of a silo's data to the modules that it uses.

A module is one option of one decision of the space, on or off. The router is shared and averaged; its input, computed
from a silo's data, is never sent.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from fedloom.platform.spaces.capabilities import SumsOptions
from fedloom.platform.spaces.initialisation import blank, initialise, on_meta
from fedloom.platform.spaces.slices import Subspace, Weights

PREFIX = "router/"
"""Prefix of the router's tensors in the tensor group that also holds the network's."""
SIDE = 4
"""Height and width to which images are pooled."""
HIDDEN = 64
FIRST_LOGIT = 1.0
"""Every module's initial logit: it is chosen with probability .73, and always without noise."""


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
    router = blank(partial(_build, space, num_classes)).to(device)
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
    histogram = torch.bincount(y, minlength=num_classes).to(image.dtype) / len(y)
    return torch.cat([image.flatten(), histogram])


def logistic_noise(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Standard logistic noise, float32: logit + noise > 0 with probability sigmoid(logit) (Maddison et al. 2017)."""
    # In double precision, and clamped away from 0, whose logit is infinite.
    uniform = torch.rand(tuple(shape), generator=generator, dtype=torch.float64).clamp_(min=2.0**-53)
    return torch.logit(uniform).float()


def chosen(scores: Tensor) -> Subspace:
    """The modules whose score (decisions, options) is above 0; a decision may have none."""
    return tuple(tuple(row.nonzero().flatten().tolist()) for row in scores > 0)


def straight_through(scores: Tensor, hard: Tensor, temperature: float) -> Tensor:
    """Gates with the values `hard` (0 or 1) and the gradients of sigmoid(scores / temperature).

    Source: Bengio et al. 2013. `scores` are logits plus noise.
    """
    soft = torch.sigmoid(scores / temperature)
    # The parentheses make the gate exactly 0 or 1.
    return hard + (soft - soft.detach())
