"""The configuration of a federated training stage: its rounds, its slots, and the clients' local SGD."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from annotated_types import Interval

from fedloom.platform.averaging.aggregators import AGGREGATORS, MEAN
from fedloom.platform.averaging.processors import PROCESSORS
from fedloom.platform.averaging.server import SERVER_RULES, server_traits
from fedloom.platform.averaging.weighting import WEIGHTING_RULES, weighting_traits
from fedloom.platform.clients.local_rules import LOCAL_RULES, local_rule, refuse_parts
from fedloom.platform.clients.training import PLAIN, LocalSGD
from fedloom.platform.data.augment import AUGMENTATIONS, NO_AUGMENTATION, check_augmentation, coloured, tried_samples
from fedloom.platform.federation.selection import SELECTION_RULES, selection_traits
from fedloom.platform.plugins import ComponentSpec, Registry, is_import_path
from fedloom.platform.settings import (
    BELOW_ONE,
    ONE_OR_MORE,
    PART,
    POSITIVE,
    ZERO_OR_MORE,
    ComponentName,
    component_specs,
)

if TYPE_CHECKING:
    from fedloom.platform.federation.world import World

Schedule = Literal["fixed", "cosine", "step", "steps"]
EPOCHS = Interval(ge=1, le=100_000)


@dataclass
class PrivacyConfig:
    """Client-level differential privacy, which needs `pip install fedloom[privacy]`, and secure aggregation."""

    clip: Annotated[
        float | None, Interval(gt=0, le=1e12), "S, the largest norm of a client's change; null: no privacy"
    ] = None
    noise: Annotated[float, Interval(ge=0, le=1000), "z, the noise of the sums as a multiple of S"] = 0.0
    delta: Annotated[float, Interval(gt=0, lt=1), "the delta for which epsilon is given"] = 1e-5
    weight_cap: Annotated[
        float | None, POSITIVE, "weights are divided by this and limited to 1: for weighting by samples"
    ] = None
    least_coverage: Annotated[
        float, POSITIVE, "scalars that fewer clients per round are expected to hold are never changed"
    ] = 0.5
    secure: Annotated[bool, "secure aggregation: the server learns sums alone (simulated, with its messages)"] = False
    fraction_bits: Annotated[int, Interval(ge=1, le=30), "secure: binary places of updates in fixed point"] = 16
    survivors: Annotated[float, PART, "secure: the share of a cohort without which nothing is revealed"] = 0.5
    accountant: Annotated[Literal["rdp", "pld"], "Rényi divergences, or (for poisson, all) loss distributions"] = "rdp"


@dataclass
class TrainingConfig:
    """A federated training stage: rounds, selection, local training, and aggregation."""

    rounds: Annotated[int, ZERO_OR_MORE, "number of rounds; a stage of 0 rounds is skipped"] = 50
    clients_per_round: Annotated[int | None, ONE_OR_MORE, "number of clients per round; null: all"] = 10
    epochs: Annotated[int, EPOCHS, "passes of a client over its training data per round"] = 1
    batch_size: Annotated[int, ONE_OR_MORE, "samples per step of a client's SGD"] = 32
    lr: Annotated[float, POSITIVE, "learning rate of the clients' SGD"] = 0.1
    momentum: Annotated[float, BELOW_ONE, "momentum of the clients' SGD"] = 0.9
    idle_momentum: Annotated[
        bool, "momentum also moves operators that a batch's path leaves out, as in torch before 2.0; false: they rest"
    ] = False
    weight_decay: Annotated[float, ZERO_OR_MORE, "weight decay of the clients' SGD"] = 0.0
    clip_norm: Annotated[float, ZERO_OR_MORE, "limit of the gradient's norm, 0 for none"] = 0.0
    schedule: Annotated[
        Schedule,
        "lr over rounds: fixed, cosine (to final_lr_share), step (x.1 at 1/2 and 3/4), steps (x.1 every step_rounds)",
    ] = "fixed"
    final_lr_share: Annotated[float, PART, "cosine: the share of lr that is left in the last round"] = 0.1
    step_rounds: Annotated[int, ONE_OR_MORE, "steps: rounds between two reductions of lr"] = 10
    min_contributors: Annotated[int, ONE_OR_MORE, "scalars covered by fewer clients keep their old value"] = 1
    selection: Annotated[str, ComponentName("selection rule"), "how a round's clients are selected"] = "uniform"
    local_rule: Annotated[str, ComponentName("local rule"), "correction of the clients' gradients"] = "sgd"
    weighting: Annotated[str, ComponentName("weighting rule"), "weights of a client's tensors in the mean"] = "fedavg"
    server: Annotated[str, ComponentName("server rule"), "the server's update from the clients' mean"] = "replace"
    aggregator: Annotated[
        str, ComponentName("aggregator"), "mean, or a rule that compares clients and gets every single update"
    ] = MEAN
    augment: Annotated[str | None, ComponentName("augmentation"), "the stage's augmentation; null: data.augment"] = None
    processors: Annotated[
        list[Annotated[str, ComponentName("processor")]], "what changes clients' updates on their way, such as sparsify"
    ] = field(default_factory=list)
    options: Annotated[dict[str, Any], "options of the rules above, by their names"] = field(default_factory=dict)
    loss_norms: Annotated[bool, "clients report the root mean square of their samples' losses, for selection"] = False
    evaluate_every: Annotated[int, ZERO_OR_MORE, "rounds between two scores on validation data, 0 for none"] = 0
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)


@dataclass(frozen=True)
class Rules:
    """The rules of a stage with their options; `more` holds a method's further rules by their keys.

    `key` is the configuration key of the stage, for messages.
    """

    selection: ComponentSpec
    local: ComponentSpec
    weighting: ComponentSpec
    server: ComponentSpec
    aggregator: ComponentSpec = field(default_factory=lambda: ComponentSpec(MEAN))
    processors: tuple[ComponentSpec, ...] = ()
    more: Mapping[str, ComponentSpec] = field(default_factory=dict)
    key: str = ""


REGISTRIES: Mapping[str, Registry[Any]] = {
    "selection": SELECTION_RULES,
    "local_rule": LOCAL_RULES,
    "weighting": WEIGHTING_RULES,
    "server": SERVER_RULES,
    "aggregator": AGGREGATORS,
}


Named = Mapping[str, tuple[Registry[Any], str]]
"""Slots and the choices in them, by the keys of the configuration."""


def rules_of(config: TrainingConfig, key: str, more: Named | None = None) -> Rules:
    """The rules that a stage's configuration names; a user's own rules are tested on small inputs.

    `key` is the configuration key of the stage; `more` are further choices, which share the stage's options.
    Raises ValueError for a rule that does not exist or fails, and for invalid options.
    """
    named = _named(config) | dict(more or {})
    _check_names(named, key)
    found = dict(zip(named, component_specs([*named.values()], config.options, f"{key}.options"), strict=True))
    own = [found.pop(name) for name in REGISTRIES]
    processors = tuple(found.pop(_processor_key(index)) for index in range(len(config.processors)))
    rules = Rules(own[0], own[1], own[2], own[3], own[4], processors, found, key)
    _check_local_rule(rules, config, key)
    _check_aggregator(rules, config, key)
    if any(is_import_path(rule.name) for rule in own[:4]):
        # Only a user's own rules need a test, and the import is slow.
        from fedloom.platform.federation.trying import try_rules

        try_rules(rules.selection, rules.local, rules.weighting, rules.server, config.clients_per_round)
    return rules


def _named(config: TrainingConfig) -> dict[str, tuple[Registry[Any], str]]:
    named = {name: (slot, getattr(config, name)) for name, slot in REGISTRIES.items()}
    named |= {_processor_key(index): (PROCESSORS, name) for index, name in enumerate(config.processors)}
    return named if config.augment is None else {**named, "augment": (AUGMENTATIONS, config.augment)}


def _processor_key(index: int) -> str:
    return f"processors[{index}]"


def own_augmentation(config: TrainingConfig) -> ComponentSpec | None:
    """The stage's own augmentation with its options, None if it has the data's.

    `rules_of` has checked the options, which belong to the stage's rules as well.
    """
    if config.augment is None:
        return None
    known = AUGMENTATIONS.options_of(config.augment)
    options = {name: value for name, value in config.options.items() if name in known}
    return component_specs([(AUGMENTATIONS, config.augment)], options, "options")[0]


def _check_local_rule(rules: Rules, config: TrainingConfig, key: str) -> None:
    """Raises ValueError if local and server rule do not belong together, or the local rule refuses the clients' SGD."""
    local, server = rules.local.name, rules.server.name
    needed = local_rule(rules.local).server
    if needed not in (None, server):
        raise ValueError(f"{key}.local_rule={local} needs {key}.server={needed}, given {server}: set both")
    traits = server_traits(server)
    if traits.local_rule not in (None, local):
        raise ValueError(f"{key}.server={server} needs {key}.local_rule={traits.local_rule}, given {local}: set both")
    if traits.needs_every_contributor and config.min_contributors > 1:
        raise ValueError(
            f"{key}.min_contributors={config.min_contributors}: {server}'s server keeps the mean of what all clients "
            "keep; use 1"
        )
    if selection_traits(rules.selection.name).shortens_updates:
        refuse_parts(rules.local, key, rules.selection.name, "another selection rule")
    problem = local_rule(rules.local).refuses(local_sgd(config, 0, NO_AUGMENTATION, balanced=False))
    if problem is not None:
        raise ValueError(f"{key}.local_rule={local} cannot be used with {key}.{problem}")


