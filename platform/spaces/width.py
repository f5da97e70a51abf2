"""Spaces of one decision, the width: a subnet keeps the leading share of the hidden channels of every layer.

The spaces of HeteroFL (Diao et al. 2021), FjORD (Horváth et al. 2021) and FedRolex (Alam et al. 2022). `width` takes
any plain network: `space.name=width space.options.network=module:build`, where `build(input_shape, num_classes)`
returns the whole network. The others are the networks of these papers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fedloom.platform.data.trees import mapped_within
from fedloom.platform.plugins import PluginError, blaming, imported
from fedloom.platform.settings import NOT_EMPTY
from fedloom.platform.spaces.base import LeadingSpace, SearchSpace, in_float32, samples_of, supernet_shapes
from fedloom.platform.spaces.initialisation import fill_uniform, on_meta
from fedloom.platform.spaces.resnet import Resnet18, Resnet18Design
from fedloom.platform.spaces.slices import Architecture, Weights
from fedloom.platform.spaces.space_config import SpaceConfig, Spaces, from_design, spaces_of
from fedloom.tiers.measure import shapes_only

# -- narrower versions of any plain network ---------------------------------------------------------------------------
# The whole network is built and run once on the meta device: each layer adapts to the input channels that arrive, and
# keeps a share of its output channels. The last layer keeps all outputs. Layers keep their leading channels, so that a
# narrow network's tensors are leading slices of the whole network's.

Keep = Callable[[int], int]
"""Maps a layer's number of channels to the number that is kept."""


@runtime_checkable
class Narrows(Protocol):
    """A custom layer that can be made narrower, such as a recurrent one."""

    def narrow(self, inputs: int, keep: Keep, *, last: bool) -> None:
        """Resizes the layer to `inputs` inputs and the outputs that `keep` allows; the last layer keeps all."""
        ...

    channels_at: int
    """The dimension of its input that holds the channels."""


def narrowed(build: Callable[[], nn.Module], sample: Tensor, keep: Keep) -> nn.Module:
    """The network on the meta device, with only the channels that `keep` allows.

    `sample` is a batch on the meta device. Raises ValueError for a layer that cannot be narrowed.
    """
    module = on_meta(build).eval()
    last = _in_order(module, sample)[-1]
    hooks = {
        part: partial(_narrow, name, keep, part is last)
        for name, part in module.named_modules()
        if next(part.children(), None) is None and part.state_dict()
    }
    _run(module, sample, hooks)
    return module


def channels_kept(share: float, channels: int) -> int:
    """ceil(share * channels), as in HeteroFL, and at least one."""
    return min(channels, max(1, math.ceil(share * channels - 1e-9)))


def _run(module: nn.Module, sample: Tensor, hooks: Mapping[nn.Module, Callable[..., None]]) -> None:
    """Runs a pass on the meta device; calls each part's hook with the part and its inputs before the part."""
    handles = [part.register_forward_pre_hook(hook) for part, hook in hooks.items()]
    try:
        with torch.no_grad(), shapes_only():
            module(sample)
    finally:
        for handle in handles:
            handle.remove()


def scaled_while_training(module: nn.Module, sample: Tensor, share: float) -> nn.Module:
    """Divides the outputs of hidden layers by their share of channels in training (HeteroFL's scaler)."""
    for part in _in_order(module, sample)[:-1]:
        part.register_forward_hook(lambda part, _inputs, output: output / share if part.training else output)
    return module


def _in_order(module: nn.Module, sample: Tensor) -> list[nn.Module]:
    """The convolution, linear and `Narrows` layers, in the order of a forward pass."""
    seen: list[nn.Module] = []
    layers = [part for part in module.modules() if isinstance(part, nn.Conv1d | nn.Conv2d | nn.Linear | Narrows)]
    _run(module, sample, dict.fromkeys(layers, lambda layer, _inputs: seen.append(layer)))
    if len({id(layer) for layer in seen}) < len(seen):
        raise ValueError("the network uses a layer twice, which cannot have two widths: give each use its own layer")
    if not seen:
        raise ValueError("the network has no convolution, linear or recurrent layer that could be narrower")
    return seen


