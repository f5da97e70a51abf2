"""Stage 1 of FedorAS: the supernet is trained by clients that each hold a random part of it."""

from dataclasses import dataclass, field

from fedloom.platform.clients.execution import Assignment
from fedloom.platform.clients.paths import path_sampler
from fedloom.platform.clients.subspace import CommunicationBudget, sample_subspace
from fedloom.platform.clients.tasks import ScorePaths, TrainPaths
from fedloom.platform.clients.training import LocalSGD, TrainingConfig, learning_rate
from fedloom.platform.federation.stage import Merged, Plan, RoundResult
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.world import SERVER, World
from fedloom.platform.methods.rows import evaluation_rows
from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.spaces.operator_choice import OperatorChoiceSpace

SUPERNET = "supernet"
"""The bag that holds the supernet's tensors."""


@dataclass
class CommunicationConfig:
    """What a client may receive: a `fraction` of the supernet's parameters, a number of `parameters`, or `bytes`."""

    unit: str = "fraction"
    value: float = 0.5


@dataclass
class SupernetConfig(TrainingConfig):
    """Stage 1 (FedorAS, Tab. 9).

    `evaluate_paths` random paths are scored on validation data every `evaluate_every` rounds.
    """

    rounds: int = 500
    epochs: int = 50
    batch_size: int = 128
    min_contributors: int = 2
    weighting: str = "opa"
    paths: str = "greedy"
    evaluate_paths: int = 8
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)


class SupernetStage:
    """Sends each client its own subspace and averages operators by the samples that went through them."""

    name = "supernet"
    accountable = True

    def __init__(self, world: World, config: SupernetConfig) -> None:
        if not isinstance(world.space, OperatorChoiceSpace):
            raise ValueError(f"{world.config.space.name} is not an operator-choice space: FedorAS needs one")
        self.world, self.config, self.space = world, config, world.space
        budget = CommunicationBudget(config.communication.unit, config.communication.value)
        self.sizes, self.limit = budget.resolve(self.space)
        for tier in world.tiers:
            if tier.upper < world.cost_table.smallest:
                raise ValueError(
                    f"{tier.name} may spend {tier.upper:.6g} {world.cost_table.measure}, the smallest path costs "
                    f"{world.cost_table.smallest:.6g}: raise its upper bound"
                )
            # Refuses here, before anything is written, what no client of the tier could ever do.
            kept = sample_subspace(self.sizes, self.limit, stream(0, "check"), world.cost_table, tier.upper)
            path_sampler(config.paths, world.cost_table, kept, tier.upper)

    def begin(self, state: RunState) -> RunState:
        """Fresh supernet weights."""
        generator = torch_stream(self.world.config.seed_for("initialisation"), "supernet")
        return state.with_bag(SUPERNET, self.space.initial_weights(generator))

    def rounds_left(self, state: RunState) -> int:
        """Rounds still to come."""
        return self.config.rounds - state.round

    def plan(self, state: RunState) -> Plan:
        """Each selected client gets a subspace of its own, and its tier's budget."""
        world, round_ = self.world, state.round
        cohort = world.select(self.name, round_, world.eligible_by_tier[0], self.config.clients_per_round)
        local = LocalSGD.of(self.config, round_, augment=world.config.data.augment != "none")
        assignments = [
            world.assign(self.name, round_, cohort, client_id, self._task(client_id, round_, local))
            for client_id in world.in_plan_order(cohort.client_ids)
        ]
        if self.config.evaluate_every and round_ % self.config.evaluate_every == 0:
            assignments.append(self._score(state))
        return Plan(assignments, SUPERNET, {"lr": learning_rate(self.config, round_)})

    def _task(self, client_id: int, round_: int, local: LocalSGD) -> TrainPaths:
        world = self.world
        rng = stream(world.config.seed_for("training"), "subspace", self.name, round_, client_id)
        budget = world.training_budget(client_id, self.name, round_)
        kept = sample_subspace(self.sizes, self.limit, rng, world.cost_table, budget)
        return TrainPaths(kept, budget, local, self.config.paths, self.config.weighting)

    def _score(self, state: RunState) -> Assignment:
        rng = stream(self.world.config.seed_for("search"), "evaluate_paths")
        paths = tuple(self.space.sample(rng) for _ in range(self.config.evaluate_paths))
        task = ScorePaths(paths, state.version(SUPERNET))
        return Assignment(self.name, state.round, None, SERVER, task)

    def merge(self, state: RunState, _plan: Plan, result: RoundResult) -> Merged:
        """Averages; operators with too few contributors keep their weights."""
        weights = result.sums.finish(state.weights(SUPERNET), self.config.min_contributors)
        return Merged(state.with_bag(SUPERNET, weights), evaluation_rows(result.reports))

    def end(self, state: RunState) -> Merged:
        """Nothing more to do."""
        return Merged(state)
