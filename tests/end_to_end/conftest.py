"""A federation small enough to be run many times, what two runs are compared by, and a cluster to submit jobs to."""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest

from fedloom.actors.address import LOOPBACK_SWITCH
from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.results.checkpoint import load_checkpoint
from fedloom.platform.results.paths import find_run
from fedloom.platform.results.tables import TABLES, TIME_COLUMNS, read_table

RAY = str(Path(sys.executable).with_name("ray"))

TINY_CNN = [
    "ray.address=local",
    "ray.object_store_memory_bytes=200000000",
    "space.stem_channels=4",
    "space.stage_layers=[1,2]",
    "space.operators=['conv(1)','ds(3,.5)','mb(1,2)',identity]",
    "tiers.count=2",
    "tiers.paths=500",
    "executor.chunk_size=2",
]

SHORT = ["method.finetune.rounds=1", "method.rand_init.rounds=1"]

TINY = [
    "experiment=fedoras_digits",
    *TINY_CNN,
    "method.train.rounds=3",
    "method.train.epochs=2",
    "method.train.clients_per_round=6",
    "method.train.evaluate_every=2",
    "method.search.population=8",
    "method.search.offspring=6",
    "method.search.budget=18",
    "method.finetune.rounds=2",
    "method.finetune.epochs=1",
    "method.finetune.clients_per_round=4",
    "method.rand_init.rounds=2",
    "method.rand_init.epochs=1",
    "method.rand_init.clients_per_round=4",
    "method.evaluation.clients_per_tier=2",
]


TINY_ELASTIC = [
    "experiment=superfednas_digits",
    "ray.address=local",
    "ray.object_store_memory_bytes=200000000",
    "space.stage_widths=[16,24]",
    "space.stage_strides=[2,2]",
    "space.depths=[1,1]",
    "space.expansions=[0.5,1.0,1.5]",
    "space.norm=batch",
    "tiers.count=2",
    "tiers.paths=500",
    "executor.chunk_size=2",
    "method.train.rounds=4",
    "method.train.epochs=1",
    "method.train.clients_per_round=6",
    "method.train.evaluate_every=2",
    "method.train.distribution.tier_aware=true",
    "method.family=[smallest,largest]",
    "method.search.samples=20",
    "method.search.min_tau=-1",
    "method.search.population=10",
    "method.search.generations=3",
]

TINY_SPIDER = [
    "experiment=spider_digits",
    "ray.address=local",
    "ray.object_store_memory_bytes=200000000",
    "data.train_samples=200",
    "data.num_clients=3",
    "space.channels=4",
    "tiers.paths=100",
    "method.train.rounds=4",
    "method.train.evaluate_every=1",
]
TINY_SEARCH = ["method.search.start=1", "method.search.every=1"]

TINY_SILOS = [
    "data.dataset=digits",
    "data.alpha=0.2",
    "data.validation_share=0.25",
    "tiers.count=1",
    "method.train.batch_size=16",
    *(o for o in TINY_SPIDER if "experiment" not in o),
]

TINY_PERSONAL = [
    *(o for o in TINY_CNN if not o.startswith("tiers.count")),
    "method.train.rounds=4",
    "method.train.epochs=2",
    "method.train.clients_per_round=6",
    "method.train.evaluate_every=2",
]

TINY_SMALL_SILOS = [
    *(o for o in TINY_SPIDER if not o.startswith(("experiment", "space"))),
    "space.stage_widths=[4,8]",
]

TINY_FEDAVG = [
    "experiment=fedavg_digits",
    *TINY_CNN,
    "method.train.rounds=4",
    "method.train.epochs=2",
    "method.train.clients_per_round=6",
    "method.train.evaluate_every=2",
    "method.train.momentum=0.0",
]
DEVICES = [
    *("tiers.device_table=generated", "method.train.options.exploration=0.5", "devices.jitter=0.3"),
    *("devices.availability_table=generated", "devices.availability_period_s=5", "devices.availability_share=0.8"),
    "devices.server_bytes_per_s=1e6",
]

TINY_WIDTHS = [
    *(o for o in TINY_FEDAVG if not o.startswith(("experiment", "space", "tiers.count"))),
    "space.stage_widths=[12,16,24]",
    "tiers.upper_bounds=[5000,15000,30000,60000]",
]

TINY_ADAPTERS = [
    *(o for o in TINY_FEDAVG if not o.startswith(("experiment", "space", "tiers.count"))),
    *("experiment=heterofl_vit_digits", "space.widths=[1.0]", "space.embedding_size=8", "space.attention_heads=2"),
    *("space.lora.ranks=[1,2,4]", "space.lora.layers=[stages.*]", "space.lora.trained=[head.*]"),
    *("space.lora.merged=true", "tiers.upper_bounds=[71248,76368,86608]"),
]