def _check_aggregator(rules: Rules, config: TrainingConfig, key: str) -> None:
    """Raises ValueError for an aggregator of single updates beside what gives the server nothing but sums."""
    if rules.aggregator.name == MEAN:
        return
    privacy, beside = config.privacy, f"{key}.aggregator={rules.aggregator.name}"
    if privacy.secure:
        raise ValueError(f"{beside} needs every single update: {key}.privacy.secure=true hides all but their sum")
    if privacy.clip is not None or privacy.noise:
        raise ValueError(f"{beside}: the noise of {key}.privacy is for weighted sums; use {key}.aggregator={MEAN}")
    if weighting_traits(rules.weighting.name).weighs_unheld:
        raise ValueError(
            f"{beside} judges a scalar among those who hold it: {key}.weighting={rules.weighting.name} counts others"
        )


def _check_names(named: Named, key: str) -> None:
    for name, (slot, choice) in named.items():
        try:
            slot.find(choice)
        except ValueError as error:
            raise type(error)(f"{key}.{name}: {error}") from error


def check_rule_names(config: object, key: str) -> None:
    """Raises ValueError if a training stage within a method's configuration names a rule that does not exist.

    It is for the moment before data is prepared, which may take minutes; a user's own rules are looked up later.
    """
    if isinstance(config, TrainingConfig):
        _check_names({name: pair for name, pair in _named(config).items() if not is_import_path(pair[1])}, key)
    for field_ in fields(config) if is_dataclass(config) else ():
        check_rule_names(getattr(config, field_.name), f"{key}.{field_.name}")


