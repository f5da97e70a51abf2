"""FedPNAS (Hoang & Kingsford 2021), in SPIDER's setting: a shared base is averaged, the other cells are personal.

in every round a silo
    decides one edge of each cell of its personal part, if the round searches (by perturbation; the base keeps all
    operators),
    trains base and personal part as one network,
    sends the base, and keeps its personal part, its momentum and its architecture
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, cast

from torch import Tensor

from fedloom.platform.clients.assignments import Assignment, ClientResult, client_of
from fedloom.platform.clients.networks import Network
from fedloom.platform.clients.scoring import PERSONAL, validation_scores
from fedloom.platform.clients.trainer import client_samples, train_network, trained_outcome, update_of
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.trees import rows_of
from fedloom.platform.federation.algorithm import Round, RunState, fresh_supernet, to_all
from fedloom.platform.federation.method import Method, Stage
from fedloom.platform.federation.training_config import Rules
from fedloom.platform.federation.world import World
from fedloom.platform.methods.silo_search import (
    ArchitectureSearchConfig,
    Perturbation,
    all_decided,
    participation,
    perturbation_of,
    searched_space,
)
from fedloom.platform.methods.silos import (
    Personal,
    SiloTraining,
    SiloTrainingConfig,
    begun,
    checked_silos,
    only,
    resumed,
    tested_outcome,
    validation_use,
)
from fedloom.platform.settings import UP_TO_A_THOUSAND
from fedloom.platform.spaces.capabilities import HasCells, HasSubspaces, with_cells
from fedloom.platform.spaces.darts import CELL_TYPES
from fedloom.platform.spaces.slices import Subspace, Weights, subspace_id

logger = logging.getLogger(__name__)


@dataclass
class FedPnasConfig:
    """A shared base, and a personal part per silo."""

    name: str = "fedpnas"
    base_cells: Annotated[int | None, UP_TO_A_THOUSAND, "cells of the shared base; null: the first third"] = None
    train: SiloTrainingConfig = field(default_factory=SiloTrainingConfig)
    search: ArchitectureSearchConfig = field(default_factory=ArchitectureSearchConfig)


def split_network(worker: Worker, remaining: Subspace, base_cells: int) -> Network:
    """A network with all operators in the first `base_cells` cells, and the remaining ones in the others."""
    space, module = with_cells(worker.space, "fedpnas"), worker.supernet
    everything = space.subspace_slices(space.largest_subspace)
    slices = {**space.subspace_slices(remaining), **{name: everything[name] for name in space.base_tensors(base_cells)}}
    return Network(
        module,
        lambda x: cast(Tensor, module(x, remaining, None, base_cells)),
        slices,
        space.cost_of_cells("macs", remaining, base_cells),
        subspace=subspace_id(remaining),
        remaining=remaining,
    )


@dataclass(frozen=True)
class TrainSplit:
    """One round of a silo: it trains base and personal part as one network."""

    local: LocalSGD
    search: Perturbation
    base_cells: int
    rules: Rules
    scored: bool = False
    use_validation: bool = True

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """The update holds only the base; the personal part and the architecture stay in the silo's state."""
        space = with_cells(worker.space, "fedpnas")
        base = frozenset(space.base_tensors(self.base_cells))
        silo, searching_macs = own_part(space, assignment, weights, base), 0.0
        if self.search.is_due(space, silo.remaining):
            network = split_network(worker, silo.remaining, self.base_cells)
            validation_data = worker.scored_data(client_of(assignment), "validation")
            remaining, searching_macs = self.search.decided(
                worker, assignment, network, joined(weights, silo, base), validation_data, self.base_cells
            )
            silo = silo.restricted(space, remaining)
        searched = self.search.is_over(space, silo.remaining)
        validation = validation_use(trained=self.use_validation and searched, scored=self.scored)
        data = client_samples(worker, assignment, use_validation=validation == "trained")

        network, received = split_network(worker, silo.remaining, self.base_cells), joined(weights, silo, base)
        trained = train_network(worker, assignment, network, received, data, self.local.plain, resumed(silo.momentum))
        scores = validation_scores(worker, assignment, network, PERSONAL) if validation == "scored" else ()
        trained = trained.copied()
        after = Personal(without(trained.tensors, base), without(trained.momentum, base), silo.remaining)
        update = only(update_of(trained, rows_of(data[1]), self.rules.weighting), base)
        return replace(
            trained_outcome(trained, rows_of(data[1]), update),
            macs=trained.macs + searching_macs,
            forward_macs=searching_macs,
            measurements=scores,
            state=after.packed(),
        )


