"""FedMask: silos learn which weights of a frozen network to use, and send bits (Li et al. 2021).

    server, once:           sends the network's random initial weights w, which never change
    in every round, silo i: trains real scores s_i of the masked weights: forwards with w * m_i, m_i = 1 where s_i >= 0,
                            and takes dL/dm_i for the gradient of s_i (straight-through)
                            (after its first round's training it keeps, for good, the share `kept` of each tensor with
                            the highest scores, and masks out the rest)
                            sends m_i for the weights that it keeps
    server:                 a weight that two or more of the round's silos keep gets their majority's bit (a tie: 1);
                            for any other weight every silo's own bit stays
    silo i, next round:     keeps the scores whose bits the server confirms; resets the others to the server's side

A silo's model is w * m_i, with its own running statistics if the network has any. In both directions a silo exchanges
one bit per weight that it keeps. In its first round it receives w instead, and also sends one bit per masked weight,
which says whether it keeps it. The paper prunes structures; here single weights are pruned. The paper's text is not
public: where its abstract and others' descriptions leave a choice open, the box above says what is done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from fedloom.platform.averaging.average import Update
from fedloom.platform.averaging.processors import kept_of
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.scoring import PERSONAL, validation_scores
from fedloom.platform.clients.trainer import ValidationUse, client_samples, received, train_network, trained_outcome
from fedloom.platform.clients.training import LocalSGD, Optimizer
from fedloom.platform.data.on_device import moved
from fedloom.platform.data.trees import rows_of
from fedloom.platform.federation.algorithm import SUPERNET, from_generator, to_all
from fedloom.platform.federation.method import Method
from fedloom.platform.federation.training_config import Schedule
from fedloom.platform.methods.silos import (
    WEIGHTS,
    Personal,
    ScoreOwn,
    SiloTraining,
    SiloTrainingConfig,
    SubnetConfig,
    checked_silos,
    under,
    validation_use,
)
from fedloom.platform.settings import NOT_EMPTY, POSITIVE, SHARE, ComponentName
from fedloom.platform.spaces.initialisation import on_meta
from fedloom.platform.spaces.slices import Slice, Weights, bytes_of
from fedloom.platform.words import shown

if TYPE_CHECKING:
    from fedloom.platform.clients.assignments import Assignment, ClientResult
    from fedloom.platform.clients.worker import Worker
    from fedloom.platform.federation.algorithm import Plan, Round, RoundResult, RunState
    from fedloom.platform.federation.method import Stage
    from fedloom.platform.federation.world import World

SCORES, KEEPS, BITS, MAJORITY = "scores/", "keeps/", "bits/", "majority/"
"""Prefixes of names: the scores and keep masks in a silo's state, the keep masks and bits that it sends, and the
server's majority bits (1, 0, or -1 where fewer than two silos keep a weight)."""
WITH_OTHERS = 2
"""The fewest silos that must keep a weight for their bits to be counted."""


@dataclass
class FedMaskTrainingConfig(SiloTrainingConfig):
    """Training of the silos' scores."""

    score: Annotated[float, POSITIVE, "distance of a score from 0, at first and after its bit is overruled"] = 0.01
    kept: Annotated[float, SHARE, "share of each masked tensor that a silo keeps after its first round"] = 0.8
    masked: Annotated[
        list[Annotated[str, NOT_EMPTY]] | None,
        "prefixes of the names of the masked weights; null: all of two or more dimensions",
    ] = None
    # With a learning rate of zero in the last round, a silo would end with the bits of the other silos.
    schedule: Annotated[Schedule, "lr of the scores over rounds"] = "fixed"
    weighting: Annotated[str, ComponentName("weighting rule"), "plain: all silos' bits count equally"] = "plain"


@dataclass
class FedMaskConfig(SubnetConfig):
    """A mask per silo over one frozen network."""

    name: str = "fedmask"
    train: FedMaskTrainingConfig = field(default_factory=FedMaskTrainingConfig)


