"""The server's side of a round: it undoes the processors, averages the updates and applies the server rule."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fedloom.platform.averaging.average import Averaged, WeightedSums
from fedloom.platform.averaging.privacy import SPENT, DifferentialPrivacy, accounting, expected_weights
from fedloom.platform.averaging.processors import (
    Processor,
    Processors,
    ServerContext,
    check_after_choice,
    check_order,
    processor,
)
from fedloom.platform.averaging.server import SERVER_RULES, ServerRound, ServerRule, serve
from fedloom.platform.averaging.weighting import weighting_traits
from fedloom.platform.clients.local_rules import local_rule, place_of, refuse_parts
from fedloom.platform.clients.trainer import Train
from fedloom.platform.federation.selection import selection_traits
from fedloom.platform.federation.training_config import expected_size
from fedloom.platform.plugins import answered
from fedloom.platform.seeding import stream
from fedloom.platform.spaces.slices import part_of

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedloom.platform.averaging.aggregators import Sums
    from fedloom.platform.averaging.attacks import Attack
    from fedloom.platform.averaging.average import Update
    from fedloom.platform.clients.assignments import ClientResult, Task
    from fedloom.platform.federation.training_config import Rules, TrainingConfig
    from fedloom.platform.federation.world import World
    from fedloom.platform.spaces.slices import SliceMap, Weights

SIMULATED = 64
"""Number of simulated cohorts from which the expected coverage of scalars is estimated."""

TasksOf = Callable[[int, tuple[int, ...]], Sequence[Any]]
"""Makes the tasks of a simulated cohort from its index and its clients in plan order."""


class Processing:
    """A stage's processors, and the context that they need in its rounds."""

    def __init__(
        self,
        world: World,
        config: TrainingConfig,
        rules: Rules,
        stage: str,
        eligible: np.ndarray,
        parameters: Container[str],
    ) -> None:
        """Raises ValueError for processors that do not fit the stage; `parameters` names the trained tensors."""
        self.world, self.config, self.stage, self.eligible = world, config, stage, eligible
        self.parameters = parameters
        self.processors: Processors = tuple(processor(choice) for choice in rules.processors)
        self.named = [(choice.name, each) for choice, each in zip(rules.processors, self.processors, strict=True)]
        check_order(self.named, rules.key)
        for each in self.processors:
            if each.shortens_updates:
                refuse_parts(rules.local, rules.key, type(each).__name__, "sgd or fedprox")
        if selection_traits(rules.selection.name).shortens_updates:
            check_after_choice(self.named, rules.key, f"{rules.key}.selection={rules.selection.name}")
        privacy = config.privacy
        if self.processors and privacy.secure:
            raise ValueError(
                f"{rules.key}.privacy.secure=true: masked updates are residues in fixed point, which cannot be "
                f"compressed; use it without {rules.key}.processors"
            )
        if privacy.clip is not None or privacy.secure or privacy.noise:
            self.processors += privacy_processors(world, config, rules, stage, eligible)
        if world.attackers:
            from fedloom.platform.averaging.attacks import Attackers  # only attacked runs need it

            check_attack(world.attack, world.config.attack.name, config, rules)
            attackers = Attackers(world.attack, world.attackers, needs_updates=world.attack.colludes)
            self.processors = (attackers, *self.processors)
        self._expected: Mapping[str, Tensor] | None = None
        self._shares: Sequence[float] = ()

    @property
    def needs_updates(self) -> bool:
        """Whether a processor needs every single update."""
        return any(each.needs_updates for each in self.processors)

    def check_acts_on_updates(self) -> None:
        """Raises ValueError for a processor that changes sums alone, where the server keeps every single update."""
        for kind in (type(each) for each in self.processors):
            if kind.on_sums is not Processor.on_sums and kind.on_updates is Processor.on_updates:
                raise ValueError(
                    f"processor {kind.__name__} changes the sums of updates (on_sums), and here the server keeps every "
                    "update (an aggregator other than mean, distillation, or attackers who collude): give it "
                    "on_updates, too"
                )

    def begin(self, data: Mapping[str, Any]) -> None:
        """Warns of a stage without differential privacy after stages with it, given the run's JSON values."""
        if SPENT in data and self.config.privacy.clip is None and self.config.rounds:
            logger.warning(
                "%s trains without differential privacy after stages with it: its model has none", self.stage
            )

    def context(self, round_: int, old: Weights, data: Mapping[str, Any]) -> ServerContext:
        """The processors' context of a round, from the shared weights and the run's JSON values before it."""
        return ServerContext(
            stage=self.stage,
            round=round_,
            seed=self.world.config.seed_for("training"),
            old=old,
            data=data,
            parameters=self.parameters,
            min_contributors=max(self.config.min_contributors, *(p.least_contributors for p in self.processors), 1),
        )

    def sent(self, context: ServerContext) -> Weights | None:
        """All shared tensors as clients receive them in the context's round; None if no processor changes them."""
        sent = {name: tensor for name, tensor in context.old.items() if name in self.parameters}
        changed = False
        for each in self.processors:
            after = each.on_weights(sent, context)
            if after is not None:
                sent, changed = dict(after), True
        return {**context.old, **sent} if changed else None

    def begun(
        self, context: ServerContext, tasks: Sequence[Task], client_ids: Sequence[int]
    ) -> tuple[Sequence[Task], Processors]:
        """The round's tasks with its processors added, and the processors; ValueError for tasks that take none."""
        if not self.processors:
            return tasks, ()
        checked = [self._checked(task) for task in tasks]
        processors = self.of_clients(context, dict(zip(client_ids, checked, strict=True)))
        return [replace(task, processors=(*task.processors, *processors)) for task in checked], processors

    def of_clients(self, context: ServerContext, tasks: Mapping[int, Task]) -> Processors:
        """The round's processors for these clients: those that begin in it, or those that answer."""

        def held() -> dict[int, SliceMap]:
            return {c: task.network.held(self.world.space) for c, task in tasks.items() if isinstance(task, Train)}

        context = replace(context, held=held, cohort=tuple(tasks))
        return tuple(answered(f"{type(p).__name__}.begun", p.begun(context), Processor) for p in self.processors)

    def _checked(self, task: Task) -> Train:
        if not isinstance(task, Train) or task.use_validation:
            raise ValueError(
                f"attack, privacy and processors: the clients of {self.stage} send more than the change of one "
                "network; leave them out"
            )
        processors_of_method = [(type(each).__name__.lower(), each) for each in task.processors]
        check_order([*processors_of_method, *self.named], f"method of {self.stage}")
        privacy = self.config.privacy
        if task.share > 1 and privacy.clip is not None:
            raise ValueError(
                f"privacy: a client's share is {task.share:g}, above 1, so that its influence exceeds the clip bound"
            )
        if privacy.secure and any(each.shortens_updates for each in task.processors):
            raise ValueError(
                "privacy.secure=true: masked updates are sent whole; use a method whose clients leave out nothing"
            )
        return task

    def schedules(self, context: ServerContext) -> dict[str, float]:
        """The processors' values for the round's row."""
        return {name: value for each in self.processors for name, value in each.schedules(context).items()}

    def averaged(
        self,
        context: ServerContext,
        processors: Processors,
        sums: Sums,
        results: Iterable[ClientResult],
        singly: Container[str],
        tasks_of: TasksOf,
        sent: Weights | None = None,
    ) -> Averaged:
        """The mean of the round's updates, with its processors undone in reverse.

        `singly` names tensors for which one update is enough (`WeightedSums.finish`); `tasks_of` makes the tasks of
        simulated cohorts. `sent` are the weights that clients received, if these differ from the context's.
        """
        client_ids = [r.client_id for r in results if r.client_id is not None and r.status == "ok"]
        expected_weights = partial(self._expected_weights, context.old, tasks_of)
        context = replace(context, answered=client_ids, expected_weights=expected_weights)
        received = context.old if sent is None else sent
        if isinstance(sums, WeightedSums):
            for each in reversed(processors):
                after = each.on_sums(sums, replace(context, old=received))
                sums = answered(f"{type(each).__name__}.on_sums", after, WeightedSums)
        elif processors:
            updates: Mapping[int, Update] = dict(zip(client_ids, sums.kept, strict=True))
            for each in reversed(processors):
                updates = each.on_updates(updates, replace(context, old=received))
            sums = replace(sums, kept=[*updates.values()])
        averaged = sums.finish(received, context.min_contributors, singly)
        if sent is not None:
            averaged = from_exact(averaged, sent, context.old, self.parameters)
        for each in reversed(processors):
            averaged = answered(f"{type(each).__name__}.on_mean", each.on_mean(averaged, context), Averaged)
        return averaged

    def recorded(self, context: ServerContext) -> dict[str, Any]:
        """The JSON values that the run's state keeps after the round."""
        return {name: value for each in self.processors for name, value in each.recorded(context).items()}

    def _expected_weights(self, old: Weights, tasks_of: TasksOf) -> Mapping[str, Tensor]:
        """Each scalar's expected sum of weights, computed again when the clients' shares change (MaxNet's beta)."""
        if self._expected is None or any(share != 1 for share in self._shares):
            cohorts = [*self._simulated(tasks_of)]
            shares = [share for cohort in cohorts for _, share in cohort]
            if self._expected is None or shares != self._shares:
                self._expected, self._shares = expected_weights(cohorts, old), shares
        # A search may have removed operators since.
        return {name: weights for name, weights in self._expected.items() if name in old}

    def _simulated(self, tasks_of: TasksOf) -> Iterator[list[tuple[SliceMap, float]]]:
        """Slices and weights of simulated cohorts, which depend on no client's data or actual participation."""
        size = min(expected_size(self.config, len(self.eligible)), len(self.eligible))
        for index in range(SIMULATED):
            rng = stream(self.world.config.seed_for("selection"), "expected", self.stage, index)
            drawn = rng.choice(self.eligible, size=size, replace=False)
            ordered = tuple(self.world.in_plan_order(tuple(drawn.tolist())))
            yield [(task.network.held(self.world.space), task.share) for task in tasks_of(index, ordered)]


