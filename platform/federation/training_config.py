"""The configuration of a federated training stage: its rounds, its slots, and the clients' local training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from annotated_types import Interval

from fedloom.platform.averaging.aggregators import AGGREGATORS, MEAN, KeptUpdates
from fedloom.platform.averaging.average import Update, WeightedSums
from fedloom.platform.averaging.processors import PROCESSORS
from fedloom.platform.averaging.server import ARRIVAL_RULES, SERVER_RULES, ServerRound, serve, server_traits
from fedloom.platform.averaging.weighting import WEIGHTING_RULES, Work, weighting_rule, weighting_traits
from fedloom.platform.clients.local_rules import LOCAL_RULES, LocalClient, begun, local_rule, place_of, refuse_parts
from fedloom.platform.clients.optimizers import LOCAL_OPTIMIZERS
from fedloom.platform.clients.training import PLAIN, LocalSGD, Optimizer
from fedloom.platform.data.augment import AUGMENTATIONS, NO_AUGMENTATION, coloured
from fedloom.platform.federation.selection import SELECTION_RULES, check_selection, selection_traits
from fedloom.platform.plugins import ComponentSpec, PluginError, Registry, is_import_path
from fedloom.platform.settings import (
    BELOW_ONE,
    ONE_OR_MORE,
    PART,
    POSITIVE,
    ZERO_OR_MORE,
    ComponentName,
    component_specs,
)
from fedloom.platform.spaces.slices import Slice

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
        float, POSITIVE, "scalars that fewer clients per round than this are expected to hold never change"
    ] = 0.5
    secure: Annotated[bool, "secure aggregation: the server learns only sums (simulated, with its messages)"] = False
    fraction_bits: Annotated[int, Interval(ge=1, le=30), "secure: binary places of updates in fixed point"] = 16
    survivors: Annotated[float, PART, "secure: share of a cohort that must remain for sums to be revealed"] = 0.5
    accountant: Annotated[Literal["rdp", "pld"], "Rényi divergences, or (for poisson, all) loss distributions"] = "rdp"


@dataclass
class TrainingConfig:
    """A federated training stage: rounds, selection, local training, and aggregation."""

    rounds: Annotated[int, ZERO_OR_MORE, "number of rounds; a stage of 0 rounds is skipped"] = 50
    clients_per_round: Annotated[int | None, ONE_OR_MORE, "number of clients per round; null: all"] = 10
    arrivals: Annotated[
        int | None, ONE_OR_MORE, "number of answers that end a round, of clients_per_round clients at work; null: all"
    ] = None
    asynchronous: Annotated[
        str | None,
        ComponentName("arrival rule"),
        "arrival rule, such as fedbuff or fedasync, by which clients still at work when a round ends go on and count "
        "later; null: they are given up (over-selection)",
    ] = None
    max_staleness: Annotated[
        int | None,
        ZERO_OR_MORE,
        "asynchronous: clients are told to stop if their weights are more rounds old than this; null: no limit",
    ] = None
    epochs: Annotated[int, EPOCHS, "passes of a client over its training data per round"] = 1
    batch_size: Annotated[int, ONE_OR_MORE, "samples per step of a client"] = 32
    optimizer: Annotated[str, ComponentName("local optimizer"), "how a client turns gradients into updates"] = "sgd"
    optimizer_state: Annotated[
        Literal["fresh", "kept"],
        "momentum or moments in a client's next round: fresh, or kept as its state (memory for each past participant)",
    ] = "fresh"
    lr: Annotated[float, POSITIVE, "learning rate of the clients"] = 0.1
    momentum: Annotated[float, BELOW_ONE, "momentum of the clients' SGD"] = 0.9
    idle_momentum: Annotated[
        bool, "momentum also moves operators that a batch's path leaves out, as in torch before 2.0; false: they rest"
    ] = False
    weight_decay: Annotated[float, ZERO_OR_MORE, "weight decay of the clients"] = 0.0
    clip_norm: Annotated[float, ZERO_OR_MORE, "limit of the gradient's norm, 0 for none"] = 0.0
    schedule: Annotated[
        Schedule,
        "lr over rounds: fixed, cosine (to final_lr_share), step (x.1 at 1/2 and 3/4), steps (x.1 every step_rounds)",
    ] = "fixed"
    final_lr_share: Annotated[float, PART, "cosine: the share of lr that is left in the last round"] = 0.1
    step_rounds: Annotated[int, ONE_OR_MORE, "steps: rounds between two reductions of lr"] = 10
    local_warmup_steps: Annotated[
        int, ZERO_OR_MORE, "first steps of a client's round, in which its lr rises to the round's lr"
    ] = 0
    local_cosine_to: Annotated[
        float | None, PART, "share of lr left in the last step of a client's round, by a cosine; null: all of it"
    ] = None
    min_contributors: Annotated[int, ONE_OR_MORE, "scalars covered by fewer clients keep their old value"] = 1
    selection: Annotated[str, ComponentName("selection rule"), "how a round's clients are selected"] = "uniform"
    local_rule: Annotated[str, ComponentName("local rule"), "correction of the clients' gradients"] = "sgd"
    weighting: Annotated[str, ComponentName("weighting rule"), "weights of a client's tensors in the mean"] = "fedavg"
    server: Annotated[str, ComponentName("server rule"), "the server's update from the clients' mean"] = "replace"
    aggregator: Annotated[
        str, ComponentName("aggregator"), "mean, or a rule that compares clients and gets each client's update"
    ] = MEAN
    augment: Annotated[str | None, ComponentName("augmentation"), "the stage's augmentation; null: data.augment"] = None
    processors: Annotated[
        list[Annotated[str, ComponentName("processor")]], "steps that change updates on their way, such as sparsify"
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
    optimizer: ComponentSpec = PLAIN
    processors: tuple[ComponentSpec, ...] = ()
    more: Mapping[str, ComponentSpec] = field(default_factory=dict)
    key: str = ""


REGISTRIES: Mapping[str, Registry[Any]] = {
    "selection": SELECTION_RULES,
    "local_rule": LOCAL_RULES,
    "weighting": WEIGHTING_RULES,
    "server": SERVER_RULES,
    "aggregator": AGGREGATORS,
    "optimizer": LOCAL_OPTIMIZERS,
}


Named = Mapping[str, tuple[Registry[Any], str]]
"""Registries (slots) and the name chosen from each, by configuration key."""


def rules_of(config: TrainingConfig, key: str, more: Named | None = None) -> Rules:
    """The rules that a stage's configuration names; a user's own rules are tested on small inputs.

    `key` is the configuration key of the stage; `more` are further choices, which share the stage's options.
    Raises ValueError for a rule that does not exist or fails, and for invalid options.
    """
    named = named_rules(config) | dict(more or {})
    _check_names(named, key)
    specs = dict(zip(named, component_specs([*named.values()], config.options, f"{key}.options"), strict=True))
    selection, local, weighting, server, aggregator, optimizer = (specs.pop(name) for name in REGISTRIES)
    processors = tuple(specs.pop(_processor_key(index)) for index in range(len(config.processors)))
    rules = Rules(selection, local, weighting, server, aggregator, optimizer, processors, specs, key)
    if config.idle_momentum and optimizer != PLAIN:
        raise ValueError(f"{key}.idle_momentum=true is for SGD only: use {key}.optimizer=sgd, given {optimizer.name}")
    _check_local_rule(rules, config, key)
    _check_aggregator(rules, config, key)
    try_rules(rules, config.clients_per_round)
    return rules


def named_rules(config: TrainingConfig) -> dict[str, tuple[Registry[Any], str]]:
    """The registries and the names chosen from them, by the stage's configuration keys."""
    named = {name: (slot, getattr(config, name)) for name, slot in REGISTRIES.items()}
    named |= {_processor_key(index): (PROCESSORS, name) for index, name in enumerate(config.processors)}
    if config.asynchronous is not None:
        named["asynchronous"] = (ARRIVAL_RULES, config.asynchronous)
    return named if config.augment is None else {**named, "augment": (AUGMENTATIONS, config.augment)}


