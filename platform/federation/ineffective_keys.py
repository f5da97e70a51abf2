"""Finds configuration keys that do less or more than they seem to; logged at a run's start.

Some were changed but have no effect given the others; some options are taken by several rules of a stage, or by data
set and augmentation.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import partial
from operator import attrgetter, eq
from typing import Any, NamedTuple

from fedloom.platform.data.config import WITH_ALPHA, DataConfig
from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.registry import data_slots
from fedloom.platform.federation.config import (
    GENERATED,
    AttackConfig,
    DevicesConfig,
    FailuresConfig,
    RunConfig,
    TiersConfig,
)
from fedloom.platform.federation.selection import SELECTION_RULES
from fedloom.platform.federation.training_config import Named, PrivacyConfig, TrainingConfig, named_rules
from fedloom.platform.plugins import is_import_path
from fedloom.platform.words import shown


class _Needs(NamedTuple):
    """`keys` (separated by spaces) have an effect only if `has` is true of the key `other`; `called` names the case."""

    keys: str
    other: str
    has: Callable[[Any], bool]
    called: str


def _is_given(value: Any) -> bool:
    return bool(value)


def _is_missing(value: Any) -> bool:
    return not value


def _may_use_momentum(optimizer: str) -> bool:
    return optimizer == "sgd" or is_import_path(optimizer)


NEEDS: dict[type, tuple[_Needs, ...]] = {
    DataConfig: (
        _Needs("alpha", "partition", WITH_ALPHA.__contains__, ", ".join(WITH_ALPHA)),
        _Needs("shards_per_client", "partition", partial(eq, "shards"), "shards"),
    ),
    TiersConfig: (
        _Needs("max_step_s step_batch_size", "device_table", _is_given, "a device table"),
        _Needs("shares clients", "device_table", _is_missing, "runs without a device table"),
        _Needs("shares", "clients", _is_missing, "runs without it"),
        _Needs("cost", "cost_weights", _is_missing, "runs without weights of costs"),
        _Needs("rho_low rho_high paths", "upper_bounds", _is_missing, "runs without given bounds"),
    ),
    RunConfig: (
        _Needs(
            "devices.macs_per_s devices.down_bytes_per_s devices.up_bytes_per_s devices.availability devices.dropout",
            "tiers.device_table",
            _is_missing,
            "runs without a device table, which has these columns",
        ),
        _Needs(
            "ray.detached ray.num_cpus ray.dashboard ray.object_store_memory_bytes ray.wait_s executor.actors "
            "executor.client_timeout_s executor.failures.actor_attempts",
            "executor.kind",
            partial(eq, "ray"),
            "ray",
        ),
        _Needs("tracking.project tracking.models", "tracking.to", _is_given, "trackers"),
        _Needs("tracking.to ray.detached stop.patience stop.target", "dry_run", _is_missing, "runs that train"),
    ),
    DevicesConfig: (
        _Needs("availability_period_s", "availability_table", _is_given, "devices that are not always online"),
        _Needs("availability_share", "availability_table", partial(eq, GENERATED), GENERATED),
    ),
    FailuresConfig: (
        _Needs("attempts", "policy", partial(eq, "retry"), "retry"),
        _Needs("max_share", "policy", partial(eq, "tolerate"), "tolerate"),
    ),
    TrainingConfig: (
        _Needs("momentum", "optimizer", _may_use_momentum, "sgd"),
        _Needs("idle_momentum", "momentum", _is_given, "momentum above 0"),
        _Needs("max_staleness", "asynchronous", _is_given, "asynchronous rounds"),
        _Needs("final_lr_share", "schedule", partial(eq, "cosine"), "cosine"),
        _Needs("step_rounds", "schedule", partial(eq, "steps"), "steps"),
    ),
    AttackConfig: (_Needs("name options", "share", _is_given, "attackers"),),
    PrivacyConfig: (
        _Needs("delta accountant", "noise", _is_given, "noise above 0"),
        _Needs("weight_cap least_coverage", "clip", _is_given, "changes that are clipped"),
        _Needs("fraction_bits survivors", "secure", _is_given, "secure aggregation"),
    ),
}
"""By the configuration class that holds the keys."""


def keys_without_effect(config: Any, key: str = "") -> Iterator[str]:
    """One line for every key of a configuration that differs from its default and has no effect.

    And one for every option that several rules of a stage, or data set and augmentation, take. `key` is the
    configuration's own key, with a dot at its end.
    """
    for kind, needs in NEEDS.items():
        for need in needs if isinstance(config, kind) else ():
            other = attrgetter(need.other)(config)
            for name in need.keys.split() if not need.has(other) else ():
                value = attrgetter(name)(config)
                if value != _default(config, name):
                    other_value = "null" if other is None else shown(other)
                    yield (
                        f"{key}{name}={shown(value)} has no effect with {key}{need.other}={other_value}: it is for "
                        f"{need.called}"
                    )
    if isinstance(config, RunConfig) and (config.executor.sum_chunks or 1) > 1:
        train, given = getattr(config.method, "train", None), f"executor.sum_chunks={config.executor.sum_chunks}"
        for name, means in (("aggregator", "mean"), ("asynchronous", None)):
            if (chosen := getattr(train, name, means)) != means:
                yield f"{given} has no effect with method.train.{name}={shown(chosen)}: it is for means of whole rounds"
        if steps := getattr(getattr(config.method, "distillation", None), "steps", 0):
            yield f"{given} has no effect with method.distillation.steps={steps}: it is for means of whole rounds"
    if isinstance(config, TiersConfig) and config.upper_bounds:
        bounds = len(config.upper_bounds)
        if config.count not in (bounds, _default(config, "count")):
            yield f"{key}count={config.count} has no effect with {bounds} {key}upper_bounds: there are as many tiers"
    if isinstance(config, RunConfig):
        yield from _unstopped(config)
    if isinstance(config, TrainingConfig) and config.optimizer_state == "kept" and _is_stateless(config):
        yield f"{key}optimizer_state=kept has no effect with {key}momentum=0.0: SGD without momentum has no state"
    if isinstance(config, TrainingConfig):
        yield from _options_of_several(named_rules(config), config.options, key)
    if isinstance(config, DataConfig):
        yield from _options_of_several(data_slots(config), config.options, key)
    if isinstance(config, TrainingConfig) and config.selection == "power_of_choice":
        yield from _without_choice(config, key)
    for field in fields(config):
        if is_dataclass(getattr(config, field.name)):
            yield from keys_without_effect(getattr(config, field.name), f"{key}{field.name}.")


def _options_of_several(named: Named, options: Mapping[str, Any], key: str) -> Iterator[str]:
    """One line for every given option that several of the named components take."""
    chosen = dict.fromkeys(named.values())
    for option, value in options.items():
        takers = [f"{registry.kind} {name}" for registry, name in chosen if option in registry.options_of(name)]
        if len(takers) > 1:
            yield f"{key}options.{option}={shown(value)} is an option of {' and of '.join(takers)}: each takes it"


def clients_without_effect(config: DataConfig, dataset: Dataset) -> Iterator[str]:
    """A line if the data set says whose samples are whose, and the partition does not ask."""
    if config.partition != "natural" and dataset.knows_clients("train"):
        yield (
            f"the clients of data set {shown(config.dataset)} have no effect with data.partition={config.partition}: "
            "they are for natural"
        )


def _unstopped(config: RunConfig) -> Iterator[str]:
    """Lines for `stop.*` keys without an early end, and for unscored training stages, which cannot end early."""
    stop = config.stop
    if not stop.is_set:
        for name in ("metric", "weights"):
            if getattr(stop, name) != _default(stop, name):
                yield (
                    f"stop.{name}={getattr(stop, name)} has no effect with stop.patience=null and stop.target=null: it "
                    "is for stages that may end early"
                )
        return
    method = config.method
    stages = {f.name: getattr(method, f.name) for f in fields(method) if is_dataclass(method)} if method else {}
    for name, stage in stages.items():
        if isinstance(stage, TrainingConfig) and stage.rounds and not stage.evaluate_every:
            yield f"stop.* has no effect on method.{name} with method.{name}.evaluate_every=0: it is for scored stages"


def _default(config: Any, name: str) -> Any:
    *path, last = name.split(".")
    owner = attrgetter(".".join(path))(config) if path else config
    field: Field[Any] = next(field for field in fields(owner) if field.name == last)
    return field.default if field.default_factory is MISSING else field.default_factory()


def _is_stateless(config: TrainingConfig) -> bool:
    return config.optimizer == "sgd" and not config.momentum


def _without_choice(config: TrainingConfig, key: str) -> Iterator[str]:
    default = SELECTION_RULES.options_of("power_of_choice")["candidates"].default
    candidates, size = config.options.get("candidates", default), config.clients_per_round
    if size is None or (isinstance(candidates, int) and candidates <= size):
        cohort = "all clients" if size is None else f"{size} clients"
        yield (
            f"{key}selection=power_of_choice has no effect with {key}options.candidates={shown(candidates)}: a round "
            f"has {cohort}, so that there is no choice among the candidates"
        )
