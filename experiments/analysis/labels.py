"""Readable architectures: `d=1,0,2,1 e=.14` instead of the choices `11-1-154-6`, operators instead of `8-8-2`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any

from fedloom.experiments.analysis.kinds import elastic_run_ids
from fedloom.experiments.analysis.tables import Tables, configuration

if TYPE_CHECKING:
    from fedloom.platform.spaces.base import SearchSpace
    from fedloom.platform.spaces.elastic import ElasticSpace


@dataclass(frozen=True)
class Labels:
    """Labels of subnets for runs whose stored configuration defines an elastic space; other runs keep the ids."""

    spaces: Mapping[str, "ElasticSpace"]

    def of(self, run_id: str, architecture: str) -> str:
        """The subnet's label, or its id if it has none."""
        space = self.spaces.get(run_id)
        if space is None:
            return architecture
        try:
            return space.label(space.parse(architecture))
        except ValueError:
            return architecture  # written with another version of the space

    def is_largest(self, run_id: str, architecture: str) -> bool:
        """Whether this is the largest subnet of the run's space; False if the space is unknown."""
        space = self.spaces.get(run_id)
        return space is not None and architecture == "-".join(map(str, space.largest))


def labels_of(tables: Tables) -> Labels:
    """The labels of the runs' spaces, without spaces that this version cannot build."""
    spaces: dict[str, ElasticSpace] = {}
    for run_id in elastic_run_ids(tables):
        space = _elastic(configuration(tables, run_id))
        if space is not None:
            spaces[run_id] = space
    return Labels(spaces)


def _elastic(config: Mapping[str, Any]) -> "ElasticSpace | None":
    from fedloom.platform.spaces.elastic import ElasticSpace

    space = space_of(config)
    return space if isinstance(space, ElasticSpace) else None


def decoded(tables: Tables, run_id: str, architecture: str) -> str:
    """What an architecture such as "8-8-2" is: its label, or the operators in order, such as "2× conv(3), identity".

    The id itself if the space has no names for its options, is the user's own (reading results runs no code that they
    name), or is not known to this version.
    """
    from fedloom.platform.plugins import is_import_path

    config = configuration(tables, run_id)
    if is_import_path(str(config.get("space", {}).get("name", ""))):
        return architecture
    space = space_of(config)
    if space is None:
        return architecture
    try:
        options = space.parse(architecture)
    except ValueError:
        return architecture  # written with another version of the space
    operators = [(name, len([*same])) for name, same in groupby(space.meaning(options).get("operators", ()))]
    named = ", ".join(name if count == 1 else f"{count}× {name}" for name, count in operators)
    return named or space.label(options)


def space_of(config: Mapping[str, Any]) -> "SearchSpace | None":
    """The space of a stored configuration; None if it has none or one that this version cannot build."""
    # Imported here, because torch takes seconds to load and other reports do not need it.
    from fedloom.platform.spaces.registry import build_space
    from fedloom.platform.spaces.space_config import SpaceConfig

    stored = config.get("space")
    if stored is None or not set(stored) <= {f.name for f in fields(SpaceConfig)}:
        return None
    try:
        return build_space(SpaceConfig(**stored))
    except ValueError:
        return None