def _narrow(name: str, keep: Keep, last: bool, part: nn.Module, inputs: tuple[Any, ...]) -> None:
    x = inputs[0]
    if isinstance(part, Narrows):
        part.narrow(x.shape[part.channels_at], keep, last=last)
    elif isinstance(part, nn.Conv1d | nn.Conv2d):
        _narrow_convolution(name, part, x.shape[1], keep, last=last)
    elif isinstance(part, nn.Linear):
        part.in_features = x.shape[-1]
        part.out_features = part.out_features if last else keep(part.out_features)
        resize(part, weight=(part.out_features, part.in_features), bias=(part.out_features,))
    elif isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
        part.num_features = x.shape[1]
        resize(part, **dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (x.shape[1],)))
    elif isinstance(part, nn.GroupNorm):
        size = part.num_channels // part.num_groups
        if part.num_groups > 1 and x.shape[1] % size:
            raise ValueError(f"{name} has groups of {size} channels and would get {x.shape[1]}: use another norm")
        part.num_channels, part.num_groups = x.shape[1], x.shape[1] // size if part.num_groups > 1 else 1
        resize(part, weight=(x.shape[1],), bias=(x.shape[1],))
    elif isinstance(part, nn.LayerNorm) and len(part.normalized_shape) == 1:
        part.normalized_shape = (x.shape[-1],)
        resize(part, weight=(x.shape[-1],), bias=(x.shape[-1],))
    elif isinstance(part, nn.Embedding):
        part.embedding_dim = keep(part.embedding_dim)
        resize(part, weight=(part.num_embeddings, part.embedding_dim))
    else:
        raise ValueError(f"{name} is {type(part).__name__}, which has no narrower version: give it a method narrow")