KEPT_ADAM = ["method.train.optimizer=adamw", "method.train.lr=0.01", "method.train.optimizer_state=kept"]
PRIVATE = ["clip=0.5", "noise=0.2", "weight_cap=100"]

COMPARED = {
    "scaffold": [*TINY_FEDAVG, "method.train.local_rule=scaffold", "method.train.selection=oort", *DEVICES],
    "feddyn": [*TINY_FEDAVG, "method.train.local_rule=feddyn", "method.train.server=feddyn"],
    "fednova": [
        *TINY_FEDAVG,
        "method.train.local_rule=fednova",
        "method.train.server=fednova",
        "method.train.selection=pyramidfl",
        *DEVICES,
    ],
    "zerofl": [*(o.replace("fedavg", "zerofl") for o in TINY_FEDAVG), "method.train.selection=round_robin"],
    "heterofl": ["experiment=heterofl_digits", *TINY_WIDTHS, "method.dynamic=true"],
    "fjord": ["experiment=fjord_digits", *TINY_WIDTHS, "method.train.selection=power_of_choice"],
    "fedrolex": ["experiment=fedrolex_digits", *TINY_WIDTHS, "method.train.selection=tier_quota"],
    "feddf": ["experiment=feddf_digits", *TINY_WIDTHS, "method.distillation.steps=3"],
    "splitmix": [
        "experiment=splitmix_digits",
        *(o for o in TINY_WIDTHS if "bounds" not in o),
        "tiers.upper_bounds=[5000,10000,14000,20000]",
    ],
    "fedmask": ["experiment=fedmask_digits", *TINY_SMALL_SILOS, "space.norm=batch", "method.train.kept=0.6"],
    "pfedme": ["experiment=pfedme_digits", *TINY_SMALL_SILOS, "method.train.beta=2"],
    "depthfl": [
        "experiment=depthfl_digits",
        *(o for o in TINY_WIDTHS if "space" not in o and "bounds" not in o),
        "space.stage_widths=[4,6,8,10]",
        "tiers.upper_bounds=[15000,22000,25000,30000]",
    ],
    "robust": [
        *(o for o in TINY_ELASTIC if not o.startswith(("method.search", "method.family"))),
        *("method.family=[smallest]", "method.search.samples=0", "method.train.min_contributors=2"),
        *("method.train.aggregator=rfa", "attack.share=0.3", "attack.name=alie", "attack.options.z=1.0"),
    ],
    "fedbuff": [
        *(o for o in TINY_ELASTIC if not o.startswith(("method.search", "method.family", "method.train.rounds"))),
        *("method.family=[smallest]", "method.search.samples=0", "method.train.rounds=6", "devices.dropout=0.2"),
        *("method.train.asynchronous=fedbuff", "method.train.arrivals=3", "method.train.max_staleness=2"),
        *("method.train.aggregator=rfa", "attack.share=0.3", "attack.name=alie", "attack.options.z=1.0"),
        *("method.train.processors=[qsgd]", "method.train.options.direction=both", "devices.macs_per_s=[1e9,4e9]"),
    ],
    "fedasync": [
        *(o for o in TINY_FEDAVG if "rounds" not in o and "momentum" not in o),
        *("method.train.rounds=12", "method.train.asynchronous=fedasync", "method.train.arrivals=1"),
        *("method.train.processors=[top_k]", "tiers.device_table=generated", "devices.deadline_s=0.004"),
        *("devices.availability_table=generated", "devices.availability_period_s=0.02"),
        *KEPT_ADAM,
    ],
    "over_selected": [*TINY_FEDAVG, "method.train.arrivals=4", "tiers.device_table=generated"],
    "hetlora": ["method=hetlora", *TINY_ADAPTERS, "method.penalty=2.0"],
    "flexlora": ["method=flexlora", *TINY_ADAPTERS],
    "flora": ["method=flora", *TINY_ADAPTERS],
    "compressed": [
        *("experiment=heterofl_digits", *TINY_WIDTHS, "method.dynamic=true", "method.train.processors=[top_k,qsgd]"),
        *("method.train.options.share=0.2", "method.train.options.direction=both"),
    ],
    "transformers": [
        "experiment=superfednas_vit_digits",
        *(o for o in TINY_CNN if not o.startswith("space")),
        "space.embedding_size=8",
        "space.dropout=0.1",
        "data.partition=shards",
        "data.noise=0.1",
        "method.train.rounds=3",
        "method.train.epochs=2",
        "method.train.clients_per_round=6",
        "method.train.local_warmup_steps=1",
        "method.train.local_cosine_to=0.1",
        "method.search.samples=0",
        *KEPT_ADAM,
    ],
    "scalefl": [
        "experiment=scalefl_digits",
        *(o for o in TINY_WIDTHS if "space" not in o and "bounds" not in o),
        "space.stage_widths=[6,8,10,12]",
        "tiers.upper_bounds=[22000,33000,40000,50000]",
    ],
    "ofa": [
        *(o for o in TINY_ELASTIC if not o.startswith(("experiment", "method.search", "method.train.dist"))),
        "experiment=ofa_digits",
        "method.train.rounds=5",
        "method.train.depth_share=0.2",
        "method.search.samples=0",
    ],
    "secure": [*TINY_FEDAVG, "method.train.privacy.secure=true", "devices.dropout=0.2"],
    "private": [
        *TINY,
        *SHORT,
        "method.train.min_contributors=1",
        *(f"method.train.privacy.{o}" for o in PRIVATE),
        *KEPT_ADAM,
    ],
}
"""The methods that others are compared with; most also have a selection rule of their own."""

