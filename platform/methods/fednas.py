"""FedNAS (He et al. 2020): architecture parameters are trained and averaged like weights.

during the search: every silo trains weights and architecture parameters (MiLeNAS), both are averaged
after the search:  every edge keeps the operator with the largest parameter, and FedAvg continues to train them

The authors' code derives cells as DARTS does, without `none` and with two edges into every node; here `none` may win,
and all edges are kept.
"""

from dataclasses import dataclass, field, replace

from torch import Tensor

from fedloom.platform.clients.assignments import Assignment, ClientResult, Task
from fedloom.platform.clients.networks import MixedNetwork
from fedloom.platform.clients.scoring import validation_scores
from fedloom.platform.clients.trainer import client_samples, train_network, trained_outcome, update_of, with_more
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.trees import rows_of
from fedloom.platform.federation.algorithm import (
    SUPERNET,
    Plan,
    Round,
    RoundResult,
    RoundTasks,
    RunState,
    fresh_supernet,
)
from fedloom.platform.federation.method import Method, Stage
from fedloom.platform.federation.training_config import Rules
from fedloom.platform.federation.world import World
from fedloom.platform.methods.silo_search import (
    ArchitectureSearchConfig,
    Milenas,
    chosen,
    first_alphas,
    remaining_of,
    restricted_to_remaining,
    searched_space,
    train_remaining,
)
from fedloom.platform.methods.silos import (
    ALPHAS,
    KEPT,
    Personal,
    ScoreShared,
    SiloTraining,
    SiloTrainingConfig,
    checked_silos,
    own_network,
    refuse_feddyn,
)
from fedloom.platform.spaces.capabilities import with_cells
from fedloom.platform.spaces.slices import Subspace, Weights, subspace_id


@dataclass
class FedNasConfig:
    """FedAvg of weights and architecture parameters, then FedAvg of the chosen architecture."""

    name: str = "fednas"
    train: SiloTrainingConfig = field(default_factory=SiloTrainingConfig)
    search: ArchitectureSearchConfig = field(default_factory=lambda: ArchitectureSearchConfig("milenas"))


@dataclass(frozen=True)
class TrainMixed:
    """One round of a silo: it trains weights and architecture parameters, and sends both."""

    subspace: Subspace
    local: LocalSGD
    search: Milenas
    rules: Rules
    scored: bool = False

    def run(self, worker: Worker, assignment: Assignment, weights: Weights) -> ClientResult:
        """The update holds the supernet and the architecture parameters."""
        alphas = weights[ALPHAS].clone().to(worker.device)
        silo = Personal(weights, {}, self.subspace, alphas)
        data = client_samples(worker, assignment)
        network = own_network(worker, silo)
        step = self.search.step(worker, assignment, silo)
        shared = train_network(worker, assignment, network, weights, data, self.local, step)
        scores = validation_scores(worker, assignment, network) if self.scored else ()
        update = with_more(update_of(shared, rows_of(data[1]), self.rules.weighting), {ALPHAS: alphas.detach()})
        outcome = trained_outcome(shared, rows_of(data[1]), update)
        return replace(outcome, macs=self.search.passes * outcome.macs, measurements=scores)


def stages(config: FedNasConfig, world: World) -> list[Stage]:
    """Search and FedAvg, then the evaluation of the shared model on every silo's test data."""
    train, search, rules = config.train, config.search, checked_silos(world, config.train)
    refuse_feddyn(train, config.name, "architecture parameters")
    space = searched_space(world, search, train.rounds, config.name, kind="milenas")
    milenas = Milenas(False, search.lr, search.validation_weight)
    fedavg = train_remaining(train, rules, space, search)
    fresh = fresh_supernet(world)

    def initial(state: RunState) -> dict[str, Tensor]:
        return {**(fresh(state) or {}), ALPHAS: first_alphas(space)}

    def give(round_: Round) -> RoundTasks:
        if ALPHAS not in round_.state.weights(SUPERNET):
            return fedavg(round_)
        task: Task = TrainMixed(remaining_of(round_.state), round_.local, milenas, rules, round_.scored)
        return RoundTasks([task] * len(round_.client_ids))

    def choose(state: RunState, _plan: Plan, _result: RoundResult) -> RunState:
        """Chooses the largest parameters after the last round of the search, or of the training if that is earlier."""
        alphas = state.weights(SUPERNET).get(ALPHAS)
        if alphas is None or state.round + 1 < min(search.rounds, train.rounds):
            return state
        architecture = chosen(space, alphas, remaining_of(state), search.max_macs)
        return restricted_to_remaining(state.with_data(KEPT, subspace_id(architecture)), space)

    def decided(state: RunState) -> bool:
        return ALPHAS not in state.weights(SUPERNET)

    training = SiloTraining(
        *(world, train, rules),
        name=config.name,
        initial=initial,
        tasks=give,
        after=choose,
        parameters=world.space.parameter_names | {ALPHAS},
        data={KEPT: subspace_id(space.largest_subspace)},
        test=lambda state: ScoreShared(MixedNetwork(remaining_of(state))),
        ready=decided,
        settled=decided,
    )
    return training.and_evaluation()


METHOD = Method(FedNasConfig, stages, kind="silos", lacks=("candidates", "models"), needs=with_cells)
