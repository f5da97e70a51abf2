"""FedorAS' convolutional search spaces: a stem, stages of searchable layers, and a reduction after every stage."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.spaces.operator_choice import Candidate, OperatorChoiceSpace
from fedloom.platform.spaces.space_config import spaces_of

# -- operators: conv(k), ds(k,e), mb(k,e), identity -------------------------------------------------------------------
# They preserve the shape (c channels in and out, "same" padding). Every convolution is followed by BatchNorm and ReLU,
# except for the two of squeeze-and-excitation, which have biases instead (FedorAS, App. E.3).


@dataclass(frozen=True)
class Operator:
    """An operator that preserves the shape: `build(channels)` makes its module."""

    name: str
    build: Callable[[int], nn.Module]


class ConvNormRelu(nn.Module):
    """Convolution without bias, BatchNorm, ReLU: (N, c_in, H, W) -> (N, c_out, H', W')."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, *, stride: int = 1, padding: int = 0, groups: int = 1
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)), inplace=True)


class SqueezeExcitation(nn.Module):
    """Scales each channel by a gate in (0, 1) computed from the global averages, without a bottleneck."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, channels, 1)
        self.excite = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1))))
        return x * gate.sigmoid()


class Residual(nn.Module):
    """The input plus the output of the parts in sequence."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for part in self.parts:
            y = part(y)
        return x + y