TINY_RUNS = {
    **COMPARED,
    "spider": [*TINY_SPIDER, *TINY_SEARCH, "method.gains.epochs=1", "method.gains.clients=2"],
    "milenas": [*TINY_SPIDER, "method.search.kind=milenas", "method.search.rounds=2"],
    "fedpnas": ["method=fedpnas", "space.name=darts_s2_small", *TINY_SILOS, *TINY_SEARCH],
    "fedmn": ["method=fedmn", "space.name=darts_s2_small", *TINY_SILOS, "method.train.pretraining_rounds=1"],
    "personal_layers": ["experiment=fedrep_digits", *TINY_PERSONAL, "method.train.personal_epochs=1"],
    "apfl": ["experiment=apfl_digits", *TINY_PERSONAL],
    "fedproto": ["experiment=fedproto_digits", *TINY_PERSONAL],
    "stopped": [
        *("experiment=apfl_digits", *TINY_PERSONAL, "method.train.use_validation=false", "method.train.rounds=6"),
        *("method.train.evaluate_every=1", "stop.patience=1"),
    ],
    "stopped_tiers": [
        *(*TINY, "method.train.rounds=6", "method.train.evaluate_every=1", "method.finetune.evaluate_every=1"),
        *("method.finetune.rounds=4", "method.rand_init.evaluate_every=1", "stop.metric=loss", "stop.patience=1"),
    ],
    "fedoras": TINY,
    "superfednas": TINY_ELASTIC,
    "multi_stage": [
        *(o for o in TINY_ELASTIC if "tier_aware" not in o),
        "method.train.travels=supernet",
        "method.train.shrinking.subnets_per_batch=2",
    ],
}


@pytest.fixture
def family(request: pytest.FixtureRequest) -> str:
    """Which of `TINY_RUNS` is run."""
    return str(getattr(request, "param", "fedoras"))


@pytest.fixture
def empty_tables(family: str) -> tuple[str, ...]:
    """The tables that a family's runs write nothing to."""
    if family in ("pfedme", "fedmask"):
        return ("candidates", "models")
    if family in COMPARED:
        return () if family == "private" else ("candidates",)
    return () if family in ("fedoras", "superfednas", "multi_stage", "stopped_tiers") else ("candidates", "models")


@pytest.fixture
def tiny_overrides(family: str) -> list[str]:
    """The command line of `tiny`, without its results folder."""
    return list(TINY_RUNS[family])


@pytest.fixture
def tiny(tmp_path: Path, tiny_overrides: list[str]) -> Callable[..., RunConfig]:
    """A configuration with all stages of a method in a few seconds; overrides may follow."""

    def make(*overrides: str) -> RunConfig:
        return compose_config([*tiny_overrides, f"results={tmp_path / 'results'}", *overrides])

    return make


Run = tuple[Path | str, str]
"""A folder of results and a run's name in it."""
Rows = dict[str, pd.DataFrame]


@pytest.fixture(scope="session")
def rows_of() -> Callable[[Path | str, str], Rows]:
    """All tables of a run without what measures real time, and without its name."""

    def read(results: Path | str, run_id: str) -> Rows:
        tables = {}
        for table in TABLES:
            frame = read_table(Path(results), table, run_id=run_id)
            aside = {"run_id", "experiment", *TIME_COLUMNS[table]} | ({"config"} if table == "runs" else set())
            tables[table] = frame.drop(columns=[c for c in frame.columns if c in aside])
        return tables

    return read


@pytest.fixture(scope="session")
def assert_same_run(rows_of: Callable[[Path | str, str], Rows]) -> Callable[..., None]:
    """Two runs have the same rows and the same final weights, bit for bit."""

    def check(first: Run, second: Run, empty: tuple[str, ...] = ()) -> None:
        a, b = rows_of(*first), rows_of(*second)
        for table in TABLES:
            assert (len(a[table]) > 0) != (table in empty), f"table {table} has {len(a[table])} rows"
            pd.testing.assert_frame_equal(a[table], b[table], check_exact=True, obj=table)
        groups = [load_checkpoint(find_run(Path(results), run).checkpoint).groups for results, run in (first, second)]
        assert groups[0].keys() == groups[1].keys()
        for name in groups[0]:
            for tensor, value in groups[0][name].tensors.items():
                other = groups[1][name].tensors[tensor]
                assert value.numpy().tobytes() == other.numpy().tobytes(), f"{name}: {tensor} differs"

    return check