def check_attack(attack: Attack, name: str, config: TrainingConfig, rules: Rules) -> None:
    """Raises ValueError for colluding attackers if the configuration gives the server only sums of updates."""
    if not attack.colludes:
        return
    if config.privacy.secure or config.privacy.clip is not None or config.privacy.noise:
        raise ValueError(
            f"attack.name={name} needs every single update, and {rules.key}.privacy leaves only sums: leave one out"
        )
    if weighting_traits(rules.weighting.name).weighs_unheld:
        raise ValueError(
            f"attack.name={name} needs every single update, and {rules.key}.weighting={rules.weighting.name} counts "
            "clients that do not hold a scalar: use another weighting"
        )


def from_exact(averaged: Averaged, sent: Weights, exact: Weights, parameters: Container[str]) -> Averaged:
    """The server's exact weights plus the mean change from the sent weights, where clients cover them."""
    weights = dict(averaged.weights)
    for name, before in exact.items():
        if name in parameters:
            weights[name] = before.clone()
            for region in averaged.coverage.get(name, ()):
                change = part_of(averaged.weights[name], region) - part_of(sent[name], region)
                part_of(weights[name], region).add_(change)
    return replace(averaged, weights=weights)


class Server:
    """The server's step of a training stage: the server rule for trained tensors, the local rule's for shared ones.

    `parameters` are the names of the trained tensors.
    """

    def __init__(self, rules: Rules, parameters: Container[str]) -> None:
        self.rules, self.parameters, self.local_rule = rules, parameters, local_rule(rules.local)

    def shared(self, weights: Weights) -> dict[str, str]:
        """Maps the names of the tensors that the local rule shares to the parameters to which they belong."""
        parameters = [name for name in weights if name in self.parameters] if self.local_rule.shared else []
        return {place_of(slot, name): name for slot in self.local_rule.shared for name in parameters}

    def step(
        self, old: Weights, averaged: Averaged, state: Weights, about: ServerRound
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """The weights after a round and the server's state (`serve`); without any rule the average and no state."""
        steps: dict[str, tuple[str, ServerRule]] = {}
        if self.rules.server.name != "replace":
            rule = SERVER_RULES.make(self.rules.server)
            steps = {name: (self.rules.server.name, rule) for name in averaged.weights if name in self.parameters}
        steps |= dict.fromkeys(self.shared(averaged.weights), (self.rules.local.name, self.local_rule.merge))
        return serve(steps, old, averaged, state, about) if steps else (averaged.weights, {})


# -- differential privacy and secure aggregation -----------------------------------------------------------------------


logger = logging.getLogger(__name__)

LEAST_NOISE = 0.1
"""Least noise for accountant pld: below it an interval of 1e-4 takes over a gigabyte, for an epsilon above 100."""


def check_privacy(config: TrainingConfig, rules: Rules) -> None:
    """Raises ValueError for rules under which a client's influence is unbounded or not accounted for."""
    privacy, key = config.privacy, rules.key
    if privacy.secure:
        if (
            not local_rule(rules.local).sends_only_change
            or weighting_traits(rules.weighting.name).weighs_unheld
            or selection_traits(rules.selection.name).shortens_updates
        ):
            raise ValueError(
                f"{key}.privacy.secure=true hides only parameter changes: use {key}.local_rule=sgd or "
                "fedprox, and neither weighting=fedavg_whole nor selection=pyramidfl"
            )
        if config.clients_per_round == 1:
            raise ValueError(f"{key}.privacy.secure=true: the sum of one client is its update; raise clients_per_round")
        if privacy.clip is not None:
            raise ValueError(
                f"{key}.privacy.secure=true withholds what only one client trained, so that a client influences more "
                f"than its own change: use it without {key}.privacy.clip"
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
            f"{key}.selection={rules.selection.name}: selection probabilities are unknown; use uniform, poisson or all"
        )
    if privacy.accountant == "pld" and sampling == "uniform":
        raise ValueError(f"{key}.privacy.accountant=pld knows selection=poisson and all, not uniform: use rdp")
    # If all clients take part in every round, all rounds together equal one round with less noise.
    together = privacy.noise / math.sqrt(config.rounds or 1) if sampling == "all" else privacy.noise
    if privacy.accountant == "pld" and 0 < together < LEAST_NOISE:
        raise ValueError(
            f"{key}.privacy.noise={privacy.noise:g}: for accountant pld it must be at least "
            f"{LEAST_NOISE * privacy.noise / together:.3g} here, as distributions of losses with less noise do not fit "
            "into memory; raise it, or use rdp"
        )
    if config.min_contributors > 1:
        raise ValueError(
            f"{key}.min_contributors={config.min_contributors}: counting a scalar's contributors would reveal who took "
            f"part; use 1 ({key}.privacy.least_coverage withholds what few are expected to hold)"
        )
    accounting()


def privacy_processors(
    world: World, config: TrainingConfig, rules: Rules, stage: str, eligible: np.ndarray
) -> Processors:
    """The processors of a stage's `privacy`, which follow its configured processors.

    Raises ValueError for settings without privacy, and for devices that may be away, as no client's probability of
    selection is then known.
    """
    from fedloom.platform.averaging.secure import SecureAggregation  # only private runs need it
    from fedloom.platform.clients.objectives import OBJECTIVES, masks_in_mean

    check_privacy(config, rules)
    if masks_in_mean(OBJECTIVES.make(world.spec.objective)):
        raise ValueError(
            f"{rules.key}.privacy: the classifier rows that count reveal which classes a client has: set "
            "objective.options.in_mean=false"
        )
    privacy = config.privacy
    if privacy.clip is None:
        return (SecureAggregation(privacy.fraction_bits, privacy.survivors),)
    may_be_away = world.devices is not None or any(profile.availability < 1 for profile in world.profiles)
    if may_be_away or world.availability is not None:
        raise ValueError(f"{stage}, privacy: selection probabilities are unknown for devices that may be away")
    sampling, size = selection_traits(config.selection).sampling, expected_size(config, len(eligible))
    assert sampling is not None, "checked"
    share = size if sampling == "uniform" else size / max(1, len(eligible))
    takes_all = config.clients_per_round is None or size >= len(eligible)
    return (
        DifferentialPrivacy(
            clip=privacy.clip,
            noise=privacy.noise,
            weight_cap=privacy.weight_cap,
            least_coverage=privacy.least_coverage,
            delta=privacy.delta,
            accountant=privacy.accountant,
            mechanism=("all" if takes_all else sampling, share, privacy.noise),
            population=len(eligible),
        ),
    )
