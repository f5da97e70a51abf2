"""A silo that holds two models needs less than the paper's 2.2 times the memory of one."""

import subprocess
import sys

import pytest

SMALL = ["space.cells=4", "space.nodes=2", "space.channels=8"]


def peak_bytes(case: str) -> int:
    command = [sys.executable, "-m", "fedloom.experiments.benchmarks.memory", "--case", case, *SMALL]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_spiders_pair_takes_at_most_2_2_times_the_memory_of_the_supernet() -> None:
    alone, pair = peak_bytes("supernet"), peak_bytes("spider")
    assert alone > 20e6, "activations of a batch alone are more"
    assert pair <= 2.2 * alone
