"""Suggests trials to Tune in the order of the plan; trials that share a supernet wait until one has trained it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ray.tune.search import Searcher

from fedloom.experiments.ablation.trial import TRIAL


@dataclass(frozen=True)
class Pending:
    """A trial to run, and the key of the supernet that it trains or starts from (None: it shares none).

    A trial with `replay` only reports its finished rounds to a scheduler; all others wait for it.
    """

    index: int
    supernet: str | None = None
    replay: bool = False


class PlanSearcher(Searcher):
    """Suggests the planned trials, one after the other.

    Args:
        pending: the trials, in the order in which they should start.
        is_stored: whether a trained supernet with the given key is stored.
    """

    def __init__(self, pending: Sequence[Pending], is_stored: Callable[[str], bool]) -> None:
        super().__init__()
        self._pending = list(pending)
        self._is_stored = is_stored
        self._at_work: dict[str, Pending] = {}
        """By Tune's trial id."""

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """The next trial that need not wait; None while all remaining trials must wait."""
        if not self._pending:
            return cast(dict[str, Any], Searcher.FINISHED)  # a string, which Tune's annotation omits
        for place, trial in enumerate(self._pending):
            if self._can_begin(trial):
                self._at_work[trial_id] = self._pending.pop(place)
                return {TRIAL: trial.index}
        return None

    def _can_begin(self, trial: Pending) -> bool:
        others = [*self._pending, *self._at_work.values()]
        if not trial.replay and any(other.replay for other in others):
            return False
        key = trial.supernet
        trained = any(other.supernet == key for other in self._at_work.values())
        return key is None or not trained or self._is_stored(key)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        # If the trial ended without a stored supernet, the next trial with its key trains one.
        self._at_work.pop(trial_id, None)

    def save(self, checkpoint_path: str) -> None:
        """Saves nothing: the plan and the files of the runs show which trials are left."""

    def restore(self, checkpoint_path: str) -> None:
        """Restores nothing, as `save` saves nothing."""
