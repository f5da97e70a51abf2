"""The declaration of a method: its configuration, its stages, and properties of its runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fedloom.platform.federation.stage import Stage
    from fedloom.platform.federation.world import World
    from fedloom.platform.spaces.base import SearchSpace

Kind = Literal["tiers", "subnets", "silos", "shared"]
"""The final models of a run: one per tier, subnets of an elastic supernet, one per client, or one for all."""
Own = Literal["nothing", "model", "cells"]
"""The personal state that every silo keeps between rounds: nothing, a model, or the cells after a shared base."""


@dataclass(frozen=True)
class SharedTraining:
    """The first `stages` of a method, which runs can share if they differ only in later parts.

    `later` names the parts of the method's configuration that these stages do not depend on.
    """

    later: tuple[str, ...]
    stages: int = 1


def nothing_shared(_config: Any) -> SharedTraining | None:
    """No training is shared: every run trains its own model."""
    return None


@dataclass(frozen=True)
class Method:
    """A method that a configuration can name.

    Attributes:
        config: a dataclass with a field `name`, whose fields are the keys `method.*`.
        stages: makes the stages from a configuration and a world; ValueError for invalid settings.
        kind: the kind of its final models, used by reports and exports.
        lacks: the tables that its runs leave empty.
        own: for cross-silo methods, each silo's personal state.
        searchable: whether its runs store a supernet that `fedloom search` can search for new targets.
        shared_training: the training that runs of a configuration can share; None if there is none.
        needs: given a space and the method's name, raises ValueError if it cannot use the space; asked before data is
            prepared, which may take minutes.
        tasks: whether tiers may have different tasks (`tiers.tasks`).
    """

    config: type
    stages: Callable[[Any, World], list[Stage]]
    kind: Kind
    lacks: tuple[str, ...] = ()
    own: Own = "nothing"
    searchable: Callable[[Any], bool] = lambda _config: False
    shared_training: Callable[[Any], SharedTraining | None] = nothing_shared
    needs: Callable[[SearchSpace, str], object] | None = None
    tasks: bool = False

    def traits(self, config: Any) -> Mapping[str, Any]:
        """The properties of the method that a run records, as JSON values."""
        searchable = self.searchable(config)
        return {"kind": self.kind, "lacks": list(self.lacks), "own": self.own, "searchable": searchable}
