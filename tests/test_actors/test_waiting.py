"""Two runs on one cluster: the second waits in line, is told so, and is refused with what helps."""

import json
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fedloom.actors import placement
from fedloom.actors.address import check_listening
from fedloom.actors.cluster import connected
from fedloom.actors.placement import Rooms, wait_for_room
from fedloom.platform.federation.config import RayConfig

WHOLE = {"node": {"CPU": 2.0, "memory": 1e9}}


def two_cpus(rooms: Rooms) -> float:
    cpus = sum(room.get("CPU", 0.0) for room in rooms.values())
    if cpus < 2:
        raise ValueError(f"the cluster has {cpus:g} free")
    return cpus


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that goes by what was slept."""
    lengths: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(lengths), sleep=lengths.append)
    monkeypatch.setattr(placement, "time", clock)
    return lengths


def test_room_is_taken_at_once_without_a_word(slept: list[float]) -> None:
    told: list[str] = []
    assert wait_for_room(two_cpus, lambda: WHOLE, lambda: WHOLE, 300.0, told.append) == 2.0
    assert (told, slept) == ([], [])


def test_a_run_waits_until_others_have_ended_and_says_so(slept: list[float]) -> None:
    told: list[str] = []
    frees: Iterator[Rooms] = iter([{"node": room} for room in ({"CPU": 0.0}, {}, {"CPU": 1.0}, {"CPU": 2.0})])
    assert wait_for_room(two_cpus, lambda: next(frees), lambda: WHOLE, 300.0, told.append) == 2.0
    assert told == ["waiting for other runs on this cluster: 0 of 2 CPUs are free; for up to 300 s (ray.wait_s)"]
    assert slept == [1.0, 1.0, 1.0]


def test_after_the_limit_it_is_refused_with_what_helps(slept: list[float]) -> None:
    with pytest.raises(ValueError, match=r"hold this cluster: 0 of 2 CPUs are free after 2\.5 s; start") as refusal:
        wait_for_room(two_cpus, dict, lambda: WHOLE, 2.5, lambda _: None)
    assert slept == [1.0, 1.0, 0.5]
    assert "ray.wait_s=3600" in str(refusal.value)
    assert "ray.address=local" in str(refusal.value)
    assert "executor.actors" not in str(refusal.value)


def test_what_the_whole_cluster_cannot_hold_is_refused_at_once(slept: list[float]) -> None:
    told: list[str] = []
    with pytest.raises(ValueError, match="the cluster has 1 free"):
        wait_for_room(two_cpus, dict, lambda: {"node": {"CPU": 1.0}}, 300.0, told.append)
    assert (told, slept) == ([], [])


@pytest.mark.parametrize(
    ("status", "grows"),
    [
        (None, False),
        ({"time": 1.0}, False),  # its first report is still to come
        ({"autoscaler_report": {"node_type_mapping": None}}, False),
        ({"autoscaler_report": {"node_type_mapping": {"f00": "node_f00"}}}, False),
        ({"autoscaler_report": {"node_type_mapping": {"f00": "head"}}}, True),
        ({"autoscaler_report": {"node_type_mapping": {"f00": "node_head"}}}, True),
    ],
)
def test_a_cluster_grows_that_has_an_autoscaler(monkeypatch: pytest.MonkeyPatch, status: Any, grows: bool) -> None:
    monkeypatch.setattr(placement, "is_autoscaler_v2", lambda: False)
    monkeypatch.setattr(placement.internal_kv, "_internal_kv_get", lambda _key: status and json.dumps(status).encode())
    assert placement.can_grow() is grows


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_listens_is_refused_in_one_line(scheme: str) -> None:
    address = f"{scheme}127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionError, match=f"^no Ray at '{address}': connection refused; .*ray.address=local$"):
        check_listening(address)


def test_connecting_says_so_once_and_asks_for_no_token() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionError) as refusal, connected(RayConfig(address=address)):
        pass
    assert str(refusal.value).count("no Ray at") == 1
    assert "token" not in str(refusal.value)


def test_an_address_without_a_port_is_refused_with_its_key() -> None:
    with (
        pytest.raises(ValueError, match=r"^ray\.address=127\.0\.0\.1: .*; give HOST:PORT, auto or local$"),
        connected(RayConfig(address="127.0.0.1")),
    ):
        pass


def test_an_address_where_something_listens_is_left_to_ray() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_listening(f"127.0.0.1:{server.getsockname()[1]}")
    for other in ("local", "auto", "nowhere", "host:port", "[::1"):
        check_listening(other)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (Exception("The current node timed out during startup. This could happen because"), "timed out during startup"),
        (TimeoutError(), "TimeoutError"),
        (OSError(98, "Address already in use"), "Address already in use"),
    ],
)
def test_ray_that_does_not_start_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, said: str
) -> None:
    def fail(**_: object) -> None:
        raise raised

    monkeypatch.setattr("ray.init", fail)
    with pytest.raises(ConnectionError, match=said) as end, connected(RayConfig(address="local")):
        pass
    assert "\n" not in str(end.value)


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        (
            b"RPC error: InvalidAuthToken: it is missing or incorrect\n",
            "; it asks for its token: set",
        ),
        (b"RPC error: Timed out\n", "; is it running there?"),
    ],
)
def test_what_ray_prints_of_a_cluster_that_it_does_not_reach_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], printed: bytes, said: str
) -> None:
    def fail(**_: object) -> None:
        os.write(2, printed * 20)  # as its C++ part does, past sys.stderr
        raise ConnectionError("Failed to connect to Ray cluster at there")

    monkeypatch.setattr("ray.init", fail)
    with pytest.raises(ConnectionError, match=said) as end, connected(RayConfig(address="there")):
        pass
    assert "\n" not in str(end.value)
    assert capfd.readouterr().err == ""


def test_what_ray_prints_of_a_cluster_that_it_reaches_is_shown(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ray.init", lambda **_: os.write(2, b"a warning\n"))
    monkeypatch.setattr("fedloom.actors.cluster._unpack_jobs_files", lambda _folder: None)
    with connected(RayConfig(address="there")):
        os.write(2, b"afterwards\n")
    assert capfd.readouterr().err == "a warning\nafterwards\n"