def augmentation_of(world: World, config: TrainingConfig) -> ComponentSpec:
    """The augmentation of the stage's batches, its own or the data's, with what it asks for of the data set."""
    own = own_augmentation(config)
    return world.augment if own is None else coloured(own, world.data.dataset.colours)


def checked_augmentation(world: World, config: TrainingConfig) -> ComponentSpec:
    """The same, tried first if it is the stage's own; a one-line ValueError if it does not fit the data."""
    augment = augmentation_of(world, config)
    if config.augment is not None:
        check_augmentation(augment, tried_samples(world.data.dataset)[0])
    return augment


def cohort_size(config: TrainingConfig, num_clients: int) -> int:
    """The number of clients of a full round of the stage."""
    return num_clients if config.clients_per_round is None else config.clients_per_round


def expected_size(config: TrainingConfig, num_clients: int) -> int:
    """The expected number of clients of a round: rules that select all of them look at no size."""
    takes_all = selection_traits(config.selection).sampling == "all"
    return num_clients if takes_all else cohort_size(config, num_clients)


def check_training(config: TrainingConfig, key: str, num_clients: int) -> None:
    """Raises ValueError for invalid numbers; `key` is the configuration key of the stage.

    `rules_of` checks the rules and their options.
    """
    if config.clients_per_round is not None and not 1 <= config.clients_per_round <= num_clients:
        raise ValueError(
            f"{key}.clients_per_round={config.clients_per_round}: must be between 1 and the {num_clients} clients "
            "there are; lower it or raise data.num_clients"
        )
    in_round = cohort_size(config, num_clients)
    if config.min_contributors > in_round:
        raise ValueError(
            f"{key}.min_contributors={config.min_contributors}: only {in_round} clients take part in "
            "a round, so that nothing would ever be trained; lower it or raise clients_per_round"
        )


def _fixed(_config: TrainingConfig, _round: int) -> float:
    return 1.0


def _cosine(config: TrainingConfig, round_: int) -> float:
    progress = round_ / max(1, config.rounds - 1)
    return config.final_lr_share + (1 - config.final_lr_share) * (1 + math.cos(math.pi * progress)) / 2


def _step(config: TrainingConfig, round_: int) -> float:
    return 0.1 ** sum(round_ >= config.rounds * share for share in (0.5, 0.75))


def _steps(config: TrainingConfig, round_: int) -> float:
    return 0.1 ** (round_ // config.step_rounds)


SCHEDULES: Mapping[str, Callable[[TrainingConfig, int], float]] = dict(
    zip(get_args(Schedule), (_fixed, _cosine, _step, _steps), strict=True)
)


def learning_rate(config: TrainingConfig, round_: int) -> float:
    """The learning rate of a round (from 0)."""
    return config.lr * SCHEDULES[config.schedule](config, round_)


def local_sgd(
    config: TrainingConfig, round_: int, augment: ComponentSpec, *, balanced: bool, rule: ComponentSpec = PLAIN
) -> LocalSGD:
    """The clients' local training in a round of the stage."""
    return LocalSGD(
        epochs=config.epochs,
        batch_size=config.batch_size,
        lr=learning_rate(config, round_),
        momentum=config.momentum,
        idle_momentum=config.idle_momentum,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        augment=augment,
        balanced=balanced,
        loss_norm=config.loss_norms or selection_traits(config.selection).needs_loss_norm,
        rule=rule,
    )
