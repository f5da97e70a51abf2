"""The order in which a pool starts a round's chunks; results are always merged in plan order (`test_bitwise.py`)."""

from collections import deque
from dataclasses import dataclass

from fedloom.actors.pool import LAST_JOBS, ActorPool, Job, in_balance
from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.execution import Chunk, named_client
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.scoring import ScoreSubnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import LocalSGD


@dataclass(frozen=True)
class Nothing:
    """A task without work."""

    def run(self, *_: object) -> ClientResult:
        return ClientResult()


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


def test_rows_of_clients_whose_job_was_lost_say_who_they_were() -> None:
    clients = [
        Assignment("train", 0, 3, "tier1", Nothing(), attacker=True),
        Assignment("train", 0, 4, "tier1", Nothing(), dropped="its device dropped out"),
    ]
    lost = Job(0, Chunk("tier1", tuple(clients))).failed("the actor ended 3 times").client_results
    assert [(r.client_id, r.attacker, r.status, r.error) for r in lost] == [
        (3, True, "failed", "the actor ended 3 times"),
        (4, False, "dropped", "its device dropped out"),
    ]


def test_a_stack_may_take_twice_as_long_as_one_client_whatever_its_size() -> None:
    clients = tuple(Assignment("train", 0, i, "tier1", Nothing()) for i in range(32))
    assert Job(0, Chunk("tier1", clients)).time_limit_s(3600.0) == 3600.0
    stack = Job(0, Chunk("tier1", clients, stack=32))
    assert stack.time_limit_s(3600.0) == 7200.0
    stack.timed_out.update((i, ClientResult(client_id=i, tier="tier1", status="timed_out")) for i in range(31))
    assert stack.time_limit_s(3600.0) == 3600.0


def test_a_client_is_named_with_its_architecture() -> None:
    subnet = Subnet((0, 2, 1))
    local = LocalSGD(epochs=1, batch_size=8, lr=0.1)
    tasks = [Train(subnet, local), ScoreSubnet(subnet, "global", "test"), Nothing()]
    assert [named_client(Assignment("train", 4, 7, "tier2", task)) for task in tasks] == [
        "client 7 (tier2, train round 5, Train 0-2-1)",
        "client 7 (tier2, train round 5, ScoreSubnet 0-2-1)",
        "client 7 (tier2, train round 5, Nothing)",
    ]


def test_clients_that_wait_for_an_actor_are_counted() -> None:
    pool = ActorPool.__new__(ActorPool)
    pool._waiting = {"tier1": deque([job(0, 5), job(1, 40, 40)]), "tier2": deque()}
    assert pool.clients_waiting() == 3