@dataclass(frozen=True)
class Cluster:
    """Where the cluster is, and the environment of somebody who may use it."""

    gcs: str
    dashboard: str
    environment: dict[str, str]
    token: str = field(repr=False)

    def ask(self, path: str, method: str = "GET") -> Any:
        """What the dashboard answers to somebody who has the token."""
        request = urllib.request.Request(f"{self.dashboard}/api/{path}", method=method)
        request.add_header("Authorization", f"Bearer {self.token}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def with_token(self, file: Path) -> dict[str, str]:
        """The environment of somebody who holds another token."""
        return {**self.environment, "RAY_AUTH_TOKEN_PATH": str(file)}


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def start_command(ports: list[int], temporary: Path) -> list[str]:
    gcs, dashboard, client, agent, agent_grpc, environments, objects, manager, metrics, *workers = ports
    return [
        *(RAY, "start", "--head", "--block", "--disable-usage-stats", "--node-ip-address=127.0.0.1"),
        *(f"--port={gcs}", f"--temp-dir={temporary}", "--num-cpus=2", "--object-store-memory=200000000"),
        *("--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
        *(f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}"),
        *(f"--ray-client-server-port={client}", f"--runtime-env-agent-port={environments}"),
        *(f"--object-manager-port={objects}", f"--node-manager-port={manager}", f"--metrics-export-port={metrics}"),
        f"--worker-port-list={','.join(map(str, workers))}",
    ]


JOIN = [
    *(RAY, "start", "--block", "--disable-usage-stats", "--node-ip-address=127.0.0.1"),
    *("--num-cpus=2", "--object-store-memory=200000000"),
]


def wait_for_dashboard(address: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float = 90.0) -> None:
    """Returns when the dashboard answers, be it with a refusal."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        assert process.poll() is None, f"ray start ended: {log.read_text()[-2000:]}"
        try:
            urllib.request.urlopen(address, timeout=2).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"no dashboard at {address}")


def end_cluster(process: subprocess.Popen[bytes]) -> None:
    """Kills `ray start` and what it started, by process id: other clusters on this machine are not ours."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=15)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of one node with token authentication, as a person would start it, for the tests of one module."""
    with started_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The same with a second node, which shares the first one's session folder, as Ray has it on one machine."""
    with started_cluster(tmp_path_factory.mktemp("cluster"), nodes=2) as cluster:
        yield cluster


@contextmanager
def started_cluster(folder: Path, nodes: int = 1) -> Iterator[Cluster]:
    """A cluster of nodes of two CPUs each; several cannot be on the loopback interface only, says Ray."""
    token_file = folder / "token"
    token = secrets.token_hex(32)
    token_file.write_text(token)
    token_file.chmod(0o600)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}
    # As somebody has it who activated the environment: a job's `python` is the one on the cluster's path.
    environment["PATH"] = f"{Path(RAY).parent}{os.pathsep}{environment['PATH']}"
    # Ray's sockets lie in it, and their paths are limited to about a hundred characters.
    temporary = Path(tempfile.mkdtemp(prefix="fl", dir="/tmp"))
    ports = free_ports(9 + 24)
    cluster = Cluster(f"127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}", environment, token)
    rays = {**environment, LOOPBACK_SWITCH: "0"} if nodes == 1 else environment
    log, processes = folder / "ray.log", list[subprocess.Popen[bytes]]()

    def start(command: list[str]) -> None:
        with log.open("ab") as output:
            started = subprocess.Popen(command, env=rays, stdout=output, stderr=output, start_new_session=True)
            processes.append(started)

    try:
        start(start_command(ports, temporary))
        wait_for_dashboard(cluster.dashboard, processes[0], log)
        for _ in range(1, nodes):
            start([*JOIN, f"--address={cluster.gcs}"])
        end_s = time.monotonic() + 120
        while nodes > 1 and len(cluster.ask("v0/nodes")["data"]["result"]["result"]) < nodes:
            assert time.monotonic() < end_s, f"nodes did not come up: {log.read_text()[-2000:]}"
            time.sleep(0.5)
        yield cluster
    finally:
        for process in reversed(processes):
            end_cluster(process)
        # A job's environment in it is a copy of this one, of gigabytes: nobody waits until that is deleted.
        subprocess.Popen(["rm", "-rf", str(temporary)])
