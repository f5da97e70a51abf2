"""Readable architectures: operators, blocks and widths, or the nodes of cells, instead of numbers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from fedloom.experiments.analysis.tables import Tables, configuration

if TYPE_CHECKING:
    from fedloom.platform.spaces.base import SearchSpace
    from fedloom.platform.spaces.capabilities import HasCells
    from fedloom.platform.spaces.slices import Subspace

Decoder = Callable[[str], str]
"""Turns an architecture, as stored in the tables, into readable text."""

SHORT = {
    "sep_conv_3x3": "sep3",
    "sep_conv_5x5": "sep5",
    "dil_conv_3x3": "dil3",
    "dil_conv_5x5": "dil5",
    "max_pool_3x3": "max",
    "avg_pool_3x3": "avg",
    "skip_connect": "skip",
}
"""Short names of cell operators, since an architecture lists dozens of them."""


def decoder(config: Mapping[str, Any]) -> Decoder:
    """The decoder that turns architectures of runs with this stored configuration into readable text.

    It takes the text of the columns `architecture` and `subspace` and returns
    - for a supernet of operators, the operators in order: "8-8-2" is "2× conv(3), identity"; a layer that keeps
      several is "conv(3)|identity" ("0,1/0" is "conv(3)|identity, conv(3)");
    - for elastic networks, the blocks per stage and their widths: "blocks 3/2/4/3; expansions 0.14"; a stage whose
      blocks differ lists them ("expansions 0.1,0.25/0.14/...");
    - for cells, every node as the sum of its inputs: "normal: 0 = sep3(c_k-2) + skip(c_k-1), 1 = ...";
    - for other spaces, the space's label, such as "p=0.25", or the space's name if it has no choice;
    - the text itself if there is no label, for spaces of the user's own (reading results runs no code that they
      name), and for text that this version cannot decode.

    The first call builds the space, which imports torch; each text is decoded only once.
    """
    spaces: list[SearchSpace | None] = []

    @cache
    def decode(text: str) -> str:
        if not spaces:
            spaces.append(space_of(config))
        return text if spaces[0] is None else _words(spaces[0], text)

    return decode


def decoded(tables: Tables, run_id: str, architecture: str) -> str:
    """An architecture of a run, given the beginning of its id, in words; see `decoder`."""
    matching = [known for known in tables.runs["run_id"] if known.startswith(run_id)]
    if run_id not in matching:
        if len(matching) != 1:
            raise ValueError(f"{len(matching)} runs in the tables have ids that begin with {run_id!r}: give one's id")
        run_id = matching[0]
    return decoder(configuration(tables, run_id))(architecture)


def space_of(config: Mapping[str, Any]) -> "SearchSpace | None":
    """The space of a stored configuration; None if it is missing, the user's own, or this version cannot build it."""
    # Imported here, because torch takes seconds to load and other reports do not need it.
    from fedloom.platform.plugins import is_import_path
    from fedloom.platform.spaces.registry import build_space
    from fedloom.platform.spaces.space_config import SpaceConfig, stored_space

    stored = config.get("space")
    if stored is None or not set(stored) <= {f.name for f in fields(SpaceConfig)}:
        return None
    code = (stored.get("name"), stored.get("build"), *stored.get("options", {}).values())
    if any(is_import_path(value) for value in code if isinstance(value, str)):
        return None
    try:
        return build_space(stored_space(stored))
    except ValueError:
        return None


def _words(space: "SearchSpace", text: str) -> str:
    from fedloom.platform.spaces.capabilities import HasCells, lacking

    if space.num_architectures == 1:
        return space.name
    if "operators" in space.meaning((0,) * len(space.options)):
        subspace, names = subspace_of(space, text), _operator_names(space)
        if subspace is None:
            return text
        if not lacking(space, HasCells):
            return "; ".join(_cells(cast("HasCells", space), names, subspace))
        layers = zip(names, subspace, strict=True)
        return _in_order("|".join(row_names[option] for option in row) or "none" for row_names, row in layers)
    try:
        architecture = space.parse(text)
    except ValueError:
        return text  # written with another version of the space
    meaning = dict(space.meaning(architecture))
    label = meaning.pop("label", "")
    if "depths" in meaning:
        depths = "/".join(map(str, meaning.pop("depths")))
        return "; ".join([f"blocks {depths}", *(f"{name} {_widths(stages)}" for name, stages in meaning.items())])
    return label or text


def _operator_names(space: "SearchSpace") -> list[list[str]]:
    """The names of each decision's operators."""
    names: list[list[str]] = [[] for _ in space.options]
    for option in range(max(space.options)):
        meant = space.meaning(tuple(min(option, count - 1) for count in space.options))["operators"]
        for of_decision, name, count in zip(names, meant, space.options, strict=True):
            of_decision += [name] if option < count else []
    return names


def subspace_of(space: "SearchSpace", text: str) -> "Subspace | None":
    """The kept operators per decision, from "0,1/0//1" or an architecture "0-1-0-1"; None if the text does not fit."""
    pieces = text.split("/") if "/" in text else text.split("-")
    try:
        subspace = tuple(tuple(int(option) for option in piece.split(",") if option) for piece in pieces)
    except ValueError:
        return None
    fits = len(subspace) == len(space.options) and all(
        list(row) == sorted(set(row)) and all(0 <= option < count for option in row)
        for row, count in zip(subspace, space.options, strict=True)
    )
    return subspace if fits else None


def _in_order(names: Iterable[str]) -> str:
    counted = [(name, len([*same])) for name, same in groupby(names)]
    return ", ".join(name if count == 1 else f"{count}× {name}" for name, count in counted)


def _widths(stages: Sequence[Sequence[float]]) -> str:
    """The widths of the blocks per stage; equal widths are written once."""
    if len({width for stage in stages for width in stage}) == 1:
        return f"{stages[0][0]:g}"
    return "/".join(
        f"{stage[0]:g}" if len(set(stage)) == 1 else ",".join(f"{width:g}" for width in stage) for stage in stages
    )


def node_label(node: int, nodes: int) -> str:
    """The name of a node in a cell with two inputs, `nodes` inner nodes and one output."""
    return ("c_k-2", "c_k-1", *map(str, range(nodes)), "c_k")[node]


def _cells(space: "HasCells", names: Sequence[Sequence[str]], subspace: "Subspace") -> Iterator[str]:
    """For each cell type, every inner node as a sum of operators on its inputs; pruned edges are left out."""
    from fedloom.platform.spaces.darts import CELL_TYPES

    for cell_type in CELL_TYPES:
        edges = space.edges(cell_type)
        nodes = max(node for _, node in edges) - 1
        terms: dict[int, dict[str, list[str]]] = {node: {} for node in range(2, nodes + 2)}
        for (source, node), decision in zip(edges, space.decisions(cell_type), strict=True):
            kept_names = (names[decision][option] for option in subspace[decision])
            if operators := "|".join(SHORT.get(name, name) for name in kept_names):
                terms[node].setdefault(operators, []).append(node_label(source, nodes))
        sums = (" + ".join(f"{name}({', '.join(of)})" for name, of in each.items()) or "0" for each in terms.values())
        yield f"{cell_type}: " + ", ".join(f"{node} = {each}" for node, each in enumerate(sums))
