"""The final evaluation: the only stage that reads test data."""

from dataclasses import dataclass, replace

import numpy as np

from fedloom.platform.execution import Assignment
from fedloom.platform.methods.rows import evaluation_rows
from fedloom.platform.methods.search_stage import winner_of
from fedloom.platform.methods.subnet_stage import bag_name
from fedloom.platform.methods.supernet_stage import SUPERNET
from fedloom.platform.selection import Cohort
from fedloom.platform.spaces.base import extract
from fedloom.platform.stage import KeptModel, Merged, Plan, RoundResult
from fedloom.platform.state import RunState
from fedloom.platform.tasks import ScoreSubnet, architecture_id
from fedloom.platform.world import SERVER, World

FROM_SUPERNET = "supernet_init"
"""The model that is cut from the supernet as it is; the others have a bag of their own."""


@dataclass
class EvaluationConfig:
    """`clients_per_tier` limits the per-client evaluation; all of the tier's clients if not given."""

    clients_per_tier: int | None = None


class EvaluationStage:
    """Scores every tier's models on the whole test set, and on the test share of each of the tier's clients.

    One round per (tier, model); fairness (FedorAS, Tab. 7) is read off the per-client rows.
    """

    name = "evaluation"

    def __init__(self, world: World, config: EvaluationConfig, models: tuple[str, ...]) -> None:
        self.world, self.config, self.models = world, config, models

    def begin(self, state: RunState) -> RunState:
        """Nothing to prepare."""
        return state

    def _jobs(self, state: RunState) -> list[tuple[int, str]]:
        tiers = [i for i, tier in enumerate(self.world.tiers) if winner_of(state, tier.name) is not None]
        return [(tier, model) for tier in tiers for model in self.models]

    def rounds_left(self, state: RunState) -> int:
        """One round per tier and model."""
        return len(self._jobs(state)) - state.round

    def plan(self, state: RunState) -> Plan:
        """The server scores validation and test data, each client its own test share."""
        index, model = self._jobs(state)[state.round]
        tier = self.world.tiers[index]
        architecture = winner_of(state, tier.name)
        assert architecture is not None, "only tiers with a winner are evaluated"
        alone = model != FROM_SUPERNET
        on_validation, on_test = (ScoreSubnet(architecture, model, split, alone) for split in ("validation", "test"))
        central = [
            Assignment(self.name, state.round, None, SERVER, on_validation),
            Assignment(self.name, state.round, None, SERVER, on_test, reads_test=True),
        ]
        cohort = self._cohort(index)
        planned = [self.world.assign(self.name, state.round, cohort, c, on_test) for c in cohort.client_ids]
        # The final evaluation is a measurement, not a round of the simulated federation: nobody drops out of it.
        clients = [replace(a, dropped="", deadline_s=None, reads_test=True) for a in planned]
        bag = SUPERNET if model == FROM_SUPERNET else bag_name(tier.name, model)
        return Plan([*central, *clients], bag)

    def _cohort(self, index: int) -> Cohort:
        own = np.flatnonzero(self.world.tier_of_client == index)
        limit = self.config.clients_per_tier
        own = own if limit is None else own[:limit]
        return Cohort(tuple(int(c) for c in own), 1.0, "all of the tier")

    def merge(self, state: RunState, plan: Plan, result: RoundResult) -> Merged:
        """The state stays; the measurements and the model are kept."""
        index, model = self._jobs(state)[state.round]
        tier = self.world.tiers[index]
        kept = self._kept(state, plan.bag, tier.name, model)
        return Merged(state, evaluation_rows(result.reports, tier.name), [kept])

    def _kept(self, state: RunState, bag: str, tier: str, model: str) -> KeptModel:
        architecture = winner_of(state, tier)
        assert architecture is not None, "only tiers with a winner are evaluated"
        weights = state.weights(bag)
        return KeptModel(
            name=f"{tier}-{model}",
            tier=tier,
            architecture=architecture_id(architecture),
            macs=self.world.macs_table.cost(architecture),
            parameters=int(self.world.space.cost_table("parameters").cost(architecture)),
            tensors=extract(weights, self.world.space.slices(architecture)) if bag == SUPERNET else weights,
        )

    def end(self, state: RunState) -> Merged:
        """Nothing more to do."""
        return Merged(state)
