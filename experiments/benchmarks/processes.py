"""Processes of benchmarks: reads what they print, and measures their memory with that of all descendants.

Memory is the proportional set size, in which shared pages count once.
"""

import json
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RAY_OWN = ("gcs_server", "dashboard", "log_monitor", "monitor.py", "runtime_env", "agent.py", "plasma")
"""Parts of the command lines of Ray's own processes."""
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Process titles of Ray's agents once they are running; actors have titles, too."""


def printed(command: Sequence[str]) -> Any:
    """The JSON that a command prints on its last line; ends this process if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def descendants(pid: int) -> list[int]:
    """The ids of the process and all of its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    pids, todo = [], [pid]
    while todo:
        pids.append(todo.pop())
        todo += parents.get(pids[-1], [])
    return pids


def pss_bytes(pid: int) -> int:
    """Proportional set size of one process; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    line = next((line for line in text.splitlines() if line.startswith("Pss:")), "Pss: 0 kB")
    return int(line.split()[1]) * 1024


def mapped_data_bytes(pid: int) -> int:
    """The part of `pss_bytes` in mapped files of prepared data (.npy), which the kernel drops when it needs room."""
    size_bytes, is_data = 0, False
    try:
        with open(f"/proc/{pid}/smaps") as lines:
            for line in lines:
                if line[0] in "0123456789abcdef":
                    is_data = line.rstrip().endswith(".npy")
                elif is_data and line.startswith("Pss:"):
                    size_bytes += int(line.split()[1]) * 1024
    except OSError:
        return 0
    return size_bytes


def is_rays_own(pid: int) -> bool:
    """Whether the process belongs to Ray itself, not to a driver, server or client actor."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return False
    if command.startswith(RAY_AGENTS) or command.split(" ", 1)[0].endswith("/raylet"):
        return True
    return any(mark in command for mark in RAY_OWN) and "default_worker.py" not in command


class MemoryWatch:
    """Samples the memory of a process tree during the block; keeps the peaks of fedloom's and Ray's own processes.

    `data_bytes` is the part of fedloom's peak that is mapped data.
    """

    def __init__(self, pid: int, every_s: float = 0.3) -> None:
        self.pid, self.every_s = pid, every_s
        self.peak_bytes = self.ray_bytes = self.data_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(self.every_s):
            by_pid = {pid: pss_bytes(pid) for pid in descendants(self.pid)}
            ray = sum(size for pid, size in by_pid.items() if is_rays_own(pid))
            fedloom = sum(by_pid.values()) - ray
            if fedloom > self.peak_bytes:
                self.peak_bytes = fedloom
                self.data_bytes = sum(mapped_data_bytes(pid) for pid in by_pid)
            self.ray_bytes = max(self.ray_bytes, ray)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
