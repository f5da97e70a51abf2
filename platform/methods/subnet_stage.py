"""FedAvg of one architecture per tier: fine-tuning from the supernet's weights, or from fresh ones (rand-init)."""

from fedloom.platform.clients.execution import Assignment
from fedloom.platform.clients.tasks import ScoreSubnet, TrainSubnet
from fedloom.platform.clients.training import LocalSGD, TrainingConfig, learning_rate
from fedloom.platform.federation.stage import Merged, Plan, RoundResult
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.world import SERVER, World
from fedloom.platform.methods.rows import evaluation_rows
from fedloom.platform.methods.search_stage import winner_of
from fedloom.platform.methods.supernet_stage import SUPERNET
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.base import Architecture, extract


def bag_name(tier: str, model: str) -> str:
    """The bag of a tier's model."""
    return f"{tier}-{model}"


class SubnetStage:
    """Trains a tier's winner on the clients of its tier and above (FedorAS, stage 3; baseline rand-init).

    `model` is "fine_tuned" or "rand_init". A tier without a winner is passed over.
    """

    def __init__(self, world: World, config: TrainingConfig, tier: int, model: str) -> None:
        self.world, self.config, self.tier, self.model = world, config, world.tiers[tier], model
        self.eligible = world.eligible_by_tier[tier]
        self.name = f"{model}/{self.tier.name}"
        self.bag = bag_name(self.tier.name, model)

    def begin(self, state: RunState) -> RunState:
        """The supernet's slices, or fresh weights."""
        architecture = winner_of(state, self.tier.name)
        if architecture is None:
            return state
        space = self.world.space
        if self.model == "rand_init":
            seed = self.world.config.seed_for("initialisation")
            generator = torch_stream(seed, "rand_init", self.tier.name)
            return state.with_bag(self.bag, space.initial_subnet_weights(architecture, generator))
        cut = extract(state.weights(SUPERNET), space.slices(architecture))
        return state.with_bag(self.bag, {name: tensor.clone() for name, tensor in cut.items()})

    def rounds_left(self, state: RunState) -> int:
        """Rounds still to come; none without a winner or without an eligible client."""
        possible = self.bag in state.bags and len(self.eligible) > 0
        return self.config.rounds - state.round if possible else 0

    def _architecture(self, state: RunState) -> Architecture:
        architecture = winner_of(state, self.tier.name)
        assert architecture is not None, "a stage without a winner has no rounds"
        return architecture

    def plan(self, state: RunState) -> Plan:
        """The whole subnet to every selected client."""
        world, round_, architecture = self.world, state.round, self._architecture(state)
        cohort = world.select(self.name, round_, self.eligible, self.config.clients_per_round)
        local = LocalSGD.of(self.config, round_, augment=world.config.data.augment != "none")
        task = TrainSubnet(architecture, local, self.config.weighting, stand_alone=True)
        assignments = [
            world.assign(self.name, round_, cohort, client_id, task)
            for client_id in world.in_plan_order(cohort.client_ids)
        ]
        if self.config.evaluate_every and round_ % self.config.evaluate_every == 0:
            score = ScoreSubnet(architecture, self.model, "validation", stand_alone=True)
            assignments.append(Assignment(self.name, round_, None, SERVER, score))
        return Plan(assignments, self.bag, {"lr": learning_rate(self.config, round_)})

    def merge(self, state: RunState, _plan: Plan, result: RoundResult) -> Merged:
        """Averages by the clients' samples."""
        weights = result.sums.finish(state.weights(self.bag), self.config.min_contributors)
        return Merged(state.with_bag(self.bag, weights), evaluation_rows(result.reports, self.tier.name))

    def end(self, state: RunState) -> Merged:
        """Nothing more to do."""
        return Merged(state)
