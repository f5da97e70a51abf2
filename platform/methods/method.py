"""What a method is: its configuration, its stages, and what it declares about its runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fedloom.platform.federation.stage import Stage
    from fedloom.platform.federation.world import World

Kind = Literal["tiers", "subnets", "silos", "shared"]
"""Whose models a run ends with: one per tier, subnets of an elastic supernet, one per client, or one for all."""
Own = Literal["nothing", "model", "cells"]
"""What every silo keeps of its own from round to round: nothing, a model, or cells behind a shared base."""


@dataclass(frozen=True)
class SharedTraining:
    """The beginning of a method that runs which differ only in what follows can share: its first `stages`.

    `later` names the parts of the method's configuration that they do not depend on.
    """

    later: tuple[str, ...]
    stages: int = 1


def nothing_shared(_config: Any) -> SharedTraining | None:
    """Every run trains its own."""
    return None


@dataclass(frozen=True)
class Method:
    """A method, as a configuration names it.

    Attributes:
        config: a dataclass with a field `name`, whose fields are the keys `method.*`.
        stages: the stages of a configuration in a world, checked: ValueError for settings that cannot run.
        kind: whose models its runs end with; reports and exports go by it.
        lacks: tables that its runs write nothing to.
        own: of methods for silos, what each silo keeps of its own.
        searchable: whether its runs keep a supernet that `fedloom search` can search for new targets.
        shared_training: what runs of a configuration can share; None if every run trains its own.
    """

    config: type
    stages: Callable[[Any, World], list[Stage]]
    kind: Kind
    lacks: tuple[str, ...] = ()
    own: Own = "nothing"
    searchable: Callable[[Any], bool] = lambda _config: False
    shared_training: Callable[[Any], SharedTraining | None] = nothing_shared

    def traits(self, config: Any) -> Mapping[str, Any]:
        """What a run records about its method, as JSON values."""
        searchable = self.searchable(config)
        return {"kind": self.kind, "lacks": list(self.lacks), "own": self.own, "searchable": searchable}