def masked_names(config: FedMaskConfig, world: World, subnet: Subnet) -> tuple[str, ...]:
    """The names of the masked weights; ValueError for a configured prefix that matches none."""
    module = on_meta(partial(world.space.build_subnet, subnet.architecture))
    weights = [name for name, parameter in module.named_parameters() if parameter.dim() > 1]
    beginnings = config.train.masked
    for beginning in beginnings or ():
        if not any(name.startswith(beginning) for name in weights):
            raise ValueError(
                f"method.train.masked: no weight of {world.space.name} of two or more dimensions begins with "
                f"{beginning!r}: they are {', '.join(weights)}"
            )
    return tuple(name for name in weights if beginnings is None or name.startswith(tuple(beginnings)))


# -- a silo's mask ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mask:
    """A silo's scores of the masked weights, and which weights it keeps (bool), both by tensor name."""

    scores: dict[str, Tensor]
    keeps: dict[str, Tensor]

    def bits(self, name: str) -> Tensor:
        """Which weights of a tensor are used (bool): kept, and with a score of at least 0."""
        return (self.scores[name] >= 0) & self.keeps[name]

    def packed(self) -> dict[str, Tensor]:
        """The mask as named tensors."""
        scores = {f"{SCORES}{name}": tensor for name, tensor in self.scores.items()}
        return scores | {f"{KEEPS}{name}": tensor for name, tensor in self.keeps.items()}

    def confirmed(self, majority: Mapping[str, Tensor], score: float) -> Mask:
        """The mask with the majority's bits; a score whose bit changes is reset to `score` or -`score`."""
        after = {}
        for name, scores in self.scores.items():
            bit, used = majority[name].to(scores.device), scores >= 0
            anew = torch.where(bit == 1, score, -score)
            after[name] = torch.where((bit >= 0) & (used != (bit == 1)), anew, scores)
        return Mask(after, self.keeps)

    def pruned(self, share: float) -> Mask:
        """The mask that keeps the share of each tensor with the highest scores; ties go to the first weights."""
        keeps = {}
        for name, scores in self.scores.items():
            order = torch.argsort(scores.flatten(), descending=True, stable=True)
            keep = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
            keep[order[: kept_of(len(order), share)]] = True
            keeps[name] = keep.view_as(scores)
        return Mask(self.scores, keeps)


def fresh_mask(frozen: Mapping[str, Tensor], score: float) -> Mask:
    """A mask that uses all weights."""
    scores = {name: torch.full_like(tensor, score) for name, tensor in frozen.items()}
    return Mask(scores, {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in frozen.items()})


def bytes_of_bits(bits: int) -> int:
    """The number of bytes that hold this many bits."""
    return math.ceil(bits / 8)


class MaskSteps:
    """Updates the scores from the gradients of the masked weights, then applies the new mask to the weights.

    `weights` are the module's parameters; those without a mask are not trained.
    """

    def __init__(self, weights: Optimizer, frozen: Mapping[str, Tensor], mask: Mask, local: LocalSGD) -> None:
        self.parameters = dict(zip(weights.names, weights.parameters, strict=True))
        self.frozen, self.mask, self.sgd = frozen, mask, Optimizer(local, mask.scores)
        self.apply()

    def step(self) -> None:
        """dL/ds = dL/dm = dL/d(w m) * w, for the weights that the silo keeps and the batch has reached."""
        for name, scores in self.mask.scores.items():
            gradient = self.parameters[name].grad
            if gradient is not None:
                scores.grad = gradient * self.frozen[name] * self.mask.keeps[name]
        self.sgd.step()
        for parameter in self.parameters.values():
            parameter.grad = None
        self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        """Puts the masked weights into the module."""
        for name, frozen in self.frozen.items():
            self.parameters[name].copy_(frozen * self.mask.bits(name))


