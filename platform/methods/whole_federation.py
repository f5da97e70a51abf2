"""Searches for one architecture shared by all silos: its remaining operators, and their training."""

from collections.abc import Callable

from fedloom.platform.clients.mixed import MixedNetwork
from fedloom.platform.clients.trainer import Train
from fedloom.platform.federation.algorithm import SUPERNET, Round, RunState, TasksOfRound, to_all
from fedloom.platform.federation.training_config import Rules
from fedloom.platform.methods.silos import SiloTrainingConfig
from fedloom.platform.spaces.capabilities import HasSubspaces
from fedloom.platform.spaces.slices import Subspace, parse_subspace

KEPT = "kept"
"""The JSON value that holds the remaining operators of the shared architecture."""


def kept_of(state: RunState) -> Subspace:
    """The remaining operators of the shared architecture."""
    return parse_subspace(state.data[KEPT])


def restricted_group(state: RunState, space: HasSubspaces) -> RunState:
    """The state without the weights of removed operators."""
    weights = state.weights(SUPERNET)
    return state.with_group(SUPERNET, {name: weights[name] for name in space.subspace_slices(kept_of(state))})


def train_kept(train: SiloTrainingConfig, rules: Rules, settled: Callable[[Subspace], bool]) -> TasksOfRound:
    """FedAvg of the remaining operators, which trains also on validation data once the search has ended."""

    def client(round_: Round) -> Train:
        kept = kept_of(round_.state)
        use_validation = train.use_validation and settled(kept)
        network = MixedNetwork(kept)
        return Train(network, round_.local, rules.weighting, use_validation=use_validation, scored=round_.scored)

    return to_all(client)
