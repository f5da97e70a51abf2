"""Where a cluster listens decides whether Ray looks for it on the loopback interface."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedloom.actors import address as address_module
from fedloom.actors.address import AUTH_MODE, LOOPBACK_SWITCH, show_own_token, stay_on_loopback


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port that is open on the loopback interface only."""
    monkeypatch.setenv(LOOPBACK_SWITCH, "")  # so that it is restored, whatever the tests set
    monkeypatch.delenv(LOOPBACK_SWITCH)
    monkeypatch.setattr(address_module, "_network_address", lambda: "127.0.0.2")  # stands for a network's
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_cluster_of_the_loopback_interface_is_looked_for_there(port: int, host: str) -> None:
    stay_on_loopback(f"{host}:{port}")
    assert os.environ[LOOPBACK_SWITCH] == "0"


def test_a_cluster_that_others_reach_is_not(port: int) -> None:
    with socket.create_server(("127.0.0.2", port)):
        stay_on_loopback(f"127.0.0.1:{port}")
    assert LOOPBACK_SWITCH not in os.environ


@pytest.mark.parametrize("address", ["127.0.0.1:1", "203.0.113.1:6379", "ray://head:10001", "a name", "127.0.0.1:x"])
def test_nor_is_one_that_is_elsewhere_or_nowhere(port: int, address: str) -> None:
    stay_on_loopback(address)
    assert LOOPBACK_SWITCH not in os.environ


def test_without_a_network_there_is_only_the_loopback_interface(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_module, "_network_address", lambda: None)
    stay_on_loopback(f"127.0.0.1:{port}")
    assert os.environ[LOOPBACK_SWITCH] == "0"


def test_the_users_own_choice_stays(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOOPBACK_SWITCH, "1")
    stay_on_loopback(f"127.0.0.1:{port}")
    assert os.environ[LOOPBACK_SWITCH] == "1"


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The place of the token beside a cluster that `auto` finds on this machine."""
    for name in (AUTH_MODE, "RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever the tests set
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(address_module, "_running_cluster", lambda: "192.0.2.7:6379")
    token = tmp_path / ".ray/auth_token"
    token.parent.mkdir()
    return token


def test_the_cluster_of_this_machine_is_shown_its_token(found: Path) -> None:
    found.write_text("0" * 64)
    show_own_token("auto")
    assert os.environ[AUTH_MODE] == "token"


def test_without_a_token_none_is_shown(found: Path) -> None:
    show_own_token("auto")
    assert AUTH_MODE not in os.environ


@pytest.mark.parametrize("address", ["local", "192.0.2.7:6379", "ray://head:10001"])
def test_a_cluster_whose_address_was_given_is_shown_no_token(found: Path, address: str) -> None:
    found.write_text("0" * 64)
    show_own_token(address)
    assert AUTH_MODE not in os.environ


def test_nor_is_one_that_the_environment_names(found: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found.write_text("0" * 64)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.7:6379")
    show_own_token("auto")
    assert AUTH_MODE not in os.environ


def test_who_has_chosen_a_mode_keeps_it(found: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found.write_text("0" * 64)
    monkeypatch.setenv(AUTH_MODE, "disabled")
    show_own_token("auto")
    assert os.environ[AUTH_MODE] == "disabled"
