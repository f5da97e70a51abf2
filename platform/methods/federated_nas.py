"""Federated architecture search as SPIDER compares itself to: one architecture for all, or a shared base.

`global_nas` searches by perturbation on the server's validation data (SPIDER, App. D.1), `fednas` by gradients that
are averaged with the weights (He et al. 2020), `fedpnas` shares a base and lets every silo search the rest (Hoang &
Kingsford 2021).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedloom.platform.clients.execution import Task
from fedloom.platform.clients.tasks import parse_subspace, subspace_id
from fedloom.platform.federation.stage import RoundResult, Stage
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.world import World
from fedloom.platform.methods.silo_stage import SiloEvaluation, SiloStage, SiloTrainingConfig, check_silos
from fedloom.platform.methods.spider import check_search
from fedloom.platform.methods.supernet_stage import SUPERNET
from fedloom.platform.silos.fedavg import TrainShared
from fedloom.platform.silos.federated_nas import DecideCentrally, TrainMixed
from fedloom.platform.silos.fedpnas import ScoreSplit, TrainSplit
from fedloom.platform.silos.perturbation import is_settled
from fedloom.platform.silos.scoring import ScoreShared
from fedloom.platform.silos.search import (
    ArchitectureSearchConfig,
    Milenas,
    Perturbation,
    by_magnitude,
    first_alphas,
    searcher_of,
)
from fedloom.platform.silos.state import ALPHAS
from fedloom.platform.spaces.base import Weights
from fedloom.platform.spaces.darts import DartsSpace
from fedloom.platform.spaces.darts_network import CELL_TYPES
from fedloom.platform.spaces.operator_choice import Subspace

logger = logging.getLogger(__name__)

KEPT = "kept"
"""The JSON value that holds what is kept of the one architecture for all."""


@dataclass
class GlobalNasConfig:
    """FedAvg of a supernet that the server searches by perturbation; what it finds is trained on by FedAvg."""

    name: str = "global_nas"
    train: SiloTrainingConfig = field(default_factory=SiloTrainingConfig)
    search: ArchitectureSearchConfig = field(default_factory=ArchitectureSearchConfig)


@dataclass
class FedNasConfig:
    """FedAvg of weights and architecture parameters; then the largest of every edge are trained on by FedAvg."""

    name: str = "fednas"
    train: SiloTrainingConfig = field(default_factory=SiloTrainingConfig)
    search: ArchitectureSearchConfig = field(default_factory=lambda: ArchitectureSearchConfig("milenas"))


@dataclass
class FedPnasConfig:
    """A shared base of `base_cells` cells (the first third if not given), and every silo's own rest."""

    name: str = "fedpnas"
    base_cells: int | None = None
    train: SiloTrainingConfig = field(default_factory=SiloTrainingConfig)
    search: ArchitectureSearchConfig = field(default_factory=ArchitectureSearchConfig)


class _OneArchitecture(SiloStage):
    """All silos train what is kept of the supernet."""

    def __init__(self, world: World, config: GlobalNasConfig | FedNasConfig, space: DartsSpace) -> None:
        super().__init__(world, config.train, config.name, space.initial_weights)
        self.search, self.space = config.search, space

    def begin(self, state: RunState) -> RunState:
        """Everything is kept."""
        return super().begin(state).with_data(KEPT, subspace_id(self.space.largest_subspace))

    def task(self, state: RunState) -> Task:
        """FedAvg of what is kept; validation data joins when nothing is left to be searched."""
        kept, config = kept_of(state), self.config
        joined = config.use_validation and is_settled(self.space, kept, prune_edges=self.search.prune_edges)
        return TrainShared(kept, self.local(state.round), joined, self.is_scored(state.round), config.weighting)


def kept_of(state: RunState) -> Subspace:
    """What is kept of the one architecture for all."""
    return parse_subspace(state.data[KEPT])


class GlobalNasStage(_OneArchitecture):
    """The server decides with the weights that a round began with; from the next round on its decision holds."""

    def server_tasks(self, state: RunState) -> Sequence[Task]:
        """One step of the search, in the rounds that search."""
        kept, searcher = kept_of(state), searcher_of(self.search, state.round)
        if self.rounds_left(state) == 1:
            return ()  # what is found now would never be trained
        if not isinstance(searcher, Perturbation) or not searcher.due or searcher.is_over(self.space, kept):
            return ()
        return (DecideCentrally(kept, searcher.prune_edges),)

    def after(self, state: RunState, result: RoundResult) -> RunState:
        """Takes over what the server decided."""
        decided = [r.subspace for r in result.reports if r.client_id is None and r.subspace is not None]
        if not decided:
            return state
        return restricted(state.with_data(KEPT, decided[0]), self.space)


