"""A run's configuration: plain dataclasses, composed and checked in the driver, sent as they are."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from fedloom.platform.data.config import DataConfig
from fedloom.platform.settings import ONE_OR_MORE, PART, POSITIVE, SHARE, ZERO_OR_MORE, Brought, OneOf, Range
from fedloom.platform.spaces.space_config import SpaceConfig


@dataclass
class ObjectiveConfig:
    """What clients minimise and what is measured."""

    name: Annotated[str, Brought("objective"), "loss, metric, and which targets count"] = "classification"
    options: Annotated[dict[str, Any], "the objective's own options, by name"] = field(default_factory=dict)


@dataclass
class SeedsConfig:
    """Separate seeds per purpose; what is not given follows `seed`."""

    partition: Annotated[int | None, "of who gets which samples, and of devices and tiers"] = None
    initialisation: Annotated[int | None, "of the first weights"] = None
    selection: Annotated[int | None, "of who takes part, and of devices that drop out"] = None
    training: Annotated[int | None, "of what clients draw: order of samples, paths, dropout"] = None
    search: Annotated[int | None, "of the search"] = None


@dataclass
class BudgetConfig:
    """How much of a tier's budget its clients have in a round."""

    kind: Annotated[str, Brought("budget"), "static (all of it), schedule (factors by round) or trace (states)"] = (
        "static"
    )
    factors: Annotated[list[float] | None, "schedule: the share of the budget by round, repeated"] = None
    states: Annotated[list[Any] | None, "trace: rows of name, factor and probability"] = None
    options: Annotated[dict[str, Any], "the options of a budget of your own, by name"] = field(default_factory=dict)


GENERATED = "generated"
"""The device table that is drawn, not read."""


@dataclass
class TiersConfig:
    """How the space is split into tiers, and the clients into them.

    Bounds come from `paths` random paths and the shares `rho_low`, `rho_high` (FedorAS, App. E.4), or are given in
    `upper_bounds`.
    """

    count: Annotated[int, ONE_OR_MORE, "tiers"] = 4
    rho_low: Annotated[float, PART, "share of random paths below the first inner bound"] = 0.0
    rho_high: Annotated[float, PART, "share of random paths below the last inner bound"] = 0.95
    upper_bounds: Annotated[list[float] | None, POSITIVE, "upper bounds in units of cost, instead of rho"] = None
    paths: Annotated[int, ONE_OR_MORE, "random paths that the bounds are computed from"] = 100_000
    cost: Annotated[str, "what budgets are given in: one of macs, parameters, activation_bytes, latency_s"] = "macs"
    cost_weights: Annotated[
        dict[str, float], ZERO_OR_MORE, "a weighted sum of additive costs instead: tiers.cost_weights.macs=1"
    ] = field(default_factory=dict)
    unsupported: Annotated[list[str] | None, "operators that cost infinity"] = None
    shares: Annotated[list[float] | None, PART, "share of the clients per tier; null: equal"] = None
    clients: Annotated[list[int] | None, ZERO_OR_MORE, "the tier's index of each client, instead of shares"] = None
    device_table: Annotated[
        str | None,
        "a file of devices (CSV, Parquet) or generated (by the partition's seed), instead of shares",
    ] = None
    max_step_s: Annotated[float, POSITIVE, "device tables: seconds that a training step may take in a tier"] = 10.0
    step_batch_size: Annotated[int, ONE_OR_MORE, "device tables: samples of that step"] = 32
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    num_gpus: Annotated[
        list[float] | None, ZERO_OR_MORE, "a client actor's share of a GPU per tier: 0, 1/k or whole; null: none"
    ] = None
    num_cpus: Annotated[list[float] | None, ZERO_OR_MORE, "a client actor's CPUs per tier; null: 1"] = None


