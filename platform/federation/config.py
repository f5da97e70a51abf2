"""A run's configuration: plain dataclasses, composed and checked in the driver, sent as they are."""

from dataclasses import dataclass, field
from typing import Any

from fedloom.platform.data.config import DataConfig
from fedloom.platform.spaces.space_config import SpaceConfig


@dataclass
class SeedsConfig:
    """Separate seeds per purpose; what is not given follows `seed`."""

    partition: int | None = None
    initialisation: int | None = None
    selection: int | None = None
    training: int | None = None
    search: int | None = None


@dataclass
class BudgetConfig:
    """How much of a tier's budget its clients have in a round: static, schedule (factors) or trace (states).

    `states` are rows of name, factor and probability.
    """

    kind: str = "static"
    factors: list[float] | None = None
    states: list[Any] | None = None


GENERATED = "generated"
"""The device table that is drawn, not read."""


@dataclass
class TiersConfig:
    """How the space is split into tiers, and the clients into them.

    Bounds come from `paths` random paths and the shares `rho_low`, `rho_high` (FedorAS, App. E.4), or are given in
    `upper_bounds` (in units of `cost`). The cost is one measure (macs, parameters, activation_bytes, latency_s) or,
    with `cost_weights` (+tiers.cost_weights.macs=1), a weighted sum of additive ones; operators named in `unsupported`
    cost infinity.
    Clients: `shares` per tier (equal if not given), or `clients` (the tier index of each), or `device_table` (a file,
    or `generated`: drawn from the partition's seed; see `max_step_s`, `step_batch_size` in fedloom.tiers.assignment).
    `num_gpus` is a client actor's share of a GPU per tier: 0, 1/k or whole; `num_cpus` its CPUs.
    """

    count: int = 4
    rho_low: float = 0.0
    rho_high: float = 0.95
    upper_bounds: list[float] | None = None
    paths: int = 100_000
    cost: str = "macs"
    cost_weights: dict[str, float] = field(default_factory=dict)
    unsupported: list[str] | None = None
    shares: list[float] | None = None
    clients: list[int] | None = None
    device_table: str | None = None
    max_step_s: float = 10.0
    step_batch_size: int = 32
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    num_gpus: list[float] | None = None
    num_cpus: list[float] | None = None


@dataclass
class DevicesConfig:
    """The simulated devices, one number for all tiers or one per tier; a device table goes before them.

    Without `macs_per_s` the top tier runs 2e10 MAC/s and the others in proportion to their budgets.
    `deadline_s` is in simulated seconds: who is later is left out of the round.
    """

    macs_per_s: list[float] | None = None
    down_bytes_per_s: float = 2.5e6
    up_bytes_per_s: float = 7.5e5
    availability: float = 1.0
    dropout: float = 0.0
    deadline_s: float | None = None


@dataclass
class FailuresConfig:
    """What a failed client means: stop the run, retry it up to `attempts`, or tolerate up to `max_share` of a round.

    An actor that dies is not a failed client: it is replaced and its work repeated, `actor_attempts` times at most.
    """

    policy: str = "stop"
    attempts: int = 2
    max_share: float = 0.2
    actor_attempts: int = 3


@dataclass
class ExecutorConfig:
    """Where the work runs: `ray` (client actors) or `serial` (this process).

    `actors` is their number on a machine without GPUs (one per CPU if not given); `chunk_size` consecutive clients go
    to an actor in one call; `threads` is torch's number per client and changes floating-point results, so it is the
    same for every executor. `client_timeout_s` is real time: a client that takes longer is reported and dropped.
    `resident` gives every client an actor of its own (cross-silo).
    """

    kind: str = "ray"
    actors: int | None = None
    resident: bool = False
    chunk_size: int = 1
    threads: int = 1
    client_timeout_s: float = 3600.0
    failures: FailuresConfig = field(default_factory=FailuresConfig)


@dataclass
class RayConfig:
    """How Ray is reached: `address` auto (a running cluster if there is one), local (always our own) or host:port.

    The limits hold for a cluster of our own: CPUs (all that this process may use), GPUs, and the object store (a fifth
    of the memory that is free).
    """

    address: str = "auto"
    num_cpus: int | None = None
    num_gpus: int = 0
    object_store_memory_bytes: int | None = None
    dashboard: bool = False


@dataclass
class CheckpointConfig:
    """Every how many rounds the state is saved (a crash loses at most the rounds since)."""

    every: int = 1


@dataclass
class RunConfig:
    """Everything that determines a run.

    With `dry_run` nothing is trained: who would do what is planned and counted, over all rounds of the training stages.
    With `reuse_supernet` a run begins with the trained supernet of an earlier one under the same results, if their
    configurations are the same up to there, and leaves its own for later ones; the training's rows are those of the run
    named `supernet_run_id` in table `runs`. `tensorboard` also writes event files, below the run's artefacts.
    `results` is a folder, or the URL of one on a filesystem that pyarrow reads: s3://bucket/path, gs://bucket/path.
    """

    experiment: str = "custom"
    seed: int = 1
    results: str = "results"
    dry_run: bool = False
    reuse_supernet: bool = False
    tensorboard: bool = False
    data: DataConfig = field(default_factory=DataConfig)
    space: SpaceConfig = field(default_factory=SpaceConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    method: Any = None
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    seeds: SeedsConfig = field(default_factory=SeedsConfig)

    def seed_for(self, purpose: str) -> int:
        """The seed of partition, initialisation, selection, training or search."""
        own: int | None = getattr(self.seeds, purpose)
        return self.seed if own is None else own