class FedNasStage(_OneArchitecture):
    """Architecture parameters are averaged like weights; after the last round of the search the largest stay."""

    def begin(self, state: RunState) -> RunState:
        """Equal architecture parameters beside fresh weights."""
        begun = super().begin(state)
        return begun.with_bag(SUPERNET, {**begun.weights(SUPERNET), ALPHAS: first_alphas(self.space)})

    def task(self, state: RunState) -> Task:
        """MiLeNAS while the search goes on, then FedAvg."""
        if ALPHAS not in state.weights(SUPERNET):
            return super().task(state)
        search = Milenas(False, self.search.lr, self.search.validation_weight)
        scored = self.is_scored(state.round)
        return TrainMixed(kept_of(state), self.local(state.round), search, scored, self.config.weighting)

    def after(self, state: RunState, _result: RoundResult) -> RunState:
        """The largest are chosen after the last round of the search, or of the training if that is earlier."""
        alphas = state.weights(SUPERNET).get(ALPHAS)
        if alphas is None or state.round + 1 < min(self.search.rounds, self.config.rounds):
            return state
        return restricted(state.with_data(KEPT, subspace_id(by_magnitude(alphas, kept_of(state)))), self.space)


def restricted(state: RunState, space: DartsSpace) -> RunState:
    """The state without the weights of what is not kept."""
    weights: Weights = state.weights(SUPERNET)
    return state.with_bag(SUPERNET, {name: weights[name] for name in space.subspace_slices(kept_of(state))})


class FedPnasStage(SiloStage):
    """Averages the shared base; every silo's own part is in its state."""

    def __init__(self, world: World, config: FedPnasConfig, space: DartsSpace, base_cells: int) -> None:
        super().__init__(world, config.train, config.name, space.initial_weights)
        self.search, self.base_cells = config.search, base_cells

    def task(self, state: RunState) -> Task:
        """The same for every silo."""
        config, searcher = self.config, searcher_of(self.search, state.round)
        assert isinstance(searcher, Perturbation), "checked before"
        return TrainSplit(
            self.local(state.round),
            searcher,
            self.base_cells,
            self.is_scored(state.round),
            config.use_validation,
            config.weighting,
        )


def _warn_of_idle_cells(space: DartsSpace, base_cells: int) -> None:
    own = {CELL_TYPES[plan.reduction] for plan in space.plans[base_cells:]}
    for cell_type in set(CELL_TYPES) - own:
        logger.warning(
            "the silos' own part has no %s cell: what is searched of its edges means nothing; choose a smaller "
            "method.base_cells or more space.cells",
            cell_type,
        )


def _only(kind: str, search: ArchitectureSearchConfig, name: str) -> None:
    if search.kind != kind:
        raise ValueError(f"method.search.kind={search.kind!r}: {name} searches by {kind}")


def global_nas(config: GlobalNasConfig, world: World) -> list[Stage]:
    """Search and FedAvg, then the shared model on every silo's test data."""
    check_silos(world, config.train)
    _only("perturbation", config.search, config.name)
    # A decision holds from the round after it.
    space = check_search(world, config.search, config.train.rounds - 1)
    return [GlobalNasStage(world, config, space), SiloEvaluation(world, lambda state: ScoreShared(kept_of(state)))]


def fednas(config: FedNasConfig, world: World) -> list[Stage]:
    """Search and FedAvg, then the shared model on every silo's test data."""
    check_silos(world, config.train)
    _only("milenas", config.search, config.name)
    space = check_search(world, config.search, config.train.rounds)
    return [FedNasStage(world, config, space), SiloEvaluation(world, lambda state: ScoreShared(kept_of(state)))]


def fedpnas(config: FedPnasConfig, world: World) -> list[Stage]:
    """Training with the search in it, then base and own part on every silo's test data."""
    check_silos(world, config.train)
    _only("perturbation", config.search, config.name)
    space = check_search(world, config.search, config.train.rounds)
    cells = space.design.cells
    base_cells = cells // 3 if config.base_cells is None else config.base_cells
    if not 1 <= base_cells < cells:
        raise ValueError(
            f"method.base_cells={base_cells}: must leave a base and an own part of the {cells} cells, 1 to {cells - 1}"
        )
    _warn_of_idle_cells(space, base_cells)
    stage = FedPnasStage(world, config, space, base_cells)
    return [stage, SiloEvaluation(world, lambda _: ScoreSplit(base_cells))]
