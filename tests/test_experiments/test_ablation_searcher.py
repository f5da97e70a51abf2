"""Which trial Tune is given next: the plan's order, and one that trains a supernet before those that begin with it."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from ray.tune.search import Searcher

from fedloom.experiments.ablation.tuning import Pending, PlanSearcher


class Asked:
    """A searcher, asked as Tune does; trials are called by their index."""

    def __init__(self, pending: Sequence[Pending], stored: set[str] | None = None) -> None:
        self.stored = stored if stored is not None else set()
        self.searcher = PlanSearcher(pending, self.stored.__contains__)
        self.names: dict[int, str] = {}
        self._numbers = count()

    def next(self) -> int | None:
        """The index of the next trial; None where all that are left must wait."""
        name = f"trial-{next(self._numbers)}"
        found = self.searcher.suggest(name)
        if found is None:
            return None
        assert set(found) == {"trial"}
        self.names[found["trial"]] = name
        return int(found["trial"])

    def end(self, index: int, error: bool = False) -> None:
        """A trial is over; what it left is in `stored` before."""
        self.searcher.on_trial_complete(self.names[index], None, error)

    def finished(self) -> bool:
        return self.searcher.suggest("more") == Searcher.FINISHED


def test_trials_come_in_the_plans_order() -> None:
    asked = Asked([Pending(3), Pending(1), Pending(2)])
    assert [asked.next() for _ in range(3)] == [3, 1, 2]
    assert asked.finished()
    assert asked.finished(), "said as often as Tune asks"


def test_nothing_to_do_is_finished_at_once() -> None:
    assert Asked([]).finished()


def test_those_that_share_a_supernet_wait_until_it_is_there() -> None:
    asked = Asked([Pending(0, "a"), Pending(1, "a"), Pending(2, "b"), Pending(3, "b"), Pending(4)])
    assert [asked.next() for _ in range(3)] == [0, 2, 4], "one of each supernet trains, others need not wait"
    assert asked.next() is None
    assert not asked.finished()
    asked.stored.add("b")  # while its trial goes on with the search
    assert asked.next() == 3
    assert asked.next() is None
    asked.stored.add("a")
    asked.end(0)
    assert asked.next() == 1
    assert asked.finished()


def test_a_supernet_of_an_earlier_ablation_lets_all_begin() -> None:
    asked = Asked([Pending(0, "a"), Pending(1, "a"), Pending(2, "a")], {"a"})
    assert [asked.next() for _ in range(3)] == [0, 1, 2]


def test_a_trial_that_failed_lets_the_next_one_train() -> None:
    asked = Asked([Pending(0, "a"), Pending(1, "a"), Pending(2, "a")])
    assert (asked.next(), asked.next()) == (0, None)
    asked.end(0, error=True)
    assert (asked.next(), asked.next()) == (1, None), "one at a time, as the first did"
    asked.end(1)  # refused: it ended without an error, and left no supernet
    assert asked.next() == 2
    assert asked.finished()


def test_the_end_of_a_trial_that_shares_nothing_frees_nobody() -> None:
    asked = Asked([Pending(0), Pending(1, "a"), Pending(2, "a")])
    assert [asked.next() for _ in range(3)] == [0, 1, None]
    asked.end(0)
    asked.searcher.on_trial_complete("unknown")
    assert asked.next() is None
    asked.end(1)
    assert asked.next() == 2


def test_tune_may_ask_it_to_save_itself(tmp_path: Path) -> None:
    asked = Asked([Pending(0, "a"), Pending(1, "a")])
    assert asked.next() == 0
    asked.searcher.save(str(tmp_path / "checkpoint"))
    asked.searcher.restore(str(tmp_path / "checkpoint"))
    assert asked.next() is None
    assert not list(tmp_path.iterdir())


def test_what_only_tells_a_scheduler_goes_first_and_alone() -> None:
    asked = Asked([Pending(0, "a", replay=True), Pending(1, replay=True), Pending(2, "b"), Pending(3)])
    assert [asked.next() for _ in range(3)] == [0, 1, None]
    asked.end(0)
    assert asked.next() is None, "the other one still tells"
    asked.end(1)
    assert [asked.next(), asked.next()] == [2, 3]
    assert asked.finished()
