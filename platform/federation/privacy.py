"""Differential privacy of a training stage: its configuration, what it refuses, and the epsilon after every round."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedloom.platform.averaging.average import WeightedSums
from fedloom.platform.averaging.privacy import expected_weights, privatised
from fedloom.platform.averaging.secure import needed_of
from fedloom.platform.averaging.weighting import weighting_traits
from fedloom.platform.clients.local_rules import local_rule
from fedloom.platform.clients.objectives import OBJECTIVES, MaskedClasses
from fedloom.platform.clients.sealing import SecurePlan
from fedloom.platform.clients.trainer import Train
from fedloom.platform.federation.accounting import accounting, epsilon, mechanism, with_round
from fedloom.platform.federation.selection import selection_traits
from fedloom.platform.federation.training_config import SPENT, cohort_size
from fedloom.platform.seeding import stream, torch_stream

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedloom.platform.averaging.average import Averaged
    from fedloom.platform.clients.assignments import Task
    from fedloom.platform.clients.networks import Countable
    from fedloom.platform.federation.state import Plan, RoundResult, RunState
    from fedloom.platform.federation.training_config import PrivacyConfig, Rules, TrainingConfig
    from fedloom.platform.federation.world import World
    from fedloom.platform.spaces.slices import SliceMap

logger = logging.getLogger(__name__)

EXPECTED_FROM = 64
"""Simulated cohorts from which the expected coverage of scalars is found."""

LEAST_NOISE = 0.1
"""Of accountant pld: below it an interval of 1e-4 takes more than a gigabyte of memory, for an epsilon above 100."""


def check_privacy(config: TrainingConfig, rules: Rules) -> None:
    """Raises ValueError for rules with which a client's influence has no bound, or is not accounted for."""
    privacy, key = config.privacy, rules.key
    if privacy.secure:
        _check_secure(config, rules, key)
        if privacy.clip is not None:
            raise ValueError(
                f"{key}.privacy.secure=true leaves out what one client alone has trained, so that more than its own "
                f"change depends on a client: use it without {key}.privacy.clip"
            )
    if privacy.clip is None:
        if privacy.noise:
            raise ValueError(f"{key}.privacy.noise={privacy.noise:g} needs {key}.privacy.clip, its unit: give both")
        return
    weighting = weighting_traits(rules.weighting.name)
    if not weighting.at_most_one and (privacy.weight_cap is None or weighting.weighs_unheld):
        raise ValueError(
            f"{key}.weighting={rules.weighting.name}: a client's weight, and so its influence, has no bound; use "
            f"{key}.weighting=plain" + ("" if weighting.weighs_unheld else f" or {key}.privacy.weight_cap")
        )
    if not local_rule(rules.local).sends_only_change:
        raise ValueError(
            f"{key}.local_rule={rules.local.name}: what it sends beside the change is neither clipped nor accounted "
            "for; use sgd or fedprox"
        )
    sampling = selection_traits(rules.selection.name).sampling
    if sampling is None:
        raise ValueError(
            f"{key}.selection={rules.selection.name}: no client's probability is known; use uniform, poisson, all"
        )
    if privacy.accountant == "pld" and sampling == "uniform":
        raise ValueError(f"{key}.privacy.accountant=pld knows selection=poisson and all, not uniform: use rdp")
    # With everybody in every round, all rounds together are one round of less noise.
    together = privacy.noise / math.sqrt(config.rounds or 1) if sampling == "all" else privacy.noise
    if privacy.accountant == "pld" and 0 < together < LEAST_NOISE:
        raise ValueError(
            f"{key}.privacy.noise={privacy.noise:g}: for accountant pld it must be at least "
            f"{LEAST_NOISE * privacy.noise / together:.3g} here, as distributions of losses with less noise do not fit "
            "into memory; raise it, or use rdp"
        )
    if config.min_contributors > 1:
        raise ValueError(
            f"{key}.min_contributors={config.min_contributors}: to look at who covers a scalar would tell who took "
            f"part; use 1 ({key}.privacy.least_coverage leaves out what few are expected to hold)"
        )
    accounting()


def _check_secure(config: TrainingConfig, rules: Rules, key: str) -> None:
    if (
        not local_rule(rules.local).sends_only_change
        or weighting_traits(rules.weighting.name).weighs_unheld
        or selection_traits(rules.selection.name).shortens_updates
    ):
        raise ValueError(
            f"{key}.privacy.secure=true hides the changes of parameters alone: use {key}.local_rule=sgd or fedprox, "
            "another weighting than fedavg_whole, another selection than pyramidfl"
        )
    if config.clients_per_round == 1:
        raise ValueError(f"{key}.privacy.secure=true: the sum of one client is its update; raise clients_per_round")


def private(task: Task, config: PrivacyConfig, stage: str) -> Train:
    """The client's task with its change clipped, if it has to be; ValueError for tasks that cannot be private."""
    if not isinstance(task, Train) or task.joined:
        raise ValueError(f"privacy: the clients of {stage} send more than the change of one network; leave it out")
    if task.share > 1:
        raise ValueError(f"privacy: the share {task.share:g} of a client is above 1, so that its influence is above S")
    if config.secure and task.sends < 1:
        raise ValueError("privacy.secure=true: behind masks all is sent; use a method whose clients leave out nothing")
    return replace(task, clip=config.clip, weight_cap=config.weight_cap)