@dataclass
class DevicesConfig:
    """The simulated devices, one number for all tiers or one per tier; a device table goes before them."""

    macs_per_s: Annotated[
        list[float] | None, POSITIVE, "speed; null: 2e10 in the top tier, the others in proportion to their budgets"
    ] = None
    down_bytes_per_s: Annotated[float, POSITIVE, "speed of receiving"] = 2.5e6
    up_bytes_per_s: Annotated[float, POSITIVE, "speed of sending"] = 7.5e5
    availability: Annotated[float, SHARE, "probability that a device can be reached in a round"] = 1.0
    dropout: Annotated[float, PART, "probability that a device drops out of a round"] = 0.0
    deadline_s: Annotated[
        float | None, POSITIVE, "simulated seconds after which a client is left out of its round; null: never"
    ] = None


POLICIES = ("stop", "retry", "tolerate")


@dataclass
class FailuresConfig:
    """What a failed client means.

    An actor that dies is not a failed client: it is replaced and its work repeated, `actor_attempts` times at most.
    """

    policy: Annotated[
        str, OneOf(POLICIES), "stop the run, retry the client up to attempts, or tolerate up to max_share of a round"
    ] = "stop"
    attempts: Annotated[int, ONE_OR_MORE, "retry: times that a client is tried"] = 2
    max_share: Annotated[float, PART, "tolerate: share of a round's clients that may fail"] = 0.2
    actor_attempts: Annotated[int, ONE_OR_MORE, "times that the work of an actor that died is tried"] = 3


EXECUTORS = ("ray", "serial")


@dataclass
class ExecutorConfig:
    """Where the work runs."""

    kind: Annotated[str, OneOf(EXECUTORS), "ray (client actors) or serial (this process)"] = "ray"
    actors: Annotated[int | None, ONE_OR_MORE, "client actors on a machine without GPUs; null: one per CPU"] = None
    resident: Annotated[bool, "every client has an actor of its own (cross-silo)"] = False
    chunk_size: Annotated[int, ONE_OR_MORE, "consecutive clients that go to an actor in one call"] = 1
    threads: Annotated[
        int,
        ONE_OR_MORE,
        "torch's threads per client; they change last digits, and so are the same for all executors",
    ] = 1
    client_timeout_s: Annotated[
        float, Range(above=0, infinite=True), "seconds after which a client is reported as failed and left out"
    ] = 3600.0
    failures: FailuresConfig = field(default_factory=FailuresConfig)


@dataclass
class RayConfig:
    """How Ray is reached; the limits hold for a cluster of our own."""

    address: Annotated[
        str, "auto (a running cluster if there is one), local (always a cluster of our own) or host:port"
    ] = "auto"
    num_cpus: Annotated[int | None, ONE_OR_MORE, "CPUs; null: all that this process may use"] = None
    num_gpus: Annotated[int, ZERO_OR_MORE, "GPUs"] = 0
    object_store_memory_bytes: Annotated[
        int | None, ONE_OR_MORE, "object store; null: a fifth of the memory that is free"
    ] = None
    dashboard: Annotated[bool, "Ray's dashboard"] = False


@dataclass
class CheckpointConfig:
    """How often the state is saved (a crash loses at most the rounds since)."""

    every: Annotated[int, ONE_OR_MORE, "rounds between two checkpoints"] = 1


@dataclass
class RunConfig:
    """Everything that determines a run."""

    experiment: Annotated[str, "what the run is called; its id begins with it"] = "custom"
    seed: Annotated[int, ZERO_OR_MORE, "of everything that has none in seeds"] = 1
    results: Annotated[
        str, "a folder, or the URL of one on a filesystem that pyarrow reads: s3://bucket/path, gs://bucket/path"
    ] = "results"
    dry_run: Annotated[
        bool, "nothing is trained: who would do what is planned and counted, over all rounds of the training stages"
    ] = False
    reuse_supernet: Annotated[
        bool,
        "begin with the trained supernet of an earlier run under the same results, if the configurations agree up to "
        "there, and leave the own one for later runs; its rows are those of the run named supernet_run_id in runs",
    ] = False
    tensorboard: Annotated[bool, "write event files, too, below the run's artefacts"] = False
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
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