def _narrow_convolution(name: str, part: nn.Conv1d | nn.Conv2d, inputs: int, keep: Keep, *, last: bool) -> None:
    whole_in, whole_out = part.in_channels, part.out_channels
    if part.groups == 1:
        out = whole_out if last else keep(whole_out)
    elif part.groups == whole_in and not last:
        out = inputs * (whole_out // whole_in)
        part.groups = inputs
    else:
        raise ValueError(
            f"{name} is a convolution of {part.groups} groups: use 1, or one per channel, so that it can be narrower"
        )
    part.in_channels, part.out_channels = inputs, out
    resize(part, weight=(out, inputs // part.groups, *part.weight.shape[2:]), bias=(out,))


def resize(part: nn.Module, **shapes: tuple[int, ...]) -> None:
    """Replaces a layer's tensors by empty ones of these shapes; names that the layer lacks are skipped."""
    for name, shape in shapes.items():
        old = getattr(part, name, None)
        if old is None:
            continue
        new = torch.empty(shape, device=old.device, dtype=old.dtype)
        setattr(part, name, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)


# -- recurrent networks over characters or words whose layers can be made narrower ------------------------------------

GATES = 4


class Lstm(nn.Module):
    """(N, T, inputs) -> (N, T, units): one layer of LSTM cells, with a separate axis for the gates.

    torch's own layer stacks the four gates' rows in one matrix, whose leading rows are not a narrower layer.
    """

    channels_at = 2

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.weight_input = nn.Parameter(torch.empty(GATES, units, inputs))
        self.weight_hidden = nn.Parameter(torch.empty(GATES, units, units))
        self.bias = nn.Parameter(torch.empty(GATES, units))

    def narrow(self, inputs: int, keep: Keep, *, last: bool) -> None:
        """Reduces its inputs and units."""
        units = self.bias.shape[1] if last else keep(self.bias.shape[1])
        resize(self, weight_input=(GATES, units, inputs), weight_hidden=(GATES, units, units), bias=(GATES, units))

    def initialise_own(self, tensors_by_name: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Uniform in +-1/sqrt(units), as in torch's LSTM."""
        fill_uniform(tensors_by_name, tensors_by_name["bias"].shape[1], generator)

    def forward(self, x: Tensor) -> Tensor:
        units = self.bias.shape[1]
        weights = [t.reshape(GATES * units, -1) for t in (self.weight_input, self.weight_hidden)]
        bias = self.bias.reshape(-1)
        tensors = [*weights, bias, torch.zeros_like(bias)]

        def run(x: Tensor) -> Tensor:
            start = x.new_zeros((1, x.shape[0], units))
            y: Tensor = torch.lstm(x, (start, start), tensors, True, 1, 0.0, self.training, False, True)[0]
            return y

        return run(x) if x.device.type == "cpu" else in_float32(run, x)


class LstmNetwork(nn.Module):
    """Tokens (N, T) -> logits (N, vocabulary, T): an embedding, layers of LSTM cells, and a linear decoder."""

    def __init__(self, vocabulary: int, embedding_size: int, units: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding_size)
        self.layers = nn.Sequential(*(Lstm(embedding_size if i == 0 else units, units) for i in range(layers)))
        self.decoder = nn.Linear(units, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.decoder(self.layers(self.embedding(x))).transpose(1, 2)
        return y


# -- spaces -----------------------------------------------------------------------------------------------------------

WIDTHS = (0.0625, 0.125, 0.25, 0.5, 1.0)
"""HeteroFL's levels e, d, c, b, a."""
NORMS = ("none", "batch", "static", "group")


@dataclass(frozen=True)
class WidthDesign(ABC):
    """A whole network, and the shares of its channels that subnets may have, ascending to 1.

    With `scaler`, narrow layers are scaled up in training (HeteroFL).
    """

    name: str
    input_shape: tuple[int, ...]
    num_classes: int
    widths: tuple[float, ...] = WIDTHS
    scaler: bool = False

    @property
    def input_dtype(self) -> torch.dtype:
        """Floats for images, int64 for tokens."""
        return torch.float32

    @abstractmethod
    def build(self) -> nn.Module:
        """The whole network, `forward(x)`."""


def check_widths(widths: tuple[float, ...]) -> None:
    """Raises ValueError for shares that are not ascending to 1."""
    if list(widths) != sorted(set(widths)) or not widths or widths[0] <= 0 or widths[-1] != 1.0:
        raise ValueError(f"space.widths={list(widths)}: give shares in ascending order, above 0, the last one 1.0")


class WidthSpace(LeadingSpace):
    """One decision: the width of the network."""

    def __init__(self, design: WidthDesign) -> None:
        check_widths(design.widths)
        self.design, self.name = design, design.name
        self.input_shape, self.input_dtype = tuple(design.input_shape), design.input_dtype
        self.options = (len(design.widths),)

    def width_of(self, architecture: Architecture) -> float:
        """The share of the channels that a subnet keeps."""
        return self.design.widths[architecture[0]]

    def label(self, architecture: Architecture) -> str:
        """Such as `p=.25`."""
        return f"p={self.width_of(architecture):g}"

    def _network(self, architecture: Architecture) -> nn.Module:
        share, sample = self.width_of(architecture), samples_of(self, 2)
        module = narrowed(self.design.build, sample, partial(channels_kept, share))
        return scaled_while_training(module, sample, share) if self.design.scaler and share < 1 else module

    @cached_property
    def units(self) -> Mapping[str, tuple[int, ...]]:
        """Per tensor and dimension, the number of entries per hidden channel; 0 for dimensions of other things.

        If hidden channels are permuted, only the former dimensions are: inputs and classes stay.
        """
        fewer = narrowed(self.design.build, samples_of(self, 2), lambda channels: channels - 1).state_dict()
        return {
            name: tuple(n - m for n, m in zip(whole, fewer[name].shape, strict=True))
            for name, whole in supernet_shapes(self).items()
        }

    def rolled(self, weights: Weights, step: int) -> dict[str, Tensor]:
        """The weights after all hidden channels have moved `step` places to the front, the first ones to the end."""
        parts = dict(weights)
        for name in weights:  # empty in a dry run
            units = self.units[name]
            dims = [d for d, unit in enumerate(units) if unit]
            if dims:
                shifts = [-step * units[d] for d in dims]
                parts[name] = torch.roll(weights[name], shifts, dims).contiguous()
        return parts

    def check_channels(self) -> None:
        """Raises ValueError if the network's channels cannot be permuted, for example if it concatenates layers."""
        weights = self.initial_weights(torch.Generator().manual_seed(0))
        x = torch.randn((2, *self.input_shape), generator=torch.Generator().manual_seed(1))
        module = self.build_subnet(self.largest).eval()
        before: list[Tensor] = []
        after: list[Tensor] = []
        for tensors, values in zip((before, after), (weights, self.rolled(weights, 1)), strict=True):
            module.load_state_dict(values)
            with torch.no_grad():
                outputs = module(x)
            # Of outputs by name the logits: others may be hidden channels, which have moved.
            logits = outputs.get("logits", outputs) if isinstance(outputs, Mapping) else outputs
            mapped_within(tensors.append, logits)
        if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(before, after, strict=True)):
            raise ValueError(
                f"space {self.name}: a layer concatenates channels of several layers, so its leading channels are not "
                "those of a narrower network; add them up instead"
            )


# -- networks ---------------------------------------------------------------------------------------------------------


def _norm(kind: str, channels: int) -> nn.Module:
    """A norm; `static` uses the batch's statistics in training and leaves the stored ones alone (HeteroFL)."""
    kinds: dict[str, Callable[[], nn.Module]] = {
        "none": nn.Identity,
        "batch": lambda: nn.BatchNorm2d(channels),
        "static": lambda: nn.BatchNorm2d(channels, momentum=0.0),
        "group": lambda: nn.GroupNorm(1, channels),
    }
    if kind not in kinds:
        raise ValueError(f"space.norm={kind!r}: allowed are {', '.join(NORMS)}")
    return kinds[kind]()


@dataclass(frozen=True)
class CnnWidthDesign(WidthDesign):
    """HeteroFL's convolutional network: 3x3 convolutions, each with norm, ReLU and (but for the last) 2x2 pooling.

    `stage_widths` are the channels of the layers; `norm` is none, batch, static (HeteroFL) or group (one group).
    """

    name: str = "cnn_width"
    input_shape: tuple[int, ...] = (3, 32, 32)
    num_classes: int = 10
    stage_widths: tuple[int, ...] = (64, 128, 256, 512)
    norm: str = "static"

    def __post_init__(self) -> None:
        _norm(self.norm, 1)
        if len(self.input_shape) != 3 or min(self.input_shape[1:]) < 2 ** (len(self.stage_widths) - 1):
            raise ValueError(
                f"space.input_shape={list(self.input_shape)}: {self.name} takes images of at least "
                f"{2 ** (len(self.stage_widths) - 1)} x {2 ** (len(self.stage_widths) - 1)} with these stage_widths"
            )

    def build(self) -> nn.Module:
        layers: list[nn.Module] = []
        channels = self.input_shape[0]
        for i, width in enumerate(self.stage_widths):
            layers += [nn.Conv2d(channels, width, 3, padding=1), _norm(self.norm, width), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if i < len(self.stage_widths) - 1 else []
            channels = width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, self.num_classes))


@dataclass(frozen=True)
class ResnetWidthDesign(WidthDesign):
    """ResNet-18 for small images, as in HeteroFL, FjORD and FedRolex.

    `norm` is none, batch or static; groups of channels would change with the width.
    """

    name: str = "resnet_width"
    input_shape: tuple[int, ...] = (3, 32, 32)
    num_classes: int = 10
    stem_channels: int = 64
    stem_stride: int = 1
    norm: str = "static"

    def __post_init__(self) -> None:
        if self.norm not in NORMS[:3]:
            raise ValueError(f"space.norm={self.norm!r}: {self.name} takes {', '.join(NORMS[:3])}")

    def build(self) -> nn.Module:
        c, h, w = self.input_shape
        norm = "batch" if self.norm == "static" else self.norm
        network = Resnet18(
            Resnet18Design(self.name, (c, h, w), self.num_classes, self.stem_channels, norm, self.stem_stride)
        )
        for part in network.modules() if self.norm == "static" else ():
            if isinstance(part, nn.BatchNorm2d):
                part.momentum = 0.0
        return network


@dataclass(frozen=True)
class LstmWidthDesign(WidthDesign):
    """LEAF's next-character network: an embedding, layers of LSTM cells, and a linear decoder.

    `input_shape` is (T,). LEAF predicts only the character after the last position: objective.name=last_position.
    """

    name: str = "lstm_width"
    input_shape: tuple[int, ...] = (80,)
    num_classes: int = 90
    embedding_size: int = 8
    channels: int = 256
    cells: int = 2

    def __post_init__(self) -> None:
        if self.scaler:
            raise ValueError(
                f"space.scaler=true: {self.name} has no scaler, as its cells' gates saturate; leave it out"
            )

    @property
    def input_dtype(self) -> torch.dtype:
        return torch.int64

    def build(self) -> nn.Module:
        return LstmNetwork(self.num_classes, self.embedding_size, self.channels, self.cells)


@dataclass(frozen=True)
class OwnWidthDesign(WidthDesign):
    """A user's network, made by `network(input_shape, num_classes)`."""

    name: str = "width"
    input_shape: tuple[int, ...] = (1, 8, 8)
    num_classes: int = 10
    network: str = ""

    def build(self) -> nn.Module:
        with blaming("network", self.network):
            made = imported("network", self.network)(self.input_shape, self.num_classes)
        if not isinstance(made, nn.Module):
            raise PluginError(f"network {self.network!r} gives {type(made).__name__}: give a torch.nn.Module")
        return made


def own_network(
    config: SpaceConfig,
    *,
    network: Annotated[str, NOT_EMPTY, "module:build, where build(input_shape, num_classes) gives the whole network"],
) -> SearchSpace:
    """The width space of a user's own network."""
    space = from_design(WidthSpace, replace(OwnWidthDesign(), network=network), config)
    assert isinstance(space, WidthSpace), "it was made as one"
    space.check_channels()
    return space


SPACES: Spaces = {
    "width": own_network,
    **spaces_of(WidthSpace, CnnWidthDesign(), ResnetWidthDesign(), LstmWidthDesign()),
}
