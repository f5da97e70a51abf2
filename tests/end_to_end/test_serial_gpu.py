"""A serial run on the GPU of its process: on a device that is pretended, which gives the processor's bits."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.platform.results.tables import read_table
from tools.pretend_device import DEVICE

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("family", "shares"),
    [
        ("superfednas", [0, 0.5]),
        pytest.param("fedoras", [0.25, 0], marks=pytest.mark.slow),
        pytest.param("scaffold", [1, 1], marks=pytest.mark.slow),
        pytest.param("spider", [0.5], marks=pytest.mark.slow),
    ],
    indirect=["family"],
)
def test_a_gpu_of_this_process_gives_the_bits_of_a_run_without(
    family: str,
    tiny_overrides: list[str],
    shares: list[float],
    tmp_path: Path,
    assert_same_run: Callable[..., None],
    empty_tables: tuple[str, ...],
) -> None:
    fewer = ["data.train_samples=320", "data.num_clients=8"]
    fewer += ["method.train.rounds=2", "method.search.samples=10"] if family == "superfednas" else []
    once = {override.partition("=")[0]: override for override in (*tiny_overrides, *fewer)}.values()  # the last counts
    command = [sys.executable, "-m", "tools.pretend_device", json.dumps(shares), *once, f"results={tmp_path}"]
    paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    on_cpu, on_device = found["runs"]
    assert_same_run((tmp_path, on_cpu), (tmp_path, on_device), empty=empty_tables)
    clients = read_table(tmp_path, "clients", run_id=on_device)
    by_tier = {f"tier{i + 1}": DEVICE if share else "cpu" for i, share in enumerate(shares)}
    assert dict(zip(clients["tier"], clients["device"], strict=True)).items() <= by_tier.items()
    assert DEVICE in set(clients["device"])
    assert set(read_table(tmp_path, "clients", run_id=on_cpu)["device"]) == {"cpu"}
    assert 0 < found["uploads"] <= len(found["versions"]), "weights are uploaded once per version"
    assert max(found["copies_back"]) <= 2, "sums come back in one copy per type"
