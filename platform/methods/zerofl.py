"""ZeroFL: clients train with sparse weights and activations and send few weights (Qiu et al. 2022; SWAT, Raihan 2020).

    client:  in every 2D convolution and linear layer that is trained, with sparsity s:
             computes outputs with the (1 - s) largest weights, by magnitude,
             the input's gradient from these weights, the weights' gradient from the (1 - s) largest activations;
             the weights themselves stay dense
             sends the share (1 - s) + r of its changes: where the trained weights are largest (by=weight), or the
             changes are (by=change); a bit per weight says which
    server:  FedAvg; what is not sent counts as unchanged
    the model is scored and kept as clients compute it: with the (1 - s) largest weights of every layer

Shares are taken of each layer in training, and of all weights together in sending. MACs are counted as those of the
dense network, because devices do not skip zeros by themselves. Sparsity 0 is FedAvg.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode

from fedloom.platform.averaging.processors import By, Sparsify, check_after_choice, processor
from fedloom.platform.clients.assignments import TaskError
from fedloom.platform.clients.local_rules import refuse_parts
from fedloom.platform.clients.networks import Network, OfSubnet, Subnet
from fedloom.platform.clients.scoring import ScoreSubnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.federation.method import Method
from fedloom.platform.federation.selection import selection_traits
from fedloom.platform.federation.training_config import rules_of
from fedloom.platform.methods.evaluation import EvaluationJob, EvaluationStage, everybody
from fedloom.platform.methods.fedavg import FedAvgConfig, subnet_of, training
from fedloom.platform.settings import BELOW_ONE, PART
from fedloom.platform.spaces.base import SearchSpace, once
from fedloom.platform.spaces.initialisation import on_meta
from fedloom.platform.spaces.slices import Weights, architecture_id

if TYPE_CHECKING:
    from fedloom.platform.clients.assignments import Assignment, ClientResult
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.federation.algorithm import Round, RunState
    from fedloom.platform.federation.method import Stage
    from fedloom.platform.federation.world import World

SPARSE = "deployed"
"""The tensor group of the sparse weights with which the model is used; the trained weights are dense."""


@dataclass
class ZeroFLConfig(FedAvgConfig):
    """FedAvg of one architecture whose clients train and send sparsely."""

    name: str = "zerofl"
    sparsity: Annotated[float, BELOW_ONE, "s, the share of a layer's weights and activations that are zero"] = 0.9
    mask_ratio: Annotated[float, PART, "r, the share of the weights that is sent in addition to 1 - s"] = 0.2
    by: Annotated[By, "what is sent: changes where the trained weights, or the changes, are largest"] = "weight"


def largest(values: Tensor, share: float) -> Tensor:
    """The values with all but the share that is largest by magnitude set to zero."""
    count = max(1, math.ceil(share * values.numel()))
    if count == values.numel():
        return values
    sizes = values.abs()
    least = sizes.flatten().kthvalue(values.numel() - count + 1).values
    return torch.where(sizes >= least, values, torch.zeros_like(values))


class _SparseConvolution(torch.autograd.Function):
    """A convolution with sparse weights, whose weights' gradient comes from sparse inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, share: float, about: Any) -> Tensor:
        few = largest(weight, share)
        ctx.save_for_backward(largest(x, share), few)
        ctx.about, ctx.biased = about, bias is not None
        return F.conv2d(x, few, bias, *about)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.about
        sizes, wanted = [weight.shape[0]] if ctx.biased else None, [ctx.needs_input_grad[0], True, ctx.biased]
        gradients = torch.ops.aten.convolution_backward(
            gradient, x, weight, sizes, stride, padding, dilation, False, [0, 0], groups, wanted
        )
        return (*gradients, None, None)


class _SparseLinear(torch.autograd.Function):
    """A linear layer with sparse weights, whose weights' gradient comes from sparse inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, share: float) -> Tensor:
        few = largest(weight, share)
        ctx.save_for_backward(largest(x, share), few)
        ctx.biased = bias is not None
        return F.linear(x, few, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        bias = rows.sum(dim=0) if ctx.biased else None
        return gradient @ weight, rows.t() @ x.flatten(0, -2), bias, None


Sizes = int | tuple[int, ...]


def _convolve(
    share: float,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """`F.conv2d` with sparse factors."""
    if padding == "same":
        # As torch does: an odd row or column is added at the end.
        sizes = [d * (k - 1) for d, k in zip(_pair(dilation), weight.shape[2:], strict=True)]
        x = F.pad(x, [side for size in reversed(sizes) for side in (size // 2, size - size // 2)])
    rows = (0, 0) if isinstance(padding, str) else _pair(padding)
    y: Tensor = _SparseConvolution.apply(x, weight, bias, share, (_pair(stride), rows, _pair(dilation), groups))
    return y


def _multiply(share: float, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with sparse factors."""
    y: Tensor = _SparseLinear.apply(x, weight, bias, share)
    return y


SPARSE_CALLS: Mapping[Any, Callable[..., Tensor]] = {F.conv2d: _convolve, F.linear: _multiply}


