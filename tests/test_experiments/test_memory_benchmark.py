"""A silo that holds two models needs less than the paper's 2.2 times the memory of one."""

import subprocess
import sys
from collections.abc import Sequence

SMALL = ["space.cells=4", "space.nodes=2", "space.channels=8"]


def peak_bytes(cases: Sequence[str]) -> list[int]:
    """The peaks of these cases, each in a process of its own, all at the same time."""
    command = [sys.executable, "-m", "fedloom.experiments.benchmarks.memory", *SMALL, "--case"]
    pipe = subprocess.PIPE
    started = [subprocess.Popen([*command, case], stdout=pipe, stderr=pipe, text=True) for case in cases]
    said = [process.communicate() for process in started]
    for process, (_, errors) in zip(started, said, strict=True):
        assert process.returncode == 0, errors
    return [int(output.splitlines()[-1]) for output, _ in said]


def test_spiders_pair_takes_at_most_2_2_times_the_memory_of_the_supernet() -> None:
    alone, pair = peak_bytes(["supernet", "spider"])
    assert alone > 20e6, "activations of a batch alone are more"
    assert pair <= 2.2 * alone