def _survivors(result: RoundResult) -> list[int]:
    return [r.client_id for r in result.client_results if r.client_id is not None and r.status == "ok"]


TasksOf = Callable[[int, tuple[int, ...]], Sequence[Any]]
"""The tasks of a simulated cohort, of its index and clients in plan order."""


class PrivateRounds:
    """What a training stage does differently with differential privacy."""

    def __init__(self, world: World, config: TrainingConfig, rules: Rules, stage: str, eligible: np.ndarray) -> None:
        """Raises ValueError for what has no privacy; so do devices that are away: nobody's probability is known."""
        check_privacy(config, rules)
        objective = OBJECTIVES.make(world.spec.objective)
        if isinstance(objective, MaskedClasses) and objective.in_mean:
            raise ValueError(
                f"{rules.key}.privacy: which rows of a classifier count tells which classes a client has: set "
                "objective.options.in_mean=false"
            )
        self.clips = config.privacy.clip is not None
        if self.clips and (world.devices is not None or any(profile.availability < 1 for profile in world.profiles)):
            raise ValueError(f"{stage}, privacy: with devices that may be away no client's probability is known")
        self.world, self.config, self.stage, self.eligible = world, config, stage, eligible
        takes_all = selection_traits(config.selection).sampling == "all"
        self.size = len(eligible) if takes_all else cohort_size(config, len(eligible))
        self._expected: Mapping[str, Tensor] | None = None

    def tasks(self, tasks: Sequence[Task], client_ids: Sequence[int], index: int) -> list[Train]:
        """The clients' tasks with their changes clipped, and behind masks."""
        found = [private(task, self.config.privacy, self.stage) for task in tasks]
        if not self.config.privacy.secure:
            return found
        plan = self._plan([(c, task.network) for c, task in zip(client_ids, found, strict=True)], index)
        return [replace(task, secure=plan) for task in found]

    def _plan(self, networks: Sequence[tuple[int, Countable]], index: int) -> SecurePlan:
        privacy, place = self.config.privacy, (self.stage, index)
        needed = needed_of(len(networks), privacy.survivors)
        seed = self.world.config.seed_for("training")
        return SecurePlan(tuple(networks), seed, place, needed, privacy.fraction_bits, self.least_contributors)

    def opened(self, state: RunState, bag: str, plan: Plan, result: RoundResult) -> WeightedSums:
        """The round's sums without masks; empty ones if too few clients have answered for anything to be revealed."""
        if not self.config.privacy.secure:
            return result.sums
        weights, survivors = state.weights(bag), _survivors(result)
        told = next((a.task.secure for a in plan.assignments if isinstance(a.task, Train)), None)
        if not survivors or told is None:
            return result.sums
        secure = told.on(self.world.space, weights)
        found = secure.unmasked(result.sums, survivors, weights)
        if found is None:
            logger.warning(
                "%s, round %d: %d of %d clients answered, %d are needed to reveal their sum: nothing is learned",
                *(self.stage, state.round + 1, len(survivors), len(secure.held), secure.needed),
            )
        return WeightedSums() if found is None else found

    def spent(self, state: RunState) -> list[list[Any]]:
        """The mechanisms of all stages' rounds, with this one."""
        here = mechanism(self.config, len(self.eligible), self.size)
        return with_round(state.data.get(SPENT, []), here, len(self.eligible))

    @property
    def least_contributors(self) -> int:
        """Scalars that fewer have trained keep their values, as their sum would be one client's."""
        return max(2, self.config.min_contributors) if self.config.privacy.secure else self.config.min_contributors

    def recorded(self, state: RunState, after: RunState) -> RunState:
        """The state after a round with what it has spent, given the one before."""
        return after.with_data(SPENT, self.spent(state)) if self.clips else after

    def schedules(self, state: RunState) -> dict[str, float]:
        """The epsilon of all rounds with this one, if there is noise."""
        return {"epsilon": self.epsilon(state)} if self.config.privacy.noise else {}

    def epsilon(self, state: RunState) -> float:
        """That of all rounds, with this one."""
        return epsilon(self.spent(state), self.config.privacy.delta, self.config.privacy.accountant)

    def averaged(self, state: RunState, bag: str, averaged: Averaged, tasks_of: TasksOf) -> Averaged:
        """The mean with fixed denominators and noise."""
        privacy = self.config.privacy
        if privacy.clip is None:
            return averaged
        if self._expected is None:
            self._expected = expected_weights(self._simulated(tasks_of), state.weights(bag))
        noise = torch_stream(self.world.config.seed_for("training"), "noise", self.stage, state.round)
        std = privacy.noise * privacy.clip
        return privatised(averaged, state.weights(bag), self._expected, std, privacy.least_coverage, noise)

    def _simulated(self, tasks_of: TasksOf) -> Iterator[list[tuple[SliceMap, float]]]:
        """Slices and weights of simulated cohorts: no client's data, and nobody's participation."""
        for index in range(EXPECTED_FROM):
            rng = stream(self.world.config.seed_for("selection"), "expected", self.stage, index)
            drawn = rng.choice(self.eligible, size=min(self.size, len(self.eligible)), replace=False)
            ordered = tuple(self.world.in_plan_order(tuple(drawn.tolist())))
            yield [(task.network.held(self.world.space), task.share) for task in tasks_of(index, ordered)]
