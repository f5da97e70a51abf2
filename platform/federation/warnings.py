"""What a training stage says in the log of rounds that went wrong though nothing failed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedloom.platform.clients.assignments import ClientResult
    from fedloom.platform.federation.state import RunState
    from fedloom.platform.federation.world import World

logger = logging.getLogger(__name__)

UNANSWERED = "unanswered"
"""The JSON value that counts the rounds of the current stage in which no update arrived."""
SETTLED, CHANCES, FAR = 5, 1.5, 0.4
"""Rounds after which a model is expected to know more than 1.5 times chance, if its clients' are better by .4."""


class RoundWarnings:
    """The warnings of one stage."""

    def __init__(self, world: World, stage: str) -> None:
        self.world, self.stage = world, stage
        self._has_compared = False

    def looked_at(self, after: RunState, results: Sequence[ClientResult]) -> RunState:
        """The state after a round, in which rounds without an update are counted."""
        self._compare_statistics(after.round, results)
        clients = [result for result in results if result.client_id is not None]
        if any(result.status == "ok" for result in clients):
            return after
        fates = Counter(result.status for result in clients)
        why = ", ".join(f"{count} {fate}" for fate, count in sorted(fates.items())) or "none was available"
        rounds = after.data.get(UNANSWERED, 0) + 1
        logger.warning(
            "%s, round %d: no update arrived (%s), so nothing was trained; %d such rounds so far",
            *(self.stage, after.round + 1, why, rounds),
        )
        return after.with_data(UNANSWERED, rounds)

    def check_trained(self, state: RunState) -> None:
        """Raises ValueError, or warns after earlier stages, if no update has arrived in any round of the stage."""
        if not 0 < state.round == state.data.get(UNANSWERED, 0):
            return
        untrained = (
            f"no update arrived in any of the {state.round} rounds of {self.stage}, so that it trained nothing: the "
            "column error of the table clients says why; against lost or late devices lower devices.dropout, or "
            "raise devices.availability or devices.deadline_s"
        )
        if state.stage == 0:
            raise ValueError(untrained)
        logger.warning(untrained)

    def _compare_statistics(self, index: int, results: Sequence[ClientResult]) -> None:
        """Warns once if the model is at chance with running statistics while its clients are not with their batches'.

        Clients' data are their own, and theirs alone would explain some of it, but not a model that predicts nothing
        after several rounds.
        """
        if self._has_compared or index < SETTLED or not self.world.space.keeps_statistics:
            return
        own = [(r.metric, r.samples) for r in results if r.client_id is not None and r.metric is not None]
        scores = [m for r in results if r.client_id is None for m in r.measurements if m.metric == "accuracy"]
        samples = sum(n for _, n in own)
        if not scores or not samples:
            return
        training = sum(accuracy * n for accuracy, n in own) / samples
        validation = sum(m.value for m in scores) / len(scores)
        if validation < CHANCES / self.world.config.space.num_classes and training > validation + FAR:
            self._has_compared = True
            logger.warning(
                "%s, round %d: the clients' accuracy is %.2f, of their own networks on their own batches and with "
                "their statistics, that of the model with running statistics on validation data %.2f: the running "
                "statistics of its batch norms do not fit the clients' data; use a space without them, such as by "
                "space.norm, or less skewed data",
                *(self.stage, index + 1, training, validation),
            )
