"""The final evaluation: the only stage that reads test data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedloom.platform.clients.execution import Assignment
from fedloom.platform.clients.tasks import ScoreSubnet, architecture_id
from fedloom.platform.federation.selection import Cohort
from fedloom.platform.federation.stage import KeptModel, Merged, Plan, RoundResult, Row
from fedloom.platform.federation.state import RunState
from fedloom.platform.federation.world import SERVER, World
from fedloom.platform.methods.rows import evaluation_rows
from fedloom.platform.methods.search_stage import winner_of
from fedloom.platform.methods.subnet_stage import bag_name
from fedloom.platform.methods.supernet_stage import SUPERNET
from fedloom.platform.spaces.base import Architecture, extract

FROM_SUPERNET = "supernet_init"
"""The model that is cut from the supernet as it is; the others have a bag of their own."""


@dataclass
class EvaluationConfig:
    """`clients_per_tier` limits the per-client evaluation; all of the tier's clients if not given."""

    clients_per_tier: int | None = None


@dataclass(frozen=True)
class EvaluationJob:
    """One model to be scored.

    Attributes:
        name: the tier or target that the model is for; empty if for none.
        model: what it is called in the tables.
        bag: where its tensors are: a supernet's, or its own if `stand_alone`.
        client_ids: whose own test data it is scored on, too.
        kept: the name under which it is stored; empty if it is not.
    """

    name: str
    model: str
    architecture: Architecture
    bag: str
    client_ids: Sequence[int] | np.ndarray
    stand_alone: bool
    kept: str = ""


class EvaluationStage:
    """Scores every model on the whole test set, and on the test share of its clients; one round per model.

    Fairness (FedorAS, Tab. 7) is read off the per-client rows.
    """

    name = "evaluation"

    def __init__(
        self, world: World, config: EvaluationConfig, jobs: Callable[[RunState], Sequence[EvaluationJob]]
    ) -> None:
        self.world, self.config, self.jobs = world, config, jobs

    def begin(self, state: RunState) -> RunState:
        """Nothing to prepare."""
        return state

    def rounds_left(self, state: RunState) -> int:
        """One round per model."""
        return len(self.jobs(state)) - state.round

    def plan(self, state: RunState) -> Plan:
        """The server scores validation and test data, each client its own test share."""
        job = self.jobs(state)[state.round]
        on_validation, on_test = (
            ScoreSubnet(job.architecture, job.model, split, job.stand_alone) for split in ("validation", "test")
        )
        central = [
            Assignment(self.name, state.round, None, SERVER, on_validation),
            Assignment(self.name, state.round, None, SERVER, on_test, reads_test=True),
        ]
        own = job.client_ids[: self.config.clients_per_tier]
        cohort = Cohort(tuple(int(c) for c in own), 1.0, "all of the tier")
        planned = [self.world.assign(self.name, state.round, cohort, c, on_test) for c in cohort.client_ids]
        # The final evaluation is a measurement, not a round of the simulated federation: nobody drops out of it.
        clients = [replace(a, dropped="", deadline_s=None, reads_test=True) for a in planned]
        return Plan([*central, *clients], job.bag)

    def merge(self, state: RunState, _plan: Plan, result: RoundResult) -> Merged:
        """The state stays; the measurements and the model are kept."""
        job = self.jobs(state)[state.round]
        rows = [*evaluation_rows(result.reports, job.name or None), *self._cost_rows(job)]
        return Merged(state, rows, [self._kept(state, job)] if job.kept else [])

    def _cost_rows(self, job: EvaluationJob) -> list[Row]:
        """What a model costs that is not kept, and so has no row in `models`."""
        if job.kept:
            return []
        costs = {"macs": self.world.macs_table, "parameters": self.world.space.cost_table("parameters")}
        place = {"model": job.model, "tier": job.name or SERVER, "architecture": architecture_id(job.architecture)}
        return [
            ("evaluations", {**place, "metric": measure, "value": table.cost(job.architecture)})
            for measure, table in costs.items()
        ]

    def _kept(self, state: RunState, job: EvaluationJob) -> KeptModel:
        weights, space = state.weights(job.bag), self.world.space
        return KeptModel(
            name=job.kept,
            tier=job.name,
            architecture=architecture_id(job.architecture),
            macs=self.world.macs_table.cost(job.architecture),
            parameters=int(space.cost_table("parameters").cost(job.architecture)),
            tensors=weights if job.stand_alone else extract(weights, space.slices(job.architecture)),
        )

    def end(self, state: RunState) -> Merged:
        """Nothing more to do."""
        return Merged(state)


def tier_jobs(world: World, state: RunState, models: Sequence[str]) -> list[EvaluationJob]:
    """For every tier with a winner its models: `supernet_init`, or those with a bag of their own."""
    jobs: list[EvaluationJob] = []
    for index, tier in enumerate(world.tiers):
        architecture = winner_of(state, tier.name)
        if architecture is None:
            continue
        own = np.flatnonzero(world.tier_of_client == index)
        for model in models:
            cut = model == FROM_SUPERNET
            bag = SUPERNET if cut else bag_name(tier.name, model)
            jobs.append(EvaluationJob(tier.name, model, architecture, bag, own, not cut, f"{tier.name}-{model}"))
    return jobs
