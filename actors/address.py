"""Finds the address of the Ray cluster without importing Ray."""

import os

LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable: if it is 0 when Ray is imported, Ray's servers listen on the loopback interface only.

Ray's default is 0 on Windows and macOS.
"""


def resolve_address(address: str) -> str:
    """Replaces `auto` by RAY_ADDRESS, else by the cluster that runs on this machine, else by `local`."""
    if address != "auto":
        return address
    return os.environ.get("RAY_ADDRESS") or _running_cluster() or "local"


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