def _processor_key(index: int) -> str:
    return f"processors[{index}]"


def own_augmentation(config: TrainingConfig, of_data_set: Mapping[str, Any]) -> ComponentSpec | None:
    """The stage's own augmentation with its options, and the data set's that it shares; None if it uses the data's.

    `rules_of` has checked the stage's options, which its rules share.
    """
    if config.augment is None:
        return None
    known = AUGMENTATIONS.options_of(config.augment)
    options = {name: value for name, value in {**of_data_set, **config.options}.items() if name in known}
    return component_specs([(AUGMENTATIONS, config.augment)], options, "options")[0]


def _check_local_rule(rules: Rules, config: TrainingConfig, key: str) -> None:
    """Raises ValueError if local and server rule do not fit together, or the local rule refuses the local training."""
    local, server = rules.local.name, rules.server.name
    needed = local_rule(rules.local).server
    if needed not in (None, server):
        raise ValueError(f"{key}.local_rule={local} needs {key}.server={needed}, given {server}: set both")
    traits = server_traits(server)
    if traits.local_rule not in (None, local):
        raise ValueError(f"{key}.server={server} needs {key}.local_rule={traits.local_rule}, given {local}: set both")
    if traits.needs_every_contributor and config.min_contributors > 1:
        raise ValueError(
            f"{key}.min_contributors={config.min_contributors}: {server}'s server state is the mean of all clients' "
            "states; use 1"
        )
    if selection_traits(rules.selection.name).shortens_updates:
        refuse_parts(rules.local, key, rules.selection.name, "another selection rule")
    problem = local_rule(rules.local).refuses(
        local_sgd(config, 0, NO_AUGMENTATION, balanced=False, optimizer=rules.optimizer)
    )
    if problem is not None:
        raise ValueError(f"{key}.local_rule={local} cannot be used with {key}.{problem}")


