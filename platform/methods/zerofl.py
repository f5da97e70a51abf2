"""ZeroFL: clients train with sparse weights and activations and send few weights (Qiu et al. 2022; SWAT, Raihan 2020).

    client:  in every 2D convolution and linear layer, with sparsity s:
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
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.platform.averaging.processors import By, Sparsify
from fedloom.platform.clients.local_rules import refuse_parts
from fedloom.platform.clients.networks import Network, OfSubnet, Subnet
from fedloom.platform.clients.scoring import ScoreSubnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.federation.method import Method
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


def _convolve(part: nn.Conv2d, share: float, x: Tensor) -> Tensor:
    about = (part.stride, part.padding, part.dilation, part.groups)
    y: Tensor = _SparseConvolution.apply(x, part.weight, part.bias, share, about)
    return y


def _multiply(part: nn.Linear, share: float, x: Tensor) -> Tensor:
    y: Tensor = _SparseLinear.apply(x, part.weight, part.bias, share)
    return y


def sparsely(build: Callable[[], nn.Module], share: float) -> nn.Module:
    """The network on the meta device; its convolutions and linear layers use a share of weights and activations."""
    module = on_meta(build)
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            part.forward = partial(_convolve, part, share)  # type: ignore[method-assign]
        elif isinstance(part, nn.Linear):
            part.forward = partial(_multiply, part, share)  # type: ignore[method-assign]
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
        compute, tensors = worker.kernels.functional(skeleton, worker.device), worker.tensors_of(network.module)
        return replace(network, forward=lambda x: compute(tensors, worker.kernels.laid_out(x)), compilable=False)


def thinned(space: SearchSpace, subnet: Subnet, weights: Weights, share: float) -> dict[str, Tensor]:
    """The weights, where all but the largest share is set to zero in every convolution and linear layer."""
    module = on_meta(partial(space.build_subnet, subnet.architecture))
    layers = {f"{name}.weight" for name, m in module.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
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
    refuse_parts(rules_of(config.train, "method.train").local, "method.train", "zerofl", "sgd or fedprox")
    share = 1.0 - config.sparsity
    sends = min(1.0, share + config.mask_ratio)

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
