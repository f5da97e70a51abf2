"""Where Ray is, found out without importing it."""

import os

LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0 before Ray is imported, Ray's servers listen on the loopback interface only (its default off Linux)."""


def resolve_address(address: str) -> str:
    """`auto` becomes the cluster that RAY_ADDRESS names or that runs on this machine, else `local`."""
    if address != "auto":
        return address
    return os.environ.get("RAY_ADDRESS") or _running_cluster() or "local"


def stay_on_loopback(address: str) -> None:
    """Keeps a cluster of our own off the network; call it before anything imports Ray."""
    if resolve_address(address) == "local":
        os.environ.setdefault(LOOPBACK_SWITCH, "0")


def _running_cluster() -> str | None:
    try:
        with open("/tmp/ray/ray_current_cluster") as file:
            return file.read().strip() or None
    except OSError:
        return None