def _check_aggregator(rules: Rules, config: TrainingConfig, key: str) -> None:
    """Raises ValueError for an aggregator of single updates if the configuration gives the server only sums."""
    if rules.aggregator.name == MEAN:
        return
    privacy, beside = config.privacy, f"{key}.aggregator={rules.aggregator.name}"
    if privacy.secure:
        raise ValueError(f"{beside} needs every single update: {key}.privacy.secure=true hides all but their sum")
    if privacy.clip is not None or privacy.noise:
        raise ValueError(f"{beside}: the noise of {key}.privacy is for weighted sums; use {key}.aggregator={MEAN}")
    if weighting_traits(rules.weighting.name).weighs_unheld:
        raise ValueError(
            f"{beside} compares only clients that hold a scalar: {key}.weighting={rules.weighting.name} counts others"
        )


MOST_TRIED = 1000
"""Largest number of clients on which an aggregator is tested: enough for any that needs only a share of them."""


def check_cohort(rules: Rules, clients: int) -> None:
    """Raises ValueError if a round has too few clients for the aggregator, even for a scalar that all of them hold."""
    aggregator, old = rules.aggregator, {PARAMETER: torch.zeros(1)}
    sums = KeptUpdates(rule=aggregator)
    for _ in range(min(clients, MOST_TRIED)):
        sums.add(Update({PARAMETER: torch.ones(1)}, {PARAMETER: Slice(PARAMETER)}, {PARAMETER: 1.0}))
    if aggregator.name != MEAN and not sums.finish(old).coverage:
        with_options = "".join(f" with {rules.key}.options.{name}={value}" for name, value in aggregator.options)
        raise ValueError(
            f"{rules.key}.aggregator={aggregator.name}{with_options} needs more than the {clients} clients of a round, "
            "so that nothing would ever be trained: raise clients_per_round, or assume fewer attackers"
        )


def _check_names(named: Named, key: str) -> None:
    for name, (slot, choice) in named.items():
        try:
            slot.find(choice)
        except ValueError as error:
            raise type(error)(f"{key}.{name}: {error}") from error


def check_rule_names(config: object, key: str) -> None:
    """Raises ValueError if a training stage within a method's configuration names a rule that does not exist.

    It is called before data is prepared, which may take minutes; a user's own rules are looked up later.
    """
    if isinstance(config, TrainingConfig):
        _check_names({name: pair for name, pair in named_rules(config).items() if not is_import_path(pair[1])}, key)
    for field_ in fields(config) if is_dataclass(config) else ():
        check_rule_names(getattr(config, field_.name), f"{key}.{field_.name}")


def augmentation_of(world: World, config: TrainingConfig) -> ComponentSpec:
    """The augmentation of the stage's batches, its own or the data's, with the data set's values that it asks for."""
    augment = own_augmentation(config, world.data_options)
    return world.augment if augment is None else coloured(augment, world.data.dataset.colours)


def cohort_size(config: TrainingConfig, num_clients: int) -> int:
    """The number of clients of a full round of the stage."""
    return num_clients if config.clients_per_round is None else config.clients_per_round


def answers_per_round(config: TrainingConfig, num_clients: int) -> int:
    """The number of answers that end a round of the stage."""
    return cohort_size(config, num_clients) if config.arrivals is None else config.arrivals


def expected_size(config: TrainingConfig, num_clients: int) -> int:
    """The expected number of clients of a round; rules that select all clients ignore `clients_per_round`."""
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


