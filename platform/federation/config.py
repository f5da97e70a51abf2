"""A run's configuration as plain dataclasses, composed and checked in the driver."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval

from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.stopping import StopConfig
from fedloom.platform.results.paths import Names
from fedloom.platform.settings import (
    BELOW_ONE,
    NOT_EMPTY,
    ONE_OR_MORE,
    PART,
    PATH,
    POSITIVE,
    SHARE,
    UP_TO_A_MILLION,
    UP_TO_A_THOUSAND,
    ZERO_OR_MORE,
    ComponentName,
    Infinite,
    Text,
)
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.availability import DEFAULT_SHARE


@dataclass
class ObjectiveConfig:
    """The objective of training and evaluation."""

    name: Annotated[str, ComponentName("objective"), "loss, metric, and which targets count"] = "classification"
    options: Annotated[dict[str, Any], "the objective's own options, by name"] = field(default_factory=dict)


@dataclass
class SeedsConfig:
    """Separate seeds per purpose; by default the run's `seed`."""

    partition: Annotated[int | None, ZERO_OR_MORE, "seed of the partition, devices and tiers; null: seed"] = None
    initialisation: Annotated[int | None, ZERO_OR_MORE, "seed of the initial weights; null: seed"] = None
    selection: Annotated[int | None, ZERO_OR_MORE, "seed of client selection and device dropout; null: seed"] = None
    training: Annotated[
        int | None, ZERO_OR_MORE, "seed of local training: sample order, paths, dropout; null: seed"
    ] = None
    search: Annotated[int | None, ZERO_OR_MORE, "seed of the search; null: seed"] = None


@dataclass
class BudgetConfig:
    """The share of a tier's budget that its clients have in a round."""

    kind: Annotated[
        str, ComponentName("budget"), "static (all of it), schedule (factors by round) or trace (states)"
    ] = "static"
    factors: Annotated[list[Annotated[float, SHARE]] | None, "schedule: the share of the budget by round, repeated"] = (
        None
    )
    states: Annotated[list[Any] | None, "trace: rows of name, factor and probability"] = None
    options: Annotated[dict[str, Any], "the options of a user's own budget, by name"] = field(default_factory=dict)


GENERATED = "generated"
"""The value of `tiers.device_table` and `devices.availability_table` for random generation."""


@dataclass
class TiersConfig:
    """How the space is split into tiers, and how clients are assigned to them.

    Bounds are computed from `paths` random paths and the shares `rho_low`, `rho_high` (FedorAS, App. E.4), or given by
    `upper_bounds`.
    """

    count: Annotated[int, UP_TO_A_THOUSAND, "number of tiers"] = 4
    rho_low: Annotated[
        float, PART, "share of the sum of the random paths' costs, cheapest first, where the first tier ends; 0: even"
    ] = 0.0
    rho_high: Annotated[
        float, PART, "share of the sum of the random paths' costs, cheapest first, where the last tier begins"
    ] = 0.95
    upper_bounds: Annotated[
        list[Annotated[float, POSITIVE]] | None, "upper bounds in units of cost, instead of rho_low and rho_high"
    ] = None
    paths: Annotated[int, Interval(ge=1, le=10_000_000), "number of random paths that the bounds are computed from"] = (
        100_000
    )
    cost: Annotated[
        str, NOT_EMPTY, "cost measure of the budgets: one of macs, parameters, bytes, activation_bytes, latency_s"
    ] = "macs"
    cost_weights: Annotated[
        dict[str, Annotated[float, ZERO_OR_MORE]],
        "weights of a sum of additive costs, instead of cost: tiers.cost_weights.macs=1",
    ] = field(default_factory=dict)
    unsupported: Annotated[list[Annotated[str, NOT_EMPTY]] | None, "operators that cost infinity"] = None
    shares: Annotated[list[Annotated[float, PART]] | None, "share of the clients per tier; null: equal"] = None
    clients: Annotated[
        list[Annotated[int, ZERO_OR_MORE]] | None, "index of each client's tier, from 0, instead of shares"
    ] = None
    tasks: Annotated[
        list[Annotated[str, NOT_EMPTY]] | None,
        "each tier's label set: all, a coarser one of the data set such as cifar100's coarse, or one of "
        "data.label_sets; null: all for every tier",
    ] = None
    device_table: Annotated[
        str | None,
        PATH,
        "a file of devices (CSV, Parquet) or generated (by the partition's seed), instead of shares",
    ] = None
    max_step_s: Annotated[float, POSITIVE, "device tables: seconds that a tier's training step may take"] = 10.0
    step_batch_size: Annotated[int, UP_TO_A_MILLION, "device tables: samples of that step"] = 32
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    num_gpus: Annotated[
        list[Annotated[float, Interval(ge=0, le=1024)]] | None,
        "a client actor's share of a GPU per tier, or one share for all: 0, 1/k or whole; null: none",
    ] = None
    num_cpus: Annotated[
        list[Annotated[float, Interval(gt=0, le=4096)]] | None,
        "a client actor's CPUs per tier, or one number for all; null: 1",
    ] = None