class _Sparsely(TorchFunctionMode):
    """Replaces the products with a weight by sparse ones, also where a layer does more than multiply."""

    def __init__(self, weight: Tensor, share: float) -> None:
        super().__init__()
        self.weight, self.share, self.calls = weight, share, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        named = kwargs or {}
        if func in SPARSE_CALLS and (args[1] if len(args) > 1 else named.get("weight")) is self.weight:
            self.calls += 1
            return SPARSE_CALLS[func](self.share, *args, **named)
        return func(*args, **named)


def _forward(part: nn.Conv2d | nn.Linear, dense: Callable[..., Any], share: float, *inputs: Any) -> Any:
    with _Sparsely(part.weight, share) as sparse:
        outputs = dense(*inputs)
    if not sparse.calls:
        raise TaskError(
            f"zerofl: a layer {type(part).__name__} does not multiply by its weight as it is, so it cannot be sparse: "
            "use other layers, or set method.sparsity=0"
        )
    return outputs


def sparse_layers(module: nn.Module) -> dict[str, nn.Conv2d | nn.Linear]:
    """The 2D convolutions and linear layers whose weights are trained, by name.

    Attention's output layer stays dense, because torch's attention reads its weight without calling it.
    """
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, nn.Conv2d | nn.Linear) and not isinstance(part, NonDynamicallyQuantizableLinear)
        if (weight := part._parameters.get("weight")) is not None and weight.requires_grad
    }


def sparsely(build: Callable[[], nn.Module], share: float) -> nn.Module:
    """The network on the meta device; its convolutions and linear layers use a share of weights and activations."""
    module = on_meta(build)
    for part in sparse_layers(module).values():
        part.forward = partial(_forward, part, part.forward, share)  # type: ignore[method-assign]
    return module


@dataclass(frozen=True)
class Sparse(OfSubnet):
    """A stand-alone subnet that computes with a share of its weights and activations, at the dense network's cost."""

    share: float

    def on(self, worker: Worker, assignment: Assignment) -> Network:
        """The network in the subnet's own module."""
        network, space = self.subnet.on(worker, assignment), worker.space
        build = partial(space.build_subnet, self.subnet.architecture)
        name = f"sparse {architecture_id(self.subnet.architecture)} {self.share}"
        skeleton = once(space, name, lambda _: sparsely(build, self.share)).train()
        compute = worker.kernels.functional(skeleton, worker.device)
        tensors = {**worker.tensors_of(network.module), **worker.constants_of(network.module)}
        return replace(network, forward=lambda x: compute(tensors, worker.kernels.laid_out(x)), compilable=False)


def thinned(space: SearchSpace, subnet: Subnet, weights: Weights, share: float) -> dict[str, Tensor]:
    """The weights, where all but the largest share is set to zero in every convolution and linear layer."""
    module = on_meta(partial(space.build_subnet, subnet.architecture))
    layers = {f"{name}.weight" for name in sparse_layers(module)}
    return {name: largest(tensor, share) if name in layers else tensor for name, tensor in weights.items()}


@dataclass(frozen=True)
class ScoreThinned(ScoreSubnet):
    """Scores the subnet with the share of its weights that its clients compute with."""

    share: float = 1.0

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        return super().run(worker, assignment, thinned(worker.space, self.subnet, weights, self.share))


def stages(config: ZeroFLConfig, world: World) -> list[Stage]:
    """FedAvg's stages with sparse clients, and a sparse model at the end."""
    if config.sparsity and world.config.executor.precision == "bfloat16":
        raise ValueError("zerofl's sparse layers compute in float32: use executor.precision=float32 or tf32")
    rules = rules_of(config.train, "method.train")
    refuse_parts(rules.local, "method.train", "zerofl", "sgd or fedprox")
    share = 1.0 - config.sparsity
    sends = min(1.0, share + config.mask_ratio)
    if sends < 1:
        check_after_choice([(c.name, processor(c)) for c in rules.processors], "method.train", "method=zerofl")
        if selection_traits(rules.selection.name).shortens_updates:
            raise ValueError(
                f"method.train.selection={rules.selection.name} says which share of their changes clients send, and so "
                "does method.mask_ratio: choose another selection rule, or mask_ratio=1"
            )
        if config.train.privacy.secure:
            raise ValueError(
                "method.train.privacy.secure=true and method=zerofl, whose clients send only a part of their changes: "
                "masked updates are sent whole; leave one out"
            )

    def client(subnet: Subnet, round_: Round) -> Train:
        network = Sparse(subnet, share) if config.sparsity else subnet
        largest_changes = (Sparsify(share=sends, by=config.by),) if sends < 1 else ()
        return Train(network, round_.local, round_.rules.weighting, processors=largest_changes)

    model, subnet = config.name, subnet_of(config, world)
    score = ScoreThinned(subnet, model, "validation", share=share) if config.sparsity else None

    def thin(state: RunState) -> RunState:
        if not config.sparsity or model not in state.groups:
            return state
        return state.with_group(SPARSE, thinned(world.space, subnet, state.weights(model), share))

    job = EvaluationJob("", model, subnet, SPARSE if config.sparsity else model, everybody(world), kept=model)
    evaluation = EvaluationStage(world, config.evaluation, lambda _state: [job], models=1, prepare=thin)
    return [training(config, world, model, client, score), *([evaluation] if config.evaluate else [])]


METHOD = Method(ZeroFLConfig, stages, kind="shared", lacks=("candidates",))
