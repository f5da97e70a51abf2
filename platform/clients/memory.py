"""Peak memory of the current process or device during one task."""

import os
from functools import cache

import torch


@cache
def _proc(name: str, flags: int, pid: int) -> int | None:
    """The descriptor of a file of /proc, opened once: opening it per client costs more than reading it."""
    try:
        return os.open(f"/proc/{pid}/{name}", flags)
    except OSError:
        return None


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new measurement; on the CPU it resets Linux's high-water mark of the resident set.

    Without permission to reset it, the measurement is the process's peak so far, an upper bound.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    clear = _proc("clear_refs", os.O_WRONLY, os.getpid())
    if clear is not None:
        os.pwrite(clear, b"5", 0)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak bytes since the last reset: allocated device memory on a GPU, the process's resident set on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    file = _proc("status", os.O_RDONLY, os.getpid())
    if file is None:
        return 0
    status = os.pread(file, 4096, 0)
    at = status.find(b"VmHWM:")
    return int(status[at + 6 : status.find(b"kB", at)]) * 1024 if at >= 0 else 0