def conv(kernel: int) -> Operator:
    """k x k convolution, c -> c."""
    _check_kernel(kernel)
    return Operator(f"conv({kernel})", lambda c: ConvNormRelu(c, c, kernel, padding=kernel // 2))


def ds(kernel: int, expansion: float) -> Operator:
    """Input + [k x k convolution in min(c, m) groups, c -> m; 1 x 1 convolution, m -> c], m = floor(c * expansion)."""
    _check_kernel(kernel)
    name = f"ds({kernel},{_positive(expansion):g})"

    def build(channels: int) -> nn.Module:
        middle = _expanded(name, channels, expansion)
        groups = min(channels, middle)
        if channels % groups or middle % groups:
            raise ValueError(f"{name} cannot group {channels} channels into {middle}: one must divide the other")
        first = ConvNormRelu(channels, middle, kernel, padding=kernel // 2, groups=groups)
        return Residual(first, ConvNormRelu(middle, channels, 1))

    return Operator(name, build)


def mb(kernel: int, expansion: float) -> Operator:
    """Input + [dense k x k convolution, c -> m; squeeze-and-excitation; 1 x 1 convolution, m -> c], m = floor(c*e)."""
    _check_kernel(kernel)
    name = f"mb({kernel},{_positive(expansion):g})"

    def build(channels: int) -> nn.Module:
        middle = _expanded(name, channels, expansion)
        first = ConvNormRelu(channels, middle, kernel, padding=kernel // 2)
        return Residual(first, SqueezeExcitation(middle), ConvNormRelu(middle, channels, 1))

    return Operator(name, build)


def identity() -> Operator:
    """The input: no parameters, no cost."""
    return Operator("identity", lambda _channels: nn.Identity())


def _check_kernel(kernel: int) -> None:
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"a kernel must be odd and positive to keep the shape, given {kernel}")


def _positive(expansion: float) -> float:
    if not 0 < expansion < math.inf:
        raise ValueError(f"an expansion must be positive, given {expansion}")
    return expansion


def _expanded(name: str, channels: int, expansion: float) -> int:
    middle = math.floor(channels * expansion)
    if middle < 1:
        raise ValueError(f"{name} leaves no channel of {channels}: use a larger expansion or more channels")
    return middle


_FORMS = "conv(k), ds(k,e), mb(k,e), identity"
_SPELLING = re.compile(r"(conv|ds|mb|identity)(?:\(([^()]*)\))?")


def parse_operator(text: str) -> Operator:
    """Parses an operator as written in the configuration: `conv(1)`, `ds(3,.5)`, `mb(1,2)`, `identity`.

    Raises:
        ValueError: any other spelling.
    """
    match = _SPELLING.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ValueError(f"unknown operator {text!r}: known are {_FORMS}")
    kind, inside = match.groups()
    numbers = [] if inside is None else inside.split(",")
    try:
        match (kind, numbers):
            case ("conv", [kernel]):
                return conv(int(kernel))
            case ("ds", [kernel, expansion]):
                return ds(int(kernel), float(expansion))
            case ("mb", [kernel, expansion]):
                return mb(int(kernel), float(expansion))
            case ("identity", []):
                return identity()
    except ValueError as error:
        raise ValueError(f"operator {text!r}: {error}") from error
    raise ValueError(f"operator {text!r} has the wrong numbers: known are {_FORMS}")


# -- networks and spaces ----------------------------------------------------------------------------------------------

OPERATORS = ("conv(1)", "ds(3,.5)", "ds(3,1)", "ds(3,2)", "mb(1,2)", "mb(3,.5)", "mb(3,1)", "mb(3,2)", "identity")
"""The nine operators of the CIFAR spaces, in the order of their option indices."""
SPEECH_OPERATORS = (
    *("conv(1)", "ds(3,.5)", "ds(3,1)", "ds(1,2)", "ds(3,2)", "mb(1,2)", "mb(3,.5)", "conv(3)", "mb(3,1)", "mb(3,2)"),
    "identity",
)
"""The eleven operators of the Speech Commands space, in the order of their option indices."""

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CnnDesign:
    """A convolutional network with a choice of operators in every layer (FedorAS).

    `stage_strides` are the strides of the reductions, one per stage; `input_shape` is (C, H, W).
    `depthwise_link` makes the reductions' residual link depthwise 3x3 + 1x1 instead of a 2x2 convolution. With
    `pooled`, reductions are 3x3 averages and a 1x1 convolution to twice the channels, for inputs of any size.
    `heads` are the numbers of classes of several tasks' classifiers; a network has one, the last searchable layer.
    A `stem_stride` above 1 makes all layers smaller, for CPUs, whose time goes to the first layers' activations.
    """

    name: str
    input_shape: tuple[int, int, int]
    num_classes: int
    stem_channels: int
    stage_layers: tuple[int, ...]
    stage_strides: tuple[int, ...]
    depthwise_link: bool = False
    operators: tuple[str, ...] = OPERATORS
    stem_stride: int = 1
    pooled: bool = False
    heads: tuple[int, ...] = ()

    def after(self, channels: int) -> int:
        """Channels after a reduction: twice as many, or floor(1.5 c)."""
        return 2 * channels if self.pooled else channels * 3 // 2


CNN_CIFAR = CnnDesign("cnn_cifar", (3, 32, 32), 10, 64, (4, 4, 4, 4), (2, 2, 2, 2))
CNN_CIFAR_WIDE = CnnDesign(
    "cnn_cifar_wide", (3, 32, 32), 10, 64, (4, 4, 4, 4, 8, 8), (2, 2, 1, 1, 1, 2), depthwise_link=True
)
CNN_DIGITS = CnnDesign("cnn_digits", (1, 8, 8), 10, 16, (2, 3), (2, 2))
CNN_SPEECH = CnnDesign(
    *("cnn_speech", (1, 40, 51), 12, 16, (1, 1, 2, 2), (2, 2, 2, 2)),
    operators=SPEECH_OPERATORS,
    stem_stride=2,
    pooled=True,
)
"""Speech Commands: 40 MFCC of 51 frames (FedorAS, App. E.3)."""


def _depthwise_separable(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    return nn.Sequential(
        ConvNormRelu(in_channels, in_channels, 3, stride=stride, padding=1, groups=in_channels),
        ConvNormRelu(in_channels, out_channels, 1),
    )


class Reduction(nn.Module):
    """(N, c, H, W) -> (N, floor(1.5 c), H/stride, W/stride): a depthwise separable convolution plus a residual link."""

    def __init__(self, channels: int, stride: int, depthwise_link: bool) -> None:
        super().__init__()
        wider = channels * 3 // 2
        self.main = _depthwise_separable(channels, wider, stride)
        if depthwise_link:
            self.link = _depthwise_separable(channels, wider, stride)
        else:
            self.link = ConvNormRelu(channels, wider, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.main(x) + self.link(x)
        return y


class CnnSkeleton(nn.Module):
    """Stem, reductions and classifier: `forward(x_NCHW, layers)` gives logits (N, classes).

    With several tasks, the last searchable layer is the classifier.
    """

    def __init__(self, design: CnnDesign) -> None:
        super().__init__()
        self.stage_layers = design.stage_layers
        channels = _stage_channels(design)
        self.stem = ConvNormRelu(design.input_shape[0], design.stem_channels, 3, stride=design.stem_stride, padding=1)
        reductions = zip(channels, design.stage_strides, strict=True)
        self.reductions = nn.ModuleList(
            nn.Sequential(nn.AvgPool2d(3, stride, padding=1), ConvNormRelu(c, 2 * c, 1))
            if design.pooled
            else Reduction(c, stride, design.depthwise_link)
            for c, stride in reductions
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        if not design.heads:
            self.classifier = _classifier(design, design.num_classes)

    def forward(self, x: Tensor, layers: Sequence[Layer]) -> Tensor:
        x = self.stem(x)
        remaining = iter(layers)
        for num_layers, reduction in zip(self.stage_layers, self.reductions, strict=True):
            for _ in range(num_layers):
                x = next(remaining)(x)
            x = reduction(x)
        classify = next(remaining, None) or self.classifier
        logits: Tensor = classify(self.pool(x).flatten(1))
        return logits


def _classifier(design: CnnDesign, classes: int) -> nn.Module:
    return nn.Linear(design.after(_stage_channels(design)[-1]), classes)


def _stage_channels(design: CnnDesign) -> list[int]:
    channels = [design.stem_channels]
    for _ in design.stage_layers[1:]:
        channels.append(design.after(channels[-1]))
    return channels


def cnn_space(design: CnnDesign) -> OperatorChoiceSpace:
    """The operator-choice space of a design.

    Raises:
        ValueError: a design that cannot be built; names the field, what was given and what is allowed.
    """
    _check(design)
    operators = [parse_operator(text) for text in design.operators]
    channels_of_layers = [
        channels
        for channels, num_layers in zip(_stage_channels(design), design.stage_layers, strict=True)
        for _ in range(num_layers)
    ]
    layers = [[Candidate(o.name, partial(o.build, channels)) for o in operators] for channels in channels_of_layers]
    if design.heads:
        named = [(f"task{i}({n})", n) for i, n in enumerate(design.heads, 1)]
        layers.append([Candidate(name, partial(_classifier, design, n)) for name, n in named])
    return OperatorChoiceSpace(
        name=design.name,
        input_shape=design.input_shape,
        layers=layers,
        build_fixed=partial(CnnSkeleton, design),
        tasks=bool(design.heads),
    )


def _check(design: CnnDesign) -> None:
    if len(design.input_shape) != 3 or min(design.input_shape) < 1:
        raise ValueError(f"input_shape must be channels, height, width, given {list(design.input_shape)}")
    if not design.stage_layers or min(design.stage_layers) < 1:
        raise ValueError(f"stage_layers needs one positive number per stage, given {list(design.stage_layers)}")
    if len(design.stage_strides) != len(design.stage_layers):
        raise ValueError(
            f"stage_strides needs one stride for each of the {len(design.stage_layers)} stages, "
            f"given {list(design.stage_strides)}"
        )
    for field, least in (("num_classes", 1), ("stem_channels", 2), ("stem_stride", 1)):
        value = getattr(design, field)
        if value < least:
            raise ValueError(f"{field} must be at least {least}, given {value}")
    if any(classes < 2 for classes in design.heads):
        raise ValueError(f"heads={list(design.heads)}: give the classes of every task, each at least 2")
    if not design.operators:
        raise ValueError("operators must name at least one operator")
    if design.pooled and design.depthwise_link:
        raise ValueError(f"depthwise_link=true: the reductions of {design.name} have no link")
    allowed = (1, 2) if design.depthwise_link or design.pooled else (2,)
    for stride in design.stage_strides:
        if stride not in allowed:
            raise ValueError(f"stage_strides of {design.name} may be {' or '.join(map(str, allowed))}, given {stride}")
    if design.pooled:
        return
    factor = design.stem_stride * math.prod(design.stage_strides)
    for size in design.input_shape[1:]:
        if size % factor:
            raise ValueError(
                f"{design.name} divides its input by {factor}: height and width must be multiples of {factor}, "
                f"given {design.input_shape[1]} x {design.input_shape[2]}"
            )


SPACES = spaces_of(cnn_space, CNN_CIFAR, CNN_CIFAR_WIDE, CNN_DIGITS, CNN_SPEECH)