@dataclass(frozen=True)
class TrainFedMask:
    """One round of a silo, whose scores stay in its state."""

    subnet: Subnet
    local: LocalSGD
    train: FedMaskTrainingConfig
    masked: tuple[str, ...]
    validation: ValidationUse = "trained"

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Trains the scores; the update holds the bits and the keep masks."""
        network, state = self.subnet.on(worker), assignment.state
        data = client_samples(worker, assignment, use_validation=self.validation == "trained")
        everything = received(worker, network, weights)
        frozen = {name: everything[name].clone() for name in self.masked}
        mask, sizes = fresh_mask(frozen, self.train.score), [tensor.numel() for tensor in frozen.values()]
        kept_bytes = bytes_of_bits(sum(kept_of(size, self.train.kept) for size in sizes))
        down_bytes, up_bytes = bytes_of(everything), kept_bytes + bytes_of_bits(sum(sizes))
        if state is not None:
            silo_state = moved(state, worker.device)
            mask = Mask(under(silo_state, SCORES), under(silo_state, KEEPS)).confirmed(
                under(weights, MAJORITY), self.train.score
            )
            weights = {**weights, **under(silo_state, WEIGHTS)}  # with the silo's running statistics
            down_bytes = up_bytes = kept_bytes
        steps = list[MaskSteps]()

        def of_scores(sgd: Optimizer) -> MaskSteps:
            steps.append(MaskSteps(sgd, frozen, mask, self.local.plain))
            return steps[0]

        trained = train_network(worker, assignment, network, weights, data, self.local.plain, of_scores)
        if state is None:
            mask = mask.pruned(self.train.kept)
            steps[0].mask = mask
            steps[0].apply()
        model = trained.copied()
        sent = {f"{BITS}{name}": mask.bits(name).float() for name in self.masked}
        sent |= {f"{KEEPS}{name}": keeps.float() for name, keeps in mask.keeps.items()}
        update = Update(sent, {name: Slice(name) for name in sent}, dict.fromkeys(sent, 1.0))
        scores = validation_scores(worker, assignment, network, PERSONAL) if self.validation == "scored" else ()
        return replace(
            trained_outcome(model, rows_of(data[1]), update),
            bytes_down=down_bytes,
            bytes_up=up_bytes,
            parameters=sum(sizes),
            state={**Personal(model.tensors, {}).packed(), **mask.packed()},
            measurements=scores,
        )


# -- the server -------------------------------------------------------------------------------------------------------


def majority_of(bits: Tensor, keeps: Tensor, silos: int) -> Tensor:
    """The majority's bits (int8) from the means of bits and keep masks over the silos; -1 where fewer than two keep."""
    counted = keeps * silos > WITH_OTHERS - 0.5
    return torch.where(counted, (2 * bits >= keeps).to(torch.int8), torch.tensor(-1, dtype=torch.int8))


def stages(config: FedMaskConfig, world: World) -> list[Stage]:
    """Training of the masks, then the evaluation of every silo's masked network."""
    train, rules = config.train, checked_silos(world, config.train)
    fixed = {
        "local_rule": "sgd",
        "server": "replace",
        "weighting": "plain",
        "aggregator": "mean",
        "min_contributors": 1,
    }
    for name, allowed in fixed.items():
        if getattr(train, name) != allowed:
            raise ValueError(
                f"method.train.{name}={shown(getattr(train, name))}: fedmask's server takes the majority of the "
                f"silos' bits; use {allowed}"
            )
    subnet = Subnet(world.architecture(config.architecture, "method.architecture"), stand_alone=True)
    masked = masked_names(config, world, subnet)

    def fresh(generator: torch.Generator) -> dict[str, Tensor]:
        frozen = world.space.initial_subnet_weights(subnet.architecture, generator)
        nobody = {part: {f"{part}{name}": torch.zeros_like(frozen[name]) for name in masked} for part in (BITS, KEEPS)}
        unknown = {f"{MAJORITY}{name}": torch.full_like(frozen[name], -1, dtype=torch.int8) for name in masked}
        return {**frozen, **nobody[BITS], **nobody[KEEPS], **unknown}

    def task_of(round_: Round) -> TrainFedMask:
        validation = validation_use(trained=train.use_validation, scored=round_.scored)
        return TrainFedMask(subnet, round_.local, train, masked, validation)

    def counted(state: RunState, _plan: Plan, result: RoundResult) -> RunState:
        weights, silos = state.weights(SUPERNET), sum(r.status == "ok" for r in result.client_results)
        if not silos:
            return state
        majority = {
            f"{MAJORITY}{name}": majority_of(weights[f"{BITS}{name}"], weights[f"{KEEPS}{name}"], silos)
            for name in masked
        }
        return state.with_group(SUPERNET, {**weights, **majority})

    task = ScoreOwn(subnet)
    return SiloTraining(
        *(world, train, rules),
        name=config.name,
        initial=from_generator(world, fresh, SUPERNET),
        tasks=to_all(task_of),
        after=counted,
        test=lambda _state: task,
    ).and_evaluation()


METHOD = Method(FedMaskConfig, stages, kind="silos", own="model", lacks=("candidates", "models"))
