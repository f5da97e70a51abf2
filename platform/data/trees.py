"""Samples as trees of tensors: one tensor, or several by name, such as a text's tokens and the mask of its padding."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Tree = Tensor | Mapping[str, Tensor]
"""Inputs or labels of a batch: a tensor (B, ...), or tensors (B, ...) by name."""

AnyTree = TypeVar("AnyTree", Tensor, Tree)


def mapped(change: Callable[[Tensor], Tensor], tree: AnyTree) -> AnyTree:
    """The tree with every tensor changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    return cast(AnyTree, {name: change(tensor) for name, tensor in tree.items()})


def mapped_within(change: Callable[[Tensor], Any], outputs: Any) -> Any:
    """A network's outputs with every tensor in them changed, also in nested mappings, tuples and lists."""
    if isinstance(outputs, Tensor):
        return change(outputs)
    if isinstance(outputs, Mapping):
        return {name: mapped_within(change, each) for name, each in outputs.items()}
    return type(outputs)(mapped_within(change, e) for e in outputs) if isinstance(outputs, tuple | list) else outputs


def tensors_of(tree: Tree) -> list[Tensor]:
    """The tree's tensors, in insertion order."""
    return [tree] if isinstance(tree, Tensor) else list(tree.values())


def first(tree: Tree) -> Tensor:
    """The tree's first tensor; all have the same number of samples and are on the same device."""
    return tensors_of(tree)[0]


def rows_of(tree: Tree) -> int:
    """The number of samples."""
    return len(first(tree))


def taken(tree: AnyTree, index: Tensor) -> AnyTree:
    """The samples at these indices."""
    return mapped(lambda tensor: tensor.index_select(0, index), tree)


def joined(trees: Sequence[AnyTree]) -> AnyTree:
    """The samples of several trees, concatenated."""
    if isinstance(trees[0], Tensor):
        return torch.cat([first(tree) for tree in trees])
    parts = cast(Sequence[Mapping[str, Tensor]], trees)
    return cast(AnyTree, {name: torch.cat([part[name] for part in parts]) for name in parts[0]})


def split(tree: AnyTree, sizes: int | list[int]) -> list[AnyTree]:
    """The samples in batches of these sizes."""
    if isinstance(tree, Tensor):
        return list(torch.split(tree, sizes))
    parts = {name: torch.split(tensor, sizes) for name, tensor in tree.items()}
    return [cast(AnyTree, dict(zip(parts, batch, strict=True))) for batch in zip(*parts.values(), strict=True)]


def single(tree: Tree, who: str, what: str = "samples") -> Tensor:
    """The only tensor of a tree; ValueError naming `who` and `what` if the tree has several."""
    if isinstance(tree, Tensor):
        return tree
    raise ValueError(f"{who} needs single-tensor {what}, given {', '.join(tree)}: use another, or your own")
