"""Searches for one architecture that all silos share: what is kept of it, and its training."""

from collections.abc import Callable

from fedloom.platform.clients.mixed import Kept
from fedloom.platform.clients.trainer import Train
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.training import SUPERNET, Assign, Round, to_all
from fedloom.platform.federation.training_config import Rules
from fedloom.platform.methods.silo.silos import SiloTrainingConfig
from fedloom.platform.spaces.offers import HasSubspaces
from fedloom.platform.spaces.slices import Subspace, parse_subspace

KEPT = "kept"
"""The JSON value that holds what is kept of the one architecture for all."""


def kept_of(state: RunState) -> Subspace:
    """What is kept of the one architecture for all."""
    return parse_subspace(state.data[KEPT])


def restricted_bag(state: RunState, space: HasSubspaces) -> RunState:
    """The state without the weights of what is not kept."""
    weights = state.weights(SUPERNET)
    return state.with_bag(SUPERNET, {name: weights[name] for name in space.subspace_slices(kept_of(state))})


def train_kept(train: SiloTrainingConfig, rules: Rules, settled: Callable[[Subspace], bool]) -> Assign:
    """FedAvg of what is kept; validation data joins when nothing is left to be searched."""

    def client(round_: Round) -> Train:
        kept = kept_of(round_.state)
        joined = train.use_validation and settled(kept)
        network = Kept(kept)
        return Train(network, round_.local, rules.weighting, rule=rules.local, joined=joined, scored=round_.scored)

    return to_all(client)
