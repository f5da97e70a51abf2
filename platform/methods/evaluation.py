"""The final evaluation: the only stages that read test data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import numpy as np

from fedloom.platform.clients.assignments import SERVER, Assignment, Task, evaluations_of
from fedloom.platform.clients.scoring import ScoreSubnet
from fedloom.platform.federation.algorithm import SUPERNET, KeptModel, Plan, RoundResult, RoundUpdate, Row
from fedloom.platform.federation.method import Stage
from fedloom.platform.federation.selection import Cohort, for_client, for_server
from fedloom.platform.settings import ZERO_OR_MORE
from fedloom.platform.spaces.slices import Architecture, Weights, architecture_id, extract

if TYPE_CHECKING:
    from fedloom.platform.clients.networks import Subnet
    from fedloom.platform.federation.algorithm import RunState
    from fedloom.platform.federation.world import World


@dataclass
class EvaluationConfig:
    """The clients on whose test data models are scored, in addition to the whole test set."""

    clients_per_tier: Annotated[
        int | None, ZERO_OR_MORE, "number of clients per tier (or in total) whose test data is used; null: all"
    ] = None


@dataclass(frozen=True)
class EvaluationJob:
    """One model to be scored.

    Attributes:
        name: the tier or target that the model is for; empty if there is none.
        model: its name in the tables.
        subnet: its architecture, and whether its tensors are its own or slices of a supernet.
        group: the tensor group that holds its tensors.
        client_ids: the clients on whose test data it is also scored.
        kept: the name under which it is stored; empty if it is not stored.
    """

    name: str
    model: str
    subnet: Subnet
    group: str
    client_ids: Sequence[int] | np.ndarray
    kept: str = ""


def everybody(world: World) -> Sequence[int]:
    """The ids of all clients, as a range."""
    return range(world.num_clients)


def clients_of_tier(world: World, tier: int) -> np.ndarray:
    """The ids of the clients of a tier, counted from 0."""
    return np.flatnonzero(world.tier_of_client == tier)


def group_name(tier: str, model: str) -> str:
    """The tensor group of a tier's model, and the name under which it is stored."""
    return f"{tier}-{model}"


def tier_job(world: World, tier: int, model: str, subnet: Subnet, group: str) -> EvaluationJob:
    """The evaluation of a tier's model, on the clients of the tier, counted from 0."""
    name = world.tiers[tier].name
    return EvaluationJob(name, model, subnet, group, clients_of_tier(world, tier), group_name(name, model))


def as_measured(planned: Sequence[Assignment]) -> list[Assignment]:
    """The assignments of a final evaluation, which read test data.

    They are measurements, not a round of the simulated federation, so they have no dropout and no deadline.
    """
    return [replace(a, dropped="", deadline_s=None, reads_test=True) for a in planned]


class EvaluationStage(Stage):
    """Scores every model on the whole test set and on its clients' test data, with one round per model.

    The per-client rows show the fairness (FedorAS, Tab. 7).
    """

    name = "evaluation"

    def __init__(
        self,
        world: World,
        config: EvaluationConfig,
        jobs: Callable[[RunState], Sequence[EvaluationJob]],
        models: int = 1,
        prepare: Callable[[RunState], RunState] = lambda state: state,
    ) -> None:
        """`models` is the expected number of jobs, to estimate the time left; the jobs may depend on a search.

        `prepare` changes the state before the first job.
        """
        self.world, self.config, self.jobs, self.models, self.prepare = world, config, jobs, models, prepare

    def begin(self, state: RunState) -> RunState:
        """The prepared state."""
        return self.prepare(state)

    def rounds_left(self, state: RunState) -> int:
        """One round per model."""
        return len(self.jobs(state)) - state.round

    def macs_left(self, state: RunState) -> float:
        """The MACs of scoring the remaining models."""
        return self.world.evaluation_macs(max(0, self.models - state.round))

    def plan(self, state: RunState) -> Plan:
        """The server scores the model on validation and test data, each client on its own test data."""
        job = self.jobs(state)[state.round]
        on_validation, on_test = (ScoreSubnet(job.subnet, job.model, split) for split in ("validation", "test"))
        central = [
            for_server(self.name, state.round, on_validation),
            for_server(self.name, state.round, replace(on_test, details=True), reads_test=True),
        ]
        chosen = job.client_ids[: self.config.clients_per_tier]
        cohort = Cohort(tuple(int(c) for c in chosen), 1.0, "all of the tier")
        clients = [for_client(self.world, self.name, state.round, cohort, c, on_test) for c in cohort.client_ids]
        return Plan([*central, *as_measured(clients)], job.group)

    def merge(self, state: RunState, _plan: Plan, result: RoundResult) -> RoundUpdate:
        """Returns the measurements and the model; the state does not change."""
        job, world, space = self.jobs(state)[state.round], self.world, self.world.space
        architecture = job.subnet.architecture
        evaluations = evaluations_of(result.client_results, job.name or None)
        if job.kept:
            weights = state.weights(job.group)
            tensors = weights if job.subnet.stand_alone else extract(weights, space.slices(architecture))
            model = kept_model(world, job.kept, architecture, tier=job.name, tensors=tensors)
            return RoundUpdate(state, models=[model], evaluations=evaluations)
        # A model that is not stored has no row in the table `models`, so its costs are recorded here.
        of_model = {"model": job.model, "tier": job.name or SERVER, "architecture": architecture_id(architecture)}
        rows: list[Row] = []
        for measure, table in (("macs", world.macs_table), ("parameters", space.cost_table("parameters"))):
            rows.append(("evaluations", {**of_model, "metric": measure, "value": table.cost(architecture)}))
        return RoundUpdate(state, rows, evaluations=evaluations)


def kept_model(world: World, name: str, architecture: Architecture, *, tensors: Weights, tier: str = "") -> KeptModel:
    """A model to be stored, with its architecture's costs."""
    return KeptModel(
        name=name,
        tier=tier,
        architecture=architecture_id(architecture),
        macs=world.macs_table.cost(architecture),
        parameters=int(world.space.cost_table("parameters").cost(architecture)),
        tensors=tensors,
    )


class OneRound(Stage):
    """A stage of one round, in which models are scored."""

    world: World

    def rounds_left(self, state: RunState) -> int:
        """One round in total."""
        return 1 - state.round

    def macs_left(self, state: RunState) -> float:
        """The MACs of scoring one model on all data."""
        return self.world.evaluation_macs(1 - state.round)


class ClientEvaluation(OneRound):
    """One round in which every client runs the same task on its own test data."""

    name = "evaluation"

    def __init__(self, world: World, task: Callable[[RunState], Task], group: str = SUPERNET) -> None:
        """`group` is the tensor group with the weights that clients receive."""
        self.world, self.task, self.group = world, task, group

    def plan(self, state: RunState) -> Plan:
        """The task for all clients, in plan order."""
        return Plan(as_measured(self.planned(state.round, self.task(state))), self.group)

    def planned(self, round_: int, task: Task) -> list[Assignment]:
        """The assignments of the task to all clients, in plan order."""
        cohort = Cohort(tuple(everybody(self.world)), 1.0, "all")
        ordered = self.world.in_plan_order(cohort.client_ids)
        return [for_client(self.world, self.name, round_, cohort, c, task) for c in ordered]

    def merge(self, state: RunState, _plan: Plan, result: RoundResult) -> RoundUpdate:
        """Returns the clients' measurements; networks trained only to be scored are not stored."""
        return RoundUpdate(state, evaluations=evaluations_of(result.client_results))
