"""Finds the address of the Ray cluster, and whether anything listens there, without importing Ray."""

import os
import socket
from urllib.parse import urlsplit

LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable: if it is 0 when Ray is imported, Ray's servers listen on the loopback interface only.

Ray's default is 0 on Windows and macOS.
"""


def resolve_address(address: str) -> str:
    """Replaces `auto` by RAY_ADDRESS, else by the cluster that runs on this machine, else by `local`."""
    if address != "auto":
        return address
    return os.environ.get("RAY_ADDRESS") or _running_cluster() or "local"


def check_listening(address: str, timeout_s: float = 5.0) -> None:
    """Raises ConnectionError if nothing listens at HOST:PORT, where Ray itself would go on trying for minutes.

    Other addresses (`local`, names without a port) are left to Ray.
    """
    try:
        place = urlsplit(address if "://" in address else f"ray://{address}")
        host, port = place.hostname, place.port
    except ValueError:
        return
    if host is None or port is None:
        return
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError as error:
        cause = error.strerror or f"no answer within {timeout_s:g} s"
        raise ConnectionError(
            f"no Ray at {address!r}: {cause.lower()}; start it there (ray start --head), give the HOST:PORT that it "
            "printed, or use a cluster of this run's own: ray.address=local"
        ) from error


def stay_on_loopback(address: str) -> None:
    """Keeps a cluster that fedloom starts itself off the network; must be called before Ray is imported."""
    if resolve_address(address) == "local":
        os.environ.setdefault(LOOPBACK_SWITCH, "0")


def _running_cluster() -> str | None:
    try:
        with open("/tmp/ray/ray_current_cluster") as file:
            return file.read().strip() or None
    except OSError:
        return None
