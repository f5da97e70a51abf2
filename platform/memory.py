"""Peak memory of the present process or device, measured over one piece of work."""

from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new measurement; on the CPU Linux's resident high-water mark is set back."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        with CLEAR.open("w") as clear:
            clear.write("5")
    except OSError:
        # Without the right to reset it, the mark is the process's peak so far: an upper bound.
        return


def peak_memory_bytes(device: torch.device) -> int:
    """Peak since the last reset: allocated device memory on a GPU, the process's resident set on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = STATUS.read_bytes()
    except OSError:
        return 0
    at = status.find(b"VmHWM:")
    return int(status[at + 6 : status.find(b"kB", at)]) * 1024 if at >= 0 else 0
