"""The registry of methods by name."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from inspect import signature
from typing import Any, get_args

from fedloom.platform.clients.evaluation import BatchNorm
from fedloom.platform.federation.algorithm import TrainingStage
from fedloom.platform.federation.method import Kind, Method, Own, SharedTraining, Stage
from fedloom.platform.federation.selection import selection_traits
from fedloom.platform.federation.stopping import check_stop
from fedloom.platform.federation.world import World
from fedloom.platform.plugins import (
    PluginError,
    Shipped,
    an,
    blaming,
    is_import_path,
    place_in_own,
    raised_by_own,
    resolve,
)
from fedloom.platform.results.tables import TABLES
from fedloom.platform.settings import check_settings
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.initialisation import on_meta

logger = logging.getLogger(__name__)

STAGE = ("name", "begin", "rounds_left", "plan", "merge", "end")
"""The members that a stage must have."""
ARGUMENTS = {
    "begin": ("state",),
    "rounds_left": ("state",),
    "plan": ("state",),
    "merge": ("state", "plan", "result"),
    "end": ("state",),
    "macs_left": ("state",),
}
"""The arguments with which the loop calls a stage's methods; `macs_left` is optional."""

METHODS: Mapping[str, Method] = Shipped(
    {
        name: f"fedloom.platform.methods.{name}:METHOD"
        for name in (
            "fedoras",
            "fedavg",
            "random_nas",
            "transfer",
            "superfednas",
            "ofa",
            "heterofl",
            "fjord",
            "fedrolex",
            "splitmix",
            "depthfl",
            "hetlora",
            "flexlora",
            "flora",
            "scalefl",
            "feddf",
            "zerofl",
            "spider",
            "local_adaptation",
            "ditto",
            "per_fedavg",
            "personal_layers",
            "apfl",
            "fedproto",
            "pfedme",
            "fedmask",
            "knn_per",
            "fedmn",
            "global_nas",
            "fednas",
            "fedpnas",
        )
    }
)
"""The built-in methods, each imported on demand."""


def find_method(name: str) -> Method:
    """The method of that name, or a user's own by its import path `module:METHOD`.

    Raises PluginError for an unknown method, or an object that is no `Method`.
    """
    method: Any = resolve("method", name, METHODS)
    if not isinstance(method, Method):
        raise PluginError(
            f"method {name!r} is {an(type(method).__name__)}: give the import path of a Method, see "
            "fedloom.platform.federation.method"
        )
    if is_import_path(name):
        _check(name, method)
    return method


def _check(name: str, method: Method) -> None:
    config = method.config
    if not (isinstance(config, type) and is_dataclass(config) and "name" in {f.name for f in fields(config)}):
        raise PluginError(f"method {name!r}: its config must be a dataclass with a field `name: str`")
    for field, value, known in (("kind", method.kind, get_args(Kind)), ("own", method.own, get_args(Own))):
        if value not in known:
            raise PluginError(f"method {name!r}: its {field} is {value!r:.60}: give one of {', '.join(known)}")
    unknown = [table for table in method.lacks if table not in TABLES] if isinstance(method.lacks, tuple) else [0]
    if unknown:
        raise PluginError(f"method {name!r}: its lacks is {method.lacks!r:.60}: give a tuple of {', '.join(TABLES)}")
    with blaming("method", name):
        method.traits(config())


def method_of(config: Any) -> Method:
    """The method of a configuration; ValueError if it is None."""
    if config is None:
        raise ValueError(f"no method was configured: choose method={' or method='.join(METHODS)}")
    return find_method(config.name)


def check_space(config: Any, space: SearchSpace) -> None:
    """Raises ValueError if the method of this configuration cannot use the space."""
    needs = method_of(config).needs
    if needs is not None:
        needs(space, config.name)


