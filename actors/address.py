"""Finds the address of the Ray cluster, and whether anything listens there, without importing Ray."""

import ipaddress
import logging
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable: if it is 0 when Ray is imported, Ray's servers listen on the loopback interface only.

Ray's default is 0 on Windows and macOS.
"""


AUTH_MODE = "RAY_AUTH_MODE"
"""Environment variable: whether Ray shows a token to a cluster that it connects to (token or disabled)."""


def resolve_address(address: str) -> str:
    """Replaces `auto` by RAY_ADDRESS, else by the cluster that runs on this machine, else by `local`."""
    if address != "auto":
        return address
    return os.environ.get("RAY_ADDRESS") or _running_cluster() or "local"


def check_listening(address: str, timeout_s: float = 5.0) -> None:
    """Raises ConnectionError if nothing listens at HOST:PORT, where Ray itself would go on trying for minutes.

    Other addresses (`local`, names without a port) are left to Ray.
    """
    host_and_port = _host_and_port(address)
    if host_and_port is None:
        return
    try:
        socket.create_connection(host_and_port, timeout=timeout_s).close()
    except OSError as error:
        cause = error.strerror or f"no answer within {timeout_s:g} s"
        raise ConnectionError(
            f"no Ray at {address!r}: {cause.lower()}; start it there (ray start --head), give the HOST:PORT that it "
            "printed, or use a cluster of this run's own: ray.address=local"
        ) from error


def before_ray(address: str) -> None:
    """Sets what Ray reads from the environment when it is imported, so that the cluster at this address is reached."""
    stay_on_loopback(address)
    show_own_token(address)
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)  # in a notebook it asks for ipywidgets


def show_own_token(address: str) -> None:
    """Shows this machine's token to the cluster that `auto` finds on this machine, as `ray.init()` itself does.

    `ray start` asks for the token if there is one, and the first cluster that fedloom starts makes one. At an address
    that the user gives, Ray shows no token unless told to, and neither does fedloom: the cluster may be a stranger's.
    """
    is_found_here = address == "auto" and not os.environ.get("RAY_ADDRESS") and _running_cluster() is not None
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(named) if named else Path("~/.ray/auth_token").expanduser()
    if is_found_here and (os.environ.get("RAY_AUTH_TOKEN") or file.is_file()):
        os.environ.setdefault(AUTH_MODE, "token")


def stay_on_loopback(address: str) -> None:
    """Keeps a cluster that fedloom starts itself off the network, and finds one that was started in this way.

    Must be called before Ray is imported: without the switch Ray looks for a cluster of the loopback interface on the
    network, silently and for minutes.
    """
    resolved = resolve_address(address)
    if resolved == "local" or _is_on_loopback_only(resolved):
        os.environ.setdefault(LOOPBACK_SWITCH, "0")


def _host_and_port(address: str) -> tuple[str, int] | None:
    try:
        url = urlsplit(address if "://" in address else f"ray://{address}")
        return None if url.hostname is None or url.port is None else (url.hostname, url.port)
    except ValueError:
        return None


def _is_on_loopback_only(address: str) -> bool:
    """Whether the port is open on the loopback interface, and closed on the network's."""
    host, port = _host_and_port(address) or ("", 0)
    on_network = _network_address()
    return _is_loopback(host) and _answers(host, port) and (on_network is None or not _answers(on_network, port))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _network_address() -> str | None:
    """The address from which this machine would reach others; None without a network. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        host = str(probe.getsockname()[0])
    return None if _is_loopback(host) else host


def _answers(host: str, port: int, timeout_s: float = 2.0) -> bool:
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def _running_cluster() -> str | None:
    try:
        with open("/tmp/ray/ray_current_cluster") as file:
            return file.read().strip() or None
    except OSError:
        return None