@dataclass
class DevicesConfig:
    """The simulated devices, with one number for all tiers or one per tier; a device table takes precedence."""

    macs_per_s: Annotated[
        list[Annotated[float, POSITIVE]] | None,
        "MACs per second; null: 2e10 in the top tier, others in proportion to their budgets",
    ] = None
    down_bytes_per_s: Annotated[float, POSITIVE, "download speed in bytes per second"] = 2.5e6
    up_bytes_per_s: Annotated[float, POSITIVE, "upload speed in bytes per second"] = 7.5e5
    availability: Annotated[float, SHARE, "probability that a device is available in a round"] = 1.0
    dropout: Annotated[float, PART, "probability that a device drops out of a round"] = 0.0
    availability_table: Annotated[
        str | None,
        PATH,
        "a file of the intervals in which each device is online (CSV, Parquet), or generated (once a day, most at "
        "night); null: always",
    ] = None
    availability_period_s: Annotated[
        float | None,
        POSITIVE,
        "seconds after which a table repeats (null: its length in whole days), or of a generated day (null: 86400)",
    ] = None
    availability_share: Annotated[
        float, Interval(gt=0, lt=1), "generated: mean share of the day that a device is online"
    ] = DEFAULT_SHARE
    jitter: Annotated[
        float,
        Interval(ge=0, le=2),
        "sigma of the log-normal factors on each client's compute and link in a round; 0: none",
    ] = 0.0
    server_bytes_per_s: Annotated[
        float | None,
        POSITIVE,
        "speed of the server's link in each direction, shared by the clients of a round; null: no limit",
    ] = None
    deadline_s: Annotated[
        float | None, POSITIVE, "simulated seconds after which a client is left out of its round; null: never"
    ] = None


@dataclass
class AttackConfig:
    """Attackers among the clients, and what they do while they train."""

    share: Annotated[float, BELOW_ONE, "share of the clients that are attackers, drawn by the partition's seed"] = 0.0
    name: Annotated[
        str, ComponentName("attack"), "label_flip, sign_flip, gaussian, alie, inner_product or your own"
    ] = "sign_flip"
    options: Annotated[dict[str, Any], "the attack's options, by name"] = field(default_factory=dict)


@dataclass
class FailuresConfig:
    """How client failures are handled.

    The death of an actor is not a client failure: the actor is replaced and its work repeated, up to `actor_attempts`
    times.
    """

    policy: Annotated[
        Literal["stop", "retry", "tolerate"],
        "stop the run, retry the client up to attempts, or tolerate up to max_share of a round",
    ] = "stop"
    attempts: Annotated[int, UP_TO_A_THOUSAND, "retry: attempts per client"] = 2
    max_share: Annotated[float, PART, "tolerate: share of a round's clients that may fail"] = 0.2
    actor_attempts: Annotated[int, UP_TO_A_THOUSAND, "attempts of work whose actor died"] = 3


MOST_ACTORS = Interval(ge=1, le=65536)
SMALLEST_STORE_BYTES = 75 * 2**20
"""The smallest object store that Ray starts with."""


@dataclass
class ExecutorConfig:
    """Where clients' work is executed."""

    kind: Annotated[Literal["ray", "serial"], "ray (client actors) or serial (this process)"] = "ray"
    actors: Annotated[int | None, MOST_ACTORS, "client actors, of all tiers together; null: as many as fit"] = None
    resident: Annotated[bool, "every client has an actor of its own (cross-silo)"] = False
    chunk_size: Annotated[int, UP_TO_A_MILLION, "number of consecutive clients that an actor gets in one call"] = 1
    sum_chunks: Annotated[
        int | None,
        UP_TO_A_MILLION,
        "consecutive chunks whose sums are added on a node before they are sent to the server; null: each is sent",
    ] = None
    threads: Annotated[
        int,
        Interval(ge=1, le=4096),
        "torch's threads per client; they affect floating-point rounding, so all executors use the same number",
    ] = 1
    stack_clients: Annotated[
        str,
        Text("auto, off, or a whole number from 1 to 999999", re.compile("auto|off|[1-9][0-9]{0,5}").fullmatch),
        "clients trained as one batch if they train the same whole network; auto: the smaller the network, the more",
    ] = "auto"
    precision: Annotated[
        Literal["float32", "tf32", "bfloat16"],
        "precision of convolutions and matrix products: tf32 is float32 with TensorFloat-32 on GPUs, bfloat16 is "
        "autocast; weights, updates, sums and the optimiser are float32",
    ] = "float32"
    deterministic: Annotated[
        bool, "use only torch's deterministic algorithms; a client fails if a GPU operator of its network has none"
    ] = False
    memory_format: Annotated[
        Literal["auto", "contiguous", "channels_last"],
        "memory format of images and convolution kernels; auto: the one that the space asks for",
    ] = "auto"
    compile: Annotated[
        bool,
        "compile the training steps of networks that keep their architecture, for full batches; takes seconds to a "
        "minute per network and process, which did not pay off on the CPUs where it was measured",
    ] = False
    client_timeout_s: Annotated[
        float, POSITIVE, Infinite(), "seconds after which a client counts as failed and is left out"
    ] = 3600.0
    failures: FailuresConfig = field(default_factory=FailuresConfig)