def build_stages(world: World) -> list[Stage]:
    """The stages of the configured method; ValueError for invalid settings."""
    config = world.config.method
    method = method_of(config)
    if world.tasks.names and not method.tasks:
        raise ValueError(
            f"tiers.tasks: {config.name} trains one task for all tiers; leave it out (null), or use fedoras"
        )
    check_settings(config, "method.")
    if not is_import_path(config.name):
        stages = method.stages(config, world)
    else:
        try:
            with blaming("method", config.name, spare=ValueError):
                stages = method.stages(config, world)
        except ValueError as error:
            if isinstance(error, PluginError) or not raised_by_own(error):
                raise
            raise ValueError(f"{error}{place_in_own(error)}") from error
        stages = _checked_stages(stages, f"method {config.name!r}")
    if not any(getattr(stage, "measures_statistics", False) for stage in stages):
        _check_norms(world)
    of_rounds = [stage for stage in stages if isinstance(stage, TrainingStage)]
    keys, is_scored = dict.fromkeys(s.rules.key for s in of_rounds), any(s.may_end_early for s in of_rounds)
    check_stop(world.config.stop, world.config.objective.name, [*keys], is_scored=is_scored)
    if world.config.stop.is_set and method.kind != "silos" and not world.data.num_central("validation"):
        raise ValueError(
            "stop.patience and stop.target need validation data, and there is none: raise data.validation_share"
        )
    _check_private(of_rounds)
    trained = [stage for stage in stages if getattr(stage, "trains", False)]
    if world.attackers and (method.kind == "silos" or not all(isinstance(s, TrainingStage) for s in trained)):
        raise ValueError(
            f"attack.share={world.config.attack.share:g}: the clients of {config.name} cannot attack: set it to 0, "
            "or use a method whose clients train one shared model"
        )
    budget = world.config.tiers.budget.kind
    if budget != "static" and not is_import_path(config.name) and not method.budgets(config):
        logger.warning(
            "tiers.budget.kind=%s has no effect: with these settings, what clients of %s train does not depend on "
            "budgets",
            *(budget, config.name),
        )
    return stages


def _check_private(stages: Sequence[TrainingStage]) -> None:
    """Raises ValueError for stages whose epsilon could not be combined; warns of one after a stage without privacy."""
    configs = [(stage, stage.processing.config) for stage in stages if stage.processing.config.rounds]
    private = [(stage, config) for stage, config in configs if config.privacy.clip is not None]
    samplings = {selection_traits(stage.rules.selection.name).sampling for stage, _ in private}
    if {"uniform", "poisson"} <= samplings:
        raise ValueError(
            "privacy: stages that sample by uniform and by poisson have no common epsilon: use one of them"
        )
    if "uniform" in samplings and any(config.privacy.accountant == "pld" for _, config in private):
        raise ValueError("privacy.accountant=pld knows stages of selection=poisson and all, not uniform: use rdp")
    for index, (stage, config) in enumerate(configs):
        if config.privacy.noise and (open_ := [s.name for s, c in configs[:index] if c.privacy.clip is None]):
            logger.warning(
                "%s: epsilon is that of the private stages alone; %s, before it, trained without privacy, and what "
                "starts from weights of such a stage is not private",
                *(stage.name, ", ".join(open_)),
            )
            return


def _check_norms(world: World) -> None:
    """Raises ValueError for batch norms whose running statistics no stage would update; a user's own may have some."""
    if not world.space.keeps_statistics or world.config.space.name == "module":
        return
    parts = on_meta(partial(world.space.build_subnet, world.architecture(None, ""))).modules()
    if any(isinstance(part, BatchNorm) and part.momentum == 0 for part in parts):
        raise ValueError(
            f"space.norm=static: no training updates the statistics of {world.space.name}'s batch norms; only "
            "heterofl, fjord and the like estimate them, at the end; use space.norm=batch or group"
        )


def _checked_stages(stages: Any, blame: str) -> list[Stage]:
    if not isinstance(stages, list | tuple) or not stages:
        raise PluginError(f"{blame}: its stages are {stages!r:.60}: give a list of one or more")
    for stage in stages:
        missing = [member for member in STAGE if not hasattr(stage, member)]
        if missing:
            raise PluginError(f"{blame}: its stage {type(stage).__name__} has no {', '.join(missing)}")
        _check_members(stage, f"{blame}: its stage {type(stage).__name__}")
    names = [stage.name for stage in stages]
    twice = next((n for n in names if names.count(n) > 1 or not isinstance(n, str)), None)
    if twice is not None:
        raise PluginError(f"{blame}: its stages are called {', '.join(map(str, names))}: give each a name of its own")
    return [*stages]


def _check_members(stage: Any, blame: str) -> None:
    """Raises PluginError for a member that cannot be called as the loop calls it."""
    for member, arguments in ARGUMENTS.items():
        if not hasattr(stage, member):
            continue
        try:
            signature(getattr(stage, member)).bind(*arguments)
        except ValueError:  # a builtin without a signature
            continue
        except TypeError as error:
            raise PluginError(f"{blame}: {member} cannot be called with ({', '.join(arguments)}): {error}") from error


def shared_training(config: Any) -> SharedTraining | None:
    """The training that runs of this method's configuration can share; None if there is none."""
    with blaming("method", config.name):
        shared = method_of(config).shared_training(config)
    if not isinstance(shared, SharedTraining | None):
        raise PluginError(f"method {config.name!r}: its shared_training gives {shared!r:.60}: give a SharedTraining")
    return shared
