"""A GPU's utilisation and memory as nvidia-smi sees them, sampled by one process of it for as long as a block runs."""

import os
import subprocess
import threading
import time

EVERY_MS = 200


class Utilisation:
    """Samples of the GPU that torch calls 0; none for other devices, or without nvidia-smi."""

    def __init__(self, device: str) -> None:
        self._samples: list[tuple[float, float, float]] = []
        self._process: subprocess.Popen[str] | None = None
        self._wanted = device == "cuda"

    def __enter__(self) -> "Utilisation":
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
        query = ["--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits", f"--id={first}"]
        if self._wanted:
            try:
                self._process = subprocess.Popen(
                    ["nvidia-smi", *query, f"--loop-ms={EVERY_MS}"], stdout=subprocess.PIPE, text=True
                )
            except OSError:
                return self
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None, "it is piped"
        for line in process.stdout:
            if (sample := sample_of(line)) is not None:
                self._samples.append((time.time(), *sample))

    def between(self, begun: float, ended: float) -> dict[str, float | None]:
        """Mean utilisation in percent and the largest memory in use, between two times of `time.time`."""
        return summed_up([(used, memory) for at, used, memory in self._samples if begun <= at <= ended])


def sample_of(line: str) -> tuple[float, float] | None:
    """Percent and bytes of a line of nvidia-smi, such as `37, 1024` (MiB); None for what is no sample."""
    try:
        used, memory_mib = (float(part) for part in line.split(","))
    except ValueError:  # [N/A], or a message
        return None
    return used, memory_mib * 2**20


def summed_up(samples: list[tuple[float, float]]) -> dict[str, float | None]:
    """The mean of the utilisations and the maximum of the memories; None if there are none."""
    if not samples:
        return {"utilisation": None, "device_bytes": None}
    return {
        "utilisation": sum(used for used, _ in samples) / len(samples),
        "device_bytes": max(memory for _, memory in samples),
    }