def learning_rate(config: TrainingConfig, round_: int) -> float:
    """The learning rate of a round (from 0)."""
    if config.schedule == "fixed":
        return config.lr
    if config.schedule == "cosine":
        progress = round_ / max(1, config.rounds - 1)
        share = config.final_lr_share + (1 - config.final_lr_share) * (1 + math.cos(math.pi * progress)) / 2
        return config.lr * share
    if config.schedule == "step":
        return config.lr * 0.1 ** sum(round_ >= config.rounds * share for share in (0.5, 0.75))
    return config.lr * 0.1 ** (round_ // config.step_rounds)


def local_sgd(
    config: TrainingConfig,
    round_: int,
    augment: ComponentSpec,
    *,
    balanced: bool,
    rule: ComponentSpec = PLAIN,
    optimizer: ComponentSpec = PLAIN,
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
        optimizer=optimizer,
        keeps_state=config.optimizer_state == "kept",
        warmup_steps=config.local_warmup_steps,
        cosine_to=config.local_cosine_to,
    )


# -- tests of a user's own rules ---------------------------------------------------------------------------------------


PARAMETER, BUFFER = "layer.weight", "layer.running_mean"
TRIED_SAMPLES = (4, 1000)


def try_rules(rules: Rules, cohort: int | None) -> None:
    """Raises a one-line PluginError that names the rule if one of the user's own rules fails.

    `cohort` is the number of clients per round, None for all clients.
    """
    if is_import_path(rules.selection.name):
        check_selection(rules.selection, cohort)
    if is_import_path(rules.weighting.name):
        # Of two clients, with few and with many samples, at least one must count.
        rule, name = weighting_rule(rules.weighting), rules.weighting.name
        works = [Work(n, 2 * n, {PARAMETER: 2 * n, BUFFER: n}) for n in TRIED_SAMPLES]
        if not any(rule(work)[tensor] for work in works for tensor in work.seen_by_tensor):
            few, many = TRIED_SAMPLES
            raise PluginError(
                f"weighting rule {name!r} gives all tensors weight 0, for a client with {few} samples and for one with "
                f"{many}: nothing would be trained; give what is trained a weight above 0"
            )
    if is_import_path(rules.server.name):
        _try_server(rules.server)
    if is_import_path(rules.local.name):
        _try_local(rules.local)
    if is_import_path(rules.optimizer.name):
        _try_optimizer(rules.optimizer)
    arrival = rules.more.get("asynchronous")
    if arrival is not None and is_import_path(arrival.name):
        _try_arrival(arrival)


def _try_server(server: ComponentSpec) -> None:
    rule = SERVER_RULES.make(server)
    old, state = {PARAMETER: torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, dict[str, torch.Tensor]()
    for round_ in range(2):
        sums = WeightedSums()
        first_row = {PARAMETER: Slice(PARAMETER, ((0, 1), (0, 2)))}
        sums.add(Update({PARAMETER: torch.ones(1, 2)}, first_row, {PARAMETER: 1.0}))
        new, state = serve({PARAMETER: (server.name, rule)}, old, sums.finish(old), state, ServerRound(round_, 1, 2))
        old = {PARAMETER: new[PARAMETER]}


def _try_arrival(choice: ComponentSpec) -> None:
    from fedloom.platform.averaging.staleness import arrived  # only asynchronous runs need it

    rule, old = ARRIVAL_RULES.make(choice), {PARAMETER: torch.zeros(1, 2)}
    update = Update({PARAMETER: torch.ones(1, 2)}, {PARAMETER: Slice(PARAMETER)}, {PARAMETER: 1.0})
    for staleness in range(2):
        arrived(update, (choice.name, rule), old, old, staleness, {PARAMETER})


def _try_optimizer(choice: ComponentSpec) -> None:
    """Makes two steps on one parameter."""
    parameter = torch.ones(2, requires_grad=True)
    optimizer = Optimizer(LocalSGD(1, 2, 0.1, optimizer=choice), {PARAMETER: parameter})
    for _ in range(2):
        parameter.grad = torch.tensor([1.0, -2.0])
        optimizer.step()
    if not bool(torch.isfinite(parameter).all()):
        raise PluginError(f"local optimizer {choice.name!r} makes parameters that are not finite")
    if torch.equal(parameter.detach(), torch.ones(2)):
        raise PluginError(
            f"local optimizer {choice.name!r} leaves the parameters as they are: change step.parameters in place"
        )


def _try_local(local: ComponentSpec) -> None:
    """Runs two rounds of one client's step and the server's merge."""
    rule, state = local_rule(local), dict[str, torch.Tensor]()
    weights = {PARAMETER: torch.tensor([1.0, 2.0])} | {
        place_of(slot, PARAMETER): torch.zeros(2) for slot in rule.shared
    }
    for round_ in range(2):
        parameter = weights[PARAMETER].clone().requires_grad_()
        slices = {PARAMETER: Slice(PARAMETER)}
        sgd = LocalSGD(1, 2, 0.1)
        client = LocalClient(0, round_, 2, 1, sgd, {PARAMETER: parameter}, slices, weights, state)
        correct = begun(rule, client)
        (parameter.square().sum() / 2).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            if correct is not None:
                assert parameter.grad is not None, "the loss reached it"
                correct([PARAMETER], [parameter], [parameter.grad])
            rule.end(client)
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            raise PluginError(f"local rule {local.name!r} makes a gradient that is not finite")
        sums = WeightedSums()
        sums.add(Update(client.sent, client.sent_slices, dict.fromkeys(client.sent, 1.0)))
        merge = dict.fromkeys(client.sent, (local.name, rule.merge))
        merged, _ = serve(merge, weights, sums.finish(weights), {}, ServerRound(round_, 1, 2))
        weights, state = {**weights, **merged}, client.state
