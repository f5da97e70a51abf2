"""The order in which a pool starts a round's chunks; results are always merged in plan order (`test_bitwise.py`)."""

from dataclasses import dataclass

from fedloom.actors.pool import LAST_JOBS, Job, in_balance
from fedloom.platform.clients.assignments import Assignment, Outcome
from fedloom.platform.clients.execution import Chunk


@dataclass(frozen=True)
class Nothing:
    """A task without work."""

    def run(self, *_: object) -> Outcome:
        return Outcome()


def job(index: int, *samples: int, dropped: str = "") -> Job:
    """A chunk of clients with so many samples."""
    clients = [Assignment("train", 0, 0, "tier1", Nothing(), train_samples=n, dropped=dropped) for n in samples]
    return Job(index, Chunk("tier1", tuple(clients)))


def started(jobs: list[Job], actors: int) -> list[int]:
    return [job.index for job in in_balance(jobs, actors)]


def test_the_largest_of_the_last_chunks_start_first() -> None:
    assert started([job(0, 5), job(1, 90), job(2, 40, 40), job(3, 5)], 1) == [1, 2, 0, 3]
    assert started([job(0, 5), job(1, 90, dropped="gone"), job(2, 6)], 1) == [2, 0, 1]


def test_earlier_chunks_keep_their_place_so_that_few_results_wait() -> None:
    jobs = [job(index, index) for index in range(20)]
    last = 2 * LAST_JOBS
    assert started(jobs, 2) == [*range(20 - last), *reversed(range(20 - last, 20))]