@dataclass
class RayConfig:
    """The connection to Ray; the limits apply only to a cluster that fedloom starts, `detached` only to others."""

    address: Annotated[
        str, NOT_EMPTY, "auto (a running cluster if there is one), local (always start a cluster) or host:port"
    ] = "auto"
    num_cpus: Annotated[int | None, MOST_ACTORS, "CPUs; null: all that this process may use"] = None
    num_gpus: Annotated[int, Interval(ge=0, le=65536), "GPUs"] = 0
    object_store_memory_bytes: Annotated[
        int | None, Interval(ge=SMALLEST_STORE_BYTES), "object store size in bytes; null: a fifth of the free memory"
    ] = None
    dashboard: Annotated[bool, "Ray's dashboard"] = False
    wait_s: Annotated[
        float, ZERO_OR_MORE, "seconds that a run waits for other runs to free what it needs, or for a cluster to grow"
    ] = 300.0
    detached: Annotated[
        bool, "on a running cluster: the run goes on without its command, and fedloom attach finds it again"
    ] = False


@dataclass
class CheckpointConfig:
    """How often the state is saved; a crash loses at most the rounds since the last checkpoint."""

    every: Annotated[int, ONE_OR_MORE, "rounds between checkpoints"] = 1


@dataclass
class TrackingConfig:
    """Where rounds are sent besides the tables; each tracker's server and key are in its environment variables."""

    to: Annotated[
        list[Literal["wandb", "trackio", "mlflow", "aim", "tensorboard"]],
        "the trackers; tensorboard is the same as tensorboard=true",
    ] = field(default_factory=list)
    project: Annotated[str, NOT_EMPTY, "the tracker's project or experiment, where the run is listed"] = "fedloom"
    models: Annotated[bool, "also send the run's stored models when it is done"] = False

    @property
    def processes(self) -> list[str]:
        """The trackers that have a process each."""
        return [name for name in dict.fromkeys(self.to) if name != "tensorboard"]


@dataclass
class RunConfig:
    """Everything that determines a run."""

    experiment: Annotated[str, NOT_EMPTY, "the experiment's name, which is part of the run's id"] = "custom"
    name: Annotated[str | None, NOT_EMPTY, "a name for this run, by which commands find it; null: none"] = None
    tags: Annotated[
        list[Annotated[str, NOT_EMPTY]], "words by which commands find this run and others with the same tag"
    ] = field(default_factory=list)
    seed: Annotated[int, ZERO_OR_MORE, "the run's seed, for all purposes without a seed of their own in seeds"] = 1
    results: Annotated[
        str, PATH, "a folder, or the URL of one on a filesystem that pyarrow reads: s3://bucket/path, gs://bucket/path"
    ] = "results"
    dry_run: Annotated[
        bool, "train nothing: count the costs of the stages that start from fresh weights, round by round"
    ] = False
    reuse_supernet: Annotated[
        bool,
        "start from the trained supernet of an earlier run in the same results folder with the same training "
        "configuration, otherwise store this run's supernet for later runs; the training's rows are those of the run "
        "that supernet_run_id in runs names",
    ] = False
    tensorboard: Annotated[bool, "also write TensorBoard event files, in the run's artefacts"] = False
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    space: SpaceConfig = field(default_factory=SpaceConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    attack: AttackConfig = field(default_factory=AttackConfig)
    method: Any = None
    stop: StopConfig = field(default_factory=StopConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    seeds: SeedsConfig = field(default_factory=SeedsConfig)

    @property
    def names(self) -> Names:
        """The run's name and tags."""
        return Names(self.name, tuple(self.tags))

    def seed_for(self, purpose: str) -> int:
        """The seed of partition, initialisation, selection, training or search."""
        purpose_seed: int | None = getattr(self.seeds, purpose)
        return self.seed if purpose_seed is None else purpose_seed
