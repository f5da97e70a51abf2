"""A training stage's warnings about rounds that went wrong although nothing failed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.platform.clients.assignments import ClientResult, Task
    from fedloom.platform.federation.selection import Selection
    from fedloom.platform.federation.world import World

logger = logging.getLogger(__name__)

UNANSWERED = "unanswered"
"""The JSON value that counts the rounds of the current stage in which no update arrived."""
SETTLED, CHANCES, FAR = 5, 1.5, 0.4
"""After 5 rounds a model is suspect at an accuracy below 1.5 times chance, if its clients' is higher by over .4."""


class TrainingWarnings:
    """The warnings of one stage; `noise` says whether the server adds noise in every round (`privacy.noise`)."""

    def __init__(self, world: World, stage: str, *, noise: bool) -> None:
        self.world, self.stage, self.noise = world, stage, noise
        self._has_compared, self._has_looked, self._has_waited, self._had_few = False, False, False, False

    def before_round(self, tasks: Sequence[Task], stack: int) -> None:
        """Warns once if stacking or compilation is configured, but possible for no client."""
        from fedloom.platform.clients.networks import Subnet  # what only runs need

        executor = self.world.config.executor
        if self._has_looked:
            return
        self._has_looked = True
        if stack == 1 and executor.stack_clients not in ("auto", "off", "1"):
            logger.warning(
                "%s: executor.stack_clients=%s has no effect on these clients: stacking needs clients that all train "
                "one whole network of known layers, not space.name=module or a supernet's paths",
                *(self.stage, executor.stack_clients),
            )
        networks = [getattr(task, name, None) for task in tasks for name in ("network", "subnet")]
        whole = any(isinstance(network, Subnet) and network.stand_alone for network in networks)
        if executor.compile and (stack > 1 or not whole):
            why = "trained as stacks (executor.stack_clients)" if stack > 1 else "not whole, such as a supernet's paths"
            logger.warning(
                "%s: executor.compile=true has no effect on networks that are %s: it is for networks of one "
                "architecture that clients train one by one",
                *(self.stage, why),
            )

    def of_availability(self, selection: Selection, now_s: float, starts_s: float, planned: int) -> None:
        """Warns once if a round waits until a device is online, and once if fewer are online than a round needs."""
        availability, size = self.world.availability, selection.size
        if availability is None:
            return
        if starts_s > now_s and not self._has_waited:
            self._has_waited = True
            logger.warning(
                "%s: no device is online at %.6g s of simulated time, and the server waits for %.6g s; such waits are "
                "part of the rounds' simulated_s (warned once)",
                *(self.stage, now_s, starts_s - now_s),
            )
        if size is None or planned >= min(size, len(selection.population)) or self._had_few:
            return
        online = len(availability.on_of(selection.population, starts_s))
        if online < size:
            self._had_few = True
            logger.warning(
                "%s: at %.6g s of simulated time %d of %d devices are online, and the round has %d of its %d clients; "
                "warned once: see the column clients_planned of the table rounds",
                *(self.stage, starts_s, online, len(selection.population), planned, size),
            )

    def after_round(self, round_: int, data: Mapping[str, Any], results: Sequence[ClientResult]) -> dict[str, int]:
        """Warns of what went wrong in a round; returns the count of rounds without an update if this was one."""
        self._compare_statistics(round_, results)
        clients = [result for result in results if result.client_id is not None]
        if any(result.status == "ok" for result in clients):
            return {}
        fates = Counter(result.status for result in clients)
        why = ", ".join(f"{count} {fate}" for fate, count in sorted(fates.items())) or "no client was selected"
        so = "only noise was added" if self.noise else "nothing was trained"
        rounds = data.get(UNANSWERED, 0) + 1
        logger.warning(
            "%s, round %d: no update arrived (%s), so %s; %d such rounds so far",
            *(self.stage, round_ + 1, why, so, rounds),
        )
        return {UNANSWERED: rounds}

    def check_trained(self, stages_before: int, rounds: int, data: Mapping[str, Any]) -> None:
        """Raises ValueError, or warns after earlier stages, if no update has arrived in any of the stage's rounds."""
        if not 0 < rounds == data.get(UNANSWERED, 0):
            return
        untrained = (
            f"no update arrived in any of the {rounds} rounds of {self.stage}, so that it trained nothing: the "
            "column error of the table clients says why; against lost or late devices lower devices.dropout, or "
            "raise devices.availability or devices.deadline_s"
        )
        if self.world.availability is not None:
            untrained += "; devices that go offline must be online for longer than their work takes"
        if stages_before == 0:
            raise ValueError(untrained)
        logger.warning(untrained)

    def _compare_statistics(self, index: int, results: Sequence[ClientResult]) -> None:
        """Warns once if the model is at chance with running statistics, but its clients with batch statistics are not.

        Differences between the clients' data explain some of that, but not a model that predicts nothing after several
        rounds.
        """
        if self._has_compared or index < SETTLED or not self.world.space.keeps_statistics:
            return
        trained = [(r.metric, r.samples) for r in results if r.client_id is not None and r.metric is not None]
        scores = [m for r in results if r.client_id is None for m in r.measurements if m.metric == "accuracy"]
        samples = sum(n for _, n in trained)
        if not scores or not samples:
            return
        training = sum(accuracy * n for accuracy, n in trained) / samples
        validation = sum(m.value for m in scores) / len(scores)
        if validation < CHANCES / self.world.spec.space.num_classes and training > validation + FAR:
            self._has_compared = True
            logger.warning(
                "%s, round %d: the clients' accuracy is %.2f with their own networks, batches and statistics, but the "
                "model's with running statistics on validation data is %.2f: the running statistics of its batch "
                "norms do not fit the clients' data; use a space without them (see space.norm), or less skewed data",
                *(self.stage, index + 1, training, validation),
            )
