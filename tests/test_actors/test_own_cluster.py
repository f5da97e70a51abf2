"""A cluster of our own as the command line starts it: on the loopback interface, and CPU actors stay on the CPU."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("no_ray_cluster")]

LISTENERS = """
STRANGER = '''
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).get_all_node_info(timeout=10)
    print("let in")
except Exception as error:
    print(type(error).__name__)
'''
from fedloom.actors.address import stay_on_loopback
stay_on_loopback("local")
import json, os, subprocess, sys
from pathlib import Path
from fedloom.actors.cluster import connected
from fedloom.platform.federation.config import RayConfig
import ray, psutil

def listening(processes):
    inodes = set()
    for process in processes:
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                target = os.readlink(entry)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                found.append(columns[1].split(":")[0])
    return found

config = RayConfig(address="local", num_cpus=1, object_store_memory_bytes=100_000_000)
with connected(config):
    @ray.remote(num_cpus=1)
    def work():
        return 1
    ray.get(work.remote())
    me = psutil.Process()
    found = listening([me, *me.children(recursive=True)])
    resources = ray.cluster_resources()
    stranger = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    asks = [sys.executable, "-c", STRANGER, ray.get_runtime_context().gcs_address]
    said = subprocess.run(asks, env=stranger, capture_output=True, text=True).stdout.strip()
store = resources["object_store_memory"]
print(json.dumps({"stranger": said, "addresses": found, "cpus": resources["CPU"], "store": store}))
"""

LOOPBACK = {
    "0100007F",  # 127.0.0.1
    "00000000000000000000000001000000",  # ::1
    "0000000000000000FFFF00000100007F",  # ::ffff:127.0.0.1
}


def in_a_process(code: str, **environment: str) -> dict[str, object]:
    """What a fresh interpreter prints as JSON on its last line."""
    clean = {n: v for n, v in os.environ.items() if not n.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_our_own_cluster_listens_on_the_loopback_interface_only() -> None:
    found = in_a_process(LISTENERS)
    addresses = found["addresses"]
    assert isinstance(addresses, list)
    assert len(addresses) > 3, "Ray's sockets were not found"
    assert set(addresses) <= LOOPBACK
    assert found["stranger"] == "AuthenticationError", "who holds no token is let in"
    assert found["cpus"] == 1.0
    assert found["store"] == 100_000_000.0


DEVICE = """
from fedloom.actors.address import stay_on_loopback
stay_on_loopback("local")
import json
from fedloom.actors.client import assigned_device
from fedloom.actors.cluster import connected
from fedloom.platform.federation.config import RayConfig
import ray, torch

class Sees:
    def device(self):
        # As on a machine whose GPU is visible in spite of num_gpus=0.
        torch.cuda.is_available = lambda: True
        return assigned_device(0.0)

with connected(RayConfig(address="local", num_cpus=1, object_store_memory_bytes=100_000_000)):
    actor = ray.remote(num_cpus=1, num_gpus=0)(Sees).remote()
    print(json.dumps({"device": ray.get(actor.device.remote(), timeout=60)}))
"""


@pytest.mark.parametrize("override", ["0", "1"])
def test_a_cpu_actor_stays_on_the_cpu_whatever_ray_hides(override: str) -> None:
    assert in_a_process(DEVICE, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=override) == {"device": "cpu"}
