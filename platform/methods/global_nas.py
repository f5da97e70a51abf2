"""Global search by perturbation (SPIDER, App. D.1): one architecture for all, decided on the server's validation data.

in every round: all silos train the remaining operators of the supernet (FedAvg);
                in rounds that search, the server decides one edge of each cell with the weights from before the
                round; the decision takes effect in the next round
"""

from dataclasses import dataclass, field

from fedloom.platform.clients.assignments import Assignment, ClientResult, Task
from fedloom.platform.clients.networks import MixedNetwork
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import Plan, RoundResult, RunState, fresh_supernet
from fedloom.platform.federation.method import Method, Stage
from fedloom.platform.federation.world import World
from fedloom.platform.methods.silo_search import (
    ArchitectureSearchConfig,
    Perturbation,
    is_settled,
    perturbation_of,
    remaining_of,
    restricted_to_remaining,
    searched_space,
    train_remaining,
)
from fedloom.platform.methods.silos import KEPT, ScoreShared, SiloTraining, SiloTrainingConfig, checked_silos
from fedloom.platform.spaces.capabilities import with_cells
from fedloom.platform.spaces.slices import Subspace, Weights, subspace_id
from fedloom.tiers.devices import EVALUATION_FACTOR


@dataclass
class GlobalNasConfig:
    """FedAvg of a supernet that the server searches, then FedAvg of the architecture found."""

    name: str = "global_nas"
    train: SiloTrainingConfig = field(default_factory=SiloTrainingConfig)
    search: ArchitectureSearchConfig = field(default_factory=ArchitectureSearchConfig)


@dataclass(frozen=True)
class DecideCentrally:
    """The server's search step, on all validation data with the current weights."""

    subspace: Subspace
    search: Perturbation

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """Makes the search step; the outcome's `subspace` holds the remaining operators."""
        data = worker.central_data("validation")
        network = MixedNetwork(self.subspace).on(worker)
        remaining, macs = self.search.decided(worker, assignment, network, weights, data)
        return ClientResult(
            samples=len(data), macs=macs, subspace=subspace_id(remaining), clock_factor=EVALUATION_FACTOR
        )


def stages(config: GlobalNasConfig, world: World) -> list[Stage]:
    """Search and FedAvg, then the evaluation of the shared model on every silo's test data."""
    train, search, rules = config.train, config.search, checked_silos(world, config.train)
    # A decision takes effect in the next round.
    space = searched_space(world, search, train.rounds - 1, config.name, kind="perturbation")

    def decide(state: RunState) -> list[Task]:
        remaining, step = remaining_of(state), perturbation_of(search, state.round, train.batch_size)
        last = state.round == train.rounds - 1  # a decision in the last round would never be trained
        return [] if last or not step.is_due(space, remaining) else [DecideCentrally(remaining, step)]

    def take_over(state: RunState, _plan: Plan, result: RoundResult) -> RunState:
        decided = [r.subspace for r in result.client_results if r.client_id is None and r.subspace is not None]
        return restricted_to_remaining(state.with_data(KEPT, decided[0]), space) if decided else state

    def decided(state: RunState) -> bool:
        return is_settled(space, remaining_of(state), prune_edges=search.prune_edges)

    training = SiloTraining(
        *(world, train, rules),
        name=config.name,
        initial=fresh_supernet(world),
        tasks=train_remaining(train, rules, space, search),
        beside=decide,
        after=take_over,
        data={KEPT: subspace_id(space.largest_subspace)},
        settled=decided,
        test=lambda state: ScoreShared(MixedNetwork(remaining_of(state))),
        sends_change=True,
        countable=False,  # it depends on what the server has decided
    )
    return training.and_evaluation()


METHOD = Method(GlobalNasConfig, stages, kind="silos", lacks=("candidates", "models"), needs=with_cells)
