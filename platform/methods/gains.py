"""Personalisation gains (SPIDER, Eq. 6, Fig. 3): every silo's architecture, trained on every silo's data."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from annotated_types import Interval

from fedloom.platform.federation.algorithm import SUPERNET, Plan, RunState
from fedloom.platform.federation.training_config import augmentation_of, local_sgd
from fedloom.platform.federation.world import World, expected_macs
from fedloom.platform.methods.crossed import (
    BY_VALIDATION,
    ScoreModel,
    TrainAndScore,
)
from fedloom.platform.methods.evaluation import ClientEvaluation, as_measured
from fedloom.platform.methods.personal import begun
from fedloom.platform.methods.searchers import by_magnitude
from fedloom.platform.methods.silos import SiloTrainingConfig, check_validation
from fedloom.platform.settings import POSITIVE
from fedloom.platform.spaces.capabilities import HasSubspaces
from fedloom.tiers.devices import TRAINING_FACTOR


@dataclass
class GainConfig:
    """How personalisation gains are measured.

    With `start=shared`, all silos (also for p_ii) start from the shared weights of the architecture's operators, so
    that only architectures are compared. With `own`, they start from the trained model of the silo that found the
    architecture; the paper fine-tunes it on the other silos' data alone, so that p_ii is the final model itself
    (`tune_own=false`). Models train on training and validation data, on training data alone if validation data choose
    the epoch. `epoch=test` adds the paper's "best accuracy achieved" as `best_test_accuracy`: the test data that it is
    measured on have chosen its epoch, so that it is too high, and it is chosen among many for p_ij, but not for p_ii.
    """

    epochs: Annotated[int, Interval(ge=0, le=100_000), "epochs of training; 0: do not measure gains"] = 0
    clients: Annotated[int | None, Interval(ge=2), "number of silos, the first ones; null: all"] = None
    lr: Annotated[float, POSITIVE, "learning rate"] = 0.01
    start: Annotated[Literal["shared", "own"], "the initial weights"] = "shared"
    tune_own: Annotated[bool, "whether p_ii is trained like the others; false: the silo's final model as it is"] = True
    epoch: Annotated[
        Literal["last", "validation", "test"], "the epoch reported: the last, or the best on these data"
    ] = "last"


def check_gains(config: GainConfig, world: World) -> None:
    """Raises ValueError for more silos than there are, and for settings that do not go together."""
    if config.clients is not None and config.clients > world.num_clients:
        raise ValueError(
            f"method.gains.clients={config.clients}: must be between 2 and the {world.num_clients} silos there are"
        )
    if not config.tune_own and config.start == "shared":
        raise ValueError(
            "method.gains.tune_own=false compares with the silos' final models, which the others have to start from: "
            "set method.gains.start=own"
        )
    if config.epochs and config.epoch == BY_VALIDATION:
        check_validation(world, "choose the epoch of the gains")


class GainStage(ClientEvaluation):
    """One round per silo, in which all silos train and score its architecture."""

    name = "gains"

    def __init__(self, world: World, config: GainConfig, train: SiloTrainingConfig, space: HasSubspaces) -> None:
        self.world, self.config, self.space = world, config, space
        self.silos = range(world.num_clients if config.clients is None else config.clients)
        local = local_sgd(train, 0, augmentation_of(world, train), balanced=world.config.data.balanced_classes)
        self.local = replace(local, lr=config.lr, epochs=config.epochs)

    @property
    def trains(self) -> bool:
        return True

    def rounds_left(self, state: RunState) -> int:
        """One round per silo's architecture."""
        return len(self.silos) - state.round

    def macs_left(self, state: RunState) -> float:
        """Those of training every remaining architecture on every silo's data, its own silo's only with `tune_own`."""
        data, silos = self.world.data, list(self.silos)
        samples = data.sizes("train") + (0 if self.config.epoch == BY_VALIDATION else data.sizes("validation"))
        remaining = silos[state.round :]
        times = len(remaining) - (not self.config.tune_own) * np.isin(silos, remaining)
        return float(times @ samples[silos]) * self.config.epochs * TRAINING_FACTOR * expected_macs(self.world)

    def plan(self, state: RunState) -> Plan:
        """Trains the architecture of silo `state.round` on the data of every silo."""
        of = state.round
        silo = begun(state.client_state(of), state.weights(SUPERNET), self.space.largest_subspace)
        kept = silo.kept if silo.alphas is None else by_magnitude(silo.alphas, silo.kept)
        name = f"silo-{of}"
        task = TrainAndScore(kept, name, self.local, self.config.epoch)
        planned = [a for a in self.planned(of, task) if a.client_id in self.silos]
        # Set explicitly, so that the loop does not insert the silos' saved states.
        begin = silo.packed() if self.config.start == "own" else {}
        given = [replace(a, state=begin) for a in as_measured(planned)]
        if not self.config.tune_own:
            given = [replace(a, task=ScoreModel(kept, name)) if a.client_id == of else a for a in given]
        return Plan(given, SUPERNET)