def own_part(space: HasSubspaces, assignment: Assignment, weights: Weights, base: frozenset[str]) -> Personal:
    """The silo's personal part; before its first round all operators, with the received weights."""
    return begun(assignment.state, without(weights, base), space.largest_subspace)


def without(tensors: Mapping[str, Tensor], names: frozenset[str]) -> dict[str, Tensor]:
    """The tensors whose names are not in `names`."""
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def joined(weights: Weights, silo: Personal, base: frozenset[str]) -> Weights:
    """The tensors of the received base and of the silo's personal part."""
    return {**silo.weights, **{name: weights[name] for name in base}}


@dataclass(frozen=True)
class ScoreSplit:
    """Scores the shared base with a silo's personal part on the silo's test data."""

    base_cells: int

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Measures the model `personal`."""
        space = with_cells(worker.space, "fedpnas")
        base = frozenset(space.base_tensors(self.base_cells))
        silo = own_part(space, assignment, weights, base)
        network = split_network(worker, silo.remaining, self.base_cells)
        return tested_outcome(worker, assignment, PERSONAL, network, joined(weights, silo, base))


def checked_base(config: FedPnasConfig, space: HasCells) -> int:
    """The number of base cells; ValueError without a base or own part, a warning if the own part lacks a cell type."""
    cells = space.num_cells
    base_cells = cells // 3 if config.base_cells is None else config.base_cells
    if not 1 <= base_cells < cells:
        raise ValueError(
            f"method.base_cells={base_cells}: must leave a base and an own part of the {cells} cells, 1 to {cells - 1}"
        )
    for cell_type in set(CELL_TYPES) - {space.cell_type(cell) for cell in range(base_cells, cells)}:
        logger.warning(
            "the silos' own part has no %s cell, so the search of its edges has no effect; choose a smaller "
            "method.base_cells or more space.cells",
            cell_type,
        )
    return base_cells


def stages(config: FedPnasConfig, world: World) -> list[Stage]:
    """Training with the search, then the evaluation of base and personal part on every silo's test data."""
    train, search, rules = config.train, config.search, checked_silos(world, config.train)
    if train.local_rule != "sgd":
        raise ValueError(
            f"method.train.local_rule={train.local_rule}: base and own part are trained as one network, with sgd only"
        )
    base_cells, share = checked_base(config, with_cells(world.space, config.name)), participation(world, train)
    space = searched_space(
        world, search, train.rounds, config.name, share=share, kind="perturbation", base_cells=base_cells
    )

    def client(round_: Round) -> TrainSplit:
        step = perturbation_of(search, round_.index, train.batch_size)
        return TrainSplit(round_.local, step, base_cells, rules, round_.scored, train.use_validation)

    def decided(state: RunState) -> bool:
        return all_decided(state, world, space, perturbation_of(search, state.round, train.batch_size))

    training = SiloTraining(
        *(world, train, rules),
        name=config.name,
        initial=fresh_supernet(world),
        tasks=to_all(client),
        settled=decided,
        test=lambda _state: ScoreSplit(base_cells),
    )
    return training.and_evaluation()


METHOD = Method(FedPnasConfig, stages, kind="silos", own="cells", lacks=("candidates", "models"), needs=with_cells)
