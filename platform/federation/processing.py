"""The processors of a training stage, on the server's side: they are begun, completed and undone once per round."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fedloom.platform.averaging.average import WeightedSums
from fedloom.platform.averaging.processors import Processors, ServerContext, processor
from fedloom.platform.clients.local_rules import refuse_parts
from fedloom.platform.clients.trainer import Train
from fedloom.platform.federation.training_config import expected_size
from fedloom.platform.seeding import stream

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedloom.platform.averaging.aggregators import Sums
    from fedloom.platform.averaging.average import Averaged
    from fedloom.platform.clients.assignments import ClientResult, Task
    from fedloom.platform.federation.training_config import Rules, TrainingConfig
    from fedloom.platform.federation.world import World
    from fedloom.platform.spaces.slices import SliceMap, Weights

SIMULATED = 64
"""Simulated cohorts from which the expected coverage of scalars is found."""

TasksOf = Callable[[int, tuple[int, ...]], Sequence[Any]]
"""The tasks of a simulated cohort, of its index and clients in plan order."""


def processors_of(world: World, config: TrainingConfig, rules: Rules, stage: str, eligible: np.ndarray) -> Processors:
    """The stage's processors: those of the configuration, then those of its privacy; ValueError if they do not fit."""
    chosen = [processor(choice) for choice in rules.processors]
    for each in chosen:
        if each.shortens_updates:
            refuse_parts(rules.local, rules.key, type(each).__name__, "sgd or fedprox")
    privacy = config.privacy
    if privacy.clip is None and not privacy.secure and not privacy.noise:
        return tuple(chosen)
    if chosen and privacy.secure:
        raise ValueError(
            f"{rules.key}.privacy.secure=true: behind masks all is sent in fixed point; use it without "
            f"{rules.key}.processors"
        )
    from fedloom.platform.federation.privacy import privacy_processors  # what only private runs need

    return (*chosen, *privacy_processors(world, config, rules, stage, eligible))


class Processing:
    """A stage's processors with what they need to know of its rounds."""

    def __init__(self, world: World, config: TrainingConfig, rules: Rules, stage: str, eligible: np.ndarray) -> None:
        """Raises ValueError for processors that do not fit the stage."""
        self.world, self.config, self.stage, self.eligible = world, config, stage, eligible
        self.processors = processors_of(world, config, rules, stage, eligible)
        self._expected: Mapping[str, Tensor] | None = None

    def begin(self, data: Mapping[str, Any]) -> None:
        """Warns of what a stage of these processors makes of the models of earlier stages, given their JSON values."""
        if data:
            from fedloom.platform.federation.privacy import warn_unprotected

            warn_unprotected(self.config, data, self.stage)

    def context(self, round_: int, old: Weights, data: Mapping[str, Any]) -> ServerContext:
        """A round, from the shared weights and the run's JSON values before it."""
        return ServerContext(
            stage=self.stage,
            round=round_,
            seed=self.world.config.seed_for("training"),
            old=old,
            data=data,
            min_contributors=max(self.config.min_contributors, *(p.least_contributors for p in self.processors), 1),
        )

    def begun(
        self, context: ServerContext, tasks: Sequence[Task], client_ids: Sequence[int]
    ) -> tuple[Sequence[Task], Processors]:
        """The round's tasks with its processors, and these; ValueError for tasks that cannot have any."""
        if not self.processors:
            return tasks, ()
        checked = [self._checked(task) for task in tasks]

        def held() -> dict[int, SliceMap]:
            return {c: task.network.held(self.world.space) for c, task in zip(client_ids, checked, strict=True)}

        context = replace(context, held=held)
        processors = tuple(each.begun(context) for each in self.processors)
        return [replace(task, processors=(*task.processors, *processors)) for task in checked], processors

    def _checked(self, task: Task) -> Train:
        if not isinstance(task, Train) or task.use_validation:
            raise ValueError(
                f"privacy and processors: the clients of {self.stage} send more than the change of one network; leave "
                "them out"
            )
        privacy = self.config.privacy
        if task.share > 1 and privacy.clip is not None:
            raise ValueError(
                f"privacy: the share {task.share:g} of a client is above 1, so that its influence is above S"
            )
        if privacy.secure and any(each.shortens_updates for each in task.processors):
            raise ValueError(
                "privacy.secure=true: behind masks all is sent; use a method whose clients leave out nothing"
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
    ) -> Averaged:
        """The mean of the round's updates, with its processors undone in reverse.

        `singly` names tensors of which one update is enough (`WeightedSums.finish`); `tasks_of` simulates cohorts.
        """
        answered = [r.client_id for r in results if r.client_id is not None and r.status == "ok"]
        expected_weights = partial(self._expected_weights, context.old, tasks_of)
        context = replace(context, answered=answered, expected_weights=expected_weights)
        if isinstance(sums, WeightedSums):
            for each in reversed(processors):
                sums = each.on_sums(sums, context)
        averaged = sums.finish(context.old, context.min_contributors, singly)
        for each in reversed(processors):
            averaged = each.on_mean(averaged, context)
        return averaged

    def recorded(self, context: ServerContext) -> dict[str, Any]:
        """The JSON values that the run's state keeps after the round."""
        return {name: value for each in self.processors for name, value in each.recorded(context).items()}

    def _expected_weights(self, old: Weights, tasks_of: TasksOf) -> Mapping[str, Tensor]:
        if self._expected is None:
            from fedloom.platform.averaging.privacy import expected_weights

            self._expected = expected_weights(self._simulated(tasks_of), old)
        return self._expected

    def _simulated(self, tasks_of: TasksOf) -> Iterator[list[tuple[SliceMap, float]]]:
        """Slices and weights of simulated cohorts: no client's data, and nobody's participation."""
        size = min(expected_size(self.config, len(self.eligible)), len(self.eligible))
        for index in range(SIMULATED):
            rng = stream(self.world.config.seed_for("selection"), "expected", self.stage, index)
            drawn = rng.choice(self.eligible, size=size, replace=False)
            ordered = tuple(self.world.in_plan_order(tuple(drawn.tolist())))
            yield [(task.network.held(self.world.space), task.share) for task in tasks_of(index, ordered)]
