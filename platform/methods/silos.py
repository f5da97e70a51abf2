"""Common parts of cross-silo methods: the training configuration of silos, its checks, and adaptation.

A silo is a client of a cross-silo method, which may keep state between rounds. By default every silo takes part in
every round.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated

from fedloom.platform.averaging.average import Update
from fedloom.platform.clients.assignments import ClientResult
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.trainer import Train, TrainedNetwork, trained_outcome, update_of
from fedloom.platform.clients.training import LocalSGD, Samples
from fedloom.platform.federation.algorithm import SUPERNET, Initial, Round, TasksOfRound, from_generator, to_all
from fedloom.platform.federation.training_config import (
    EPOCHS,
    Rules,
    Schedule,
    TrainingConfig,
    augmentation_of,
    check_training,
    cohort_size,
    local_sgd,
    rules_of,
)
from fedloom.platform.federation.world import World
from fedloom.platform.methods.personal import Personal
from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.settings import BELOW_ONE, ONE_OR_MORE, PART, POSITIVE, ZERO_OR_MORE

logger = logging.getLogger(__name__)


@dataclass
class SiloTrainingConfig(TrainingConfig):
    """Training of silos (SPIDER, App. B.1)."""

    rounds: Annotated[int, ONE_OR_MORE, "number of rounds"] = 1000
    clients_per_round: Annotated[int | None, ONE_OR_MORE, "number of silos per round; null: all"] = None
    batch_size: Annotated[int, ONE_OR_MORE, "samples per step of a silo's SGD"] = 32
    lr: Annotated[float, POSITIVE, "learning rate of the silos' SGD"] = 0.03
    momentum: Annotated[float, BELOW_ONE, "momentum of the silos' SGD"] = 0.9
    clip_norm: Annotated[float, ZERO_OR_MORE, "limit of the gradient's norm, 0 for none"] = 5.0
    schedule: Annotated[Schedule, "lr over rounds"] = "cosine"
    final_lr_share: Annotated[float, PART, "cosine: the share of lr that is left in the last round"] = 0.0
    use_validation: Annotated[
        bool,
        "train also on validation data once no search needs it, as in the paper; it is not scored from then on",
    ] = True
    test_every: Annotated[
        int, ZERO_OR_MORE, "reads test data, for reports alone: rounds between two scores on them, 0 for none"
    ] = 0


def checked_silos(world: World, train: SiloTrainingConfig) -> Rules:
    """The stage's rules; ValueError for invalid settings, and a warning if there are tiers, which are not used."""
    if len(world.tiers) > 1:
        logger.warning(
            "tiers.count=%d: silos train whole networks whatever their tier may spend; set tiers.count=1",
            len(world.tiers),
        )
    if world.config.tiers.unsupported:
        raise ValueError(
            "tiers.unsupported: silos train every operator of their space; leave them out of space.operators"
        )
    check_training(train, "method.train", world.num_clients)
    return rules_of(train, "method.train")


def participation(world: World, train: SiloTrainingConfig) -> float:
    """The share of the rounds that a silo takes part in, on average."""
    return cohort_size(train, world.num_clients) / world.num_clients


def check_validation(world: World, why: str) -> None:
    """Raises ValueError if a silo has no validation samples; `why` is the purpose shown in the message."""
    if not world.data.sizes("validation").all():
        raise ValueError(
            f"data.validation_share={world.config.data.validation_share:g} leaves a silo without validation samples to "
            f"{why} with: raise it, or give each silo more samples"
        )


def fresh_subnet(world: World, subnet: Subnet) -> Initial:
    """Initial weights of one architecture, shared by all silos."""
    return from_generator(world, lambda g: world.space.initial_subnet_weights(subnet.architecture, g), SUPERNET)


@dataclass
class AdaptationConfig:
    """A silo's adaptation of the shared model: SGD over its own data."""

    epochs: Annotated[int, EPOCHS, "passes over the silo's data"] = 5
    lr: Annotated[float | None, POSITIVE, "learning rate; null: the initial rate of training"] = 0.01


def adaptation(world: World, config: AdaptationConfig, train: SiloTrainingConfig) -> LocalSGD:
    """Hyper-parameters of the adaptation."""
    lr = train.lr if config.lr is None else config.lr
    local = local_sgd(train, 0, augmentation_of(world, train), balanced=world.config.data.balanced_classes)
    return replace(local, epochs=config.epochs, lr=lr)


def pair_outcome(
    shared: TrainedNetwork, own: TrainedNetwork, data: Samples, weighting: ComponentSpec, silo: Personal
) -> ClientResult:
    """The outcome of training both models: loss and metric are the personal model's, the update the shared one's."""
    samples = len(data[1])
    outcome = trained_outcome(shared, samples, update_of(shared, samples, weighting))
    return replace(
        outcome,
        steps=shared.figures.steps + own.figures.steps,
        macs=shared.macs + own.macs,
        loss=own.figures.loss,
        metric=own.figures.accuracy,
        parameters=own.num_parameters,
        state={**silo.packed(), **shared.state},
        architecture=own.network.architecture,
        subspace=own.network.subspace,
    )


def only(update: Update, names: Collection[str]) -> Update:
    """The update with these of its tensors alone, for what a silo keeps to itself is neither sent nor counted."""
    sent = [name for name in update.tensors if name in names]
    return replace(
        update,
        tensors={name: update.tensors[name] for name in sent},
        slices={name: update.slices[name] for name in sent},
        weights={name: update.weights[name] for name in sent},
    )


def fedavg_of(subnet: Subnet, train: SiloTrainingConfig) -> TasksOfRound:
    """FedAvg of one architecture over the silos, with no personal part."""

    def client(round_: Round) -> Train:
        weighting, use_validation = round_.rules.weighting, train.use_validation
        return Train(subnet, round_.local, weighting, use_validation=use_validation, scored=round_.scored)

    return to_all(client)
