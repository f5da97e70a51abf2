"""The type of a law, and comparisons of two sets of named tensors."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from fedloom.platform.plugins import PluginError, in_one_line, nearest
from fedloom.platform.spaces.slices import Weights

T = TypeVar("T")

Check = Callable[[T], Iterator[str]]
"""Yields the violations of a law, each as a short text with the numbers; yields nothing if the law holds."""


@dataclass(frozen=True)
class Law:
    """A law and the rule or space that must obey it; calling it raises AssertionError if the law is broken.

    Attributes:
        kind: the kind of what is checked, such as `weighting rule`.
        name: the name of what is checked.
        law: the law's name, in words.
        disagreements: yields the violations.
    """

    kind: str
    name: str
    law: str
    disagreements: Callable[[], Iterator[str]]

    @property
    def __name__(self) -> str:
        """The id that pytest shows for a test parametrised by laws."""
        return f"{self.name}: {self.law}"

    def __call__(self) -> None:
        """Raises AssertionError naming what was checked, the law, and the numbers that disagree."""
        what = f"{self.kind} {self.name!r}"
        broken = f"{what} breaks the law {self.law!r}"
        try:
            violation = next(self.disagreements(), None)
        except PluginError as error:
            raise AssertionError(f"{broken}: it {str(error).removeprefix(f'{what} ')}") from error
        except Exception as error:
            raise AssertionError(f"{broken}: it fails: {in_one_line(error)}") from error
        if violation is not None:
            raise AssertionError(f"{broken}: {violation}")


def laws_of(kind: str, name: str, checked: T, checks: Sequence[Check[T]], skip: Collection[str]) -> list[Law]:
    """The laws of a kind for one rule or space, without the skipped ones; ValueError if `skip` names an unknown law."""
    by_law = {in_words(check): check for check in checks}
    for law in skip:
        if law not in by_law:
            known = ", ".join(map(repr, by_law))
            raise ValueError(f"no law of a {kind} is called {law!r}: they are {known}{nearest(law, [*by_law])}")
    return [Law(kind, name, law, partial(check, checked)) for law, check in by_law.items() if law not in skip]


def in_words(check: Check[T]) -> str:
    """A law's name: its function's name with spaces."""
    return check.__name__.replace("_", " ")


# -- comparisons of named tensors -------------------------------------------------------------------------------------


def differing(actual: Weights, expected: Weights) -> Iterator[str]:
    """Yields where two sets of tensors differ in names, shapes, dtypes or bits, at most one scalar per tensor."""
    yield from _differing_names(actual, expected)
    for name in _common(actual, expected):
        yield from different_bits(name, actual[name], expected[name])


def different_bits(name: str, actual: Tensor, expected: Tensor, where: Tensor | None = None) -> Iterator[str]:
    """Yields the first scalar whose bits differ, within the mask `where` if one is given."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        yield f"{name} is {kind_of(actual)}, expected {kind_of(expected)}"
        return
    wrong = (_bits(actual) != _bits(expected)).any(dim=1).reshape(actual.shape)
    yield from _first(name, wrong if where is None else wrong & where, actual, expected)


def far_apart(actual: Weights, expected: Weights, share: float = 1e-5) -> Iterator[str]:
    """Yields where two sets of tensors differ by more than rtol = `share` and atol = `share` / 10."""
    yield from _differing_names(actual, expected)
    for name in _common(actual, expected):
        a, b = actual[name].double(), expected[name].double()
        if a.shape != b.shape:
            yield f"{name} is {kind_of(actual[name])}, expected {kind_of(expected[name])}"
            return
        yield from _first(name, ~torch.isclose(a, b, rtol=share, atol=share / 10), a, b)


def _differing_names(actual: Weights, expected: Weights) -> Iterator[str]:
    for name in sorted(actual.keys() ^ expected.keys()):
        yield f"{name} is {'missing' if name in expected else 'there, and should not be'}"


def _common(actual: Weights, expected: Weights) -> list[str]:
    return [name for name in expected if name in actual]


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of every scalar, (scalars, bytes): identical NaNs compare as equal, 0 and -0 as different."""
    return tensor.detach().cpu().contiguous().reshape(-1, 1).view(torch.uint8)


def _first(name: str, wrong: Tensor, actual: Tensor, expected: Tensor) -> Iterator[str]:
    if bool(wrong.any()):
        index = tuple(wrong.nonzero()[0].tolist())
        where = f"{name}[{', '.join(map(str, index))}]" if index else name
        count = int(wrong.sum())
        others = f" (and {count - 1} others of {wrong.numel()} differ)" if count > 1 else ""
        yield f"{where} is {_shown(actual[index])}, expected {_shown(expected[index])}{others}"


def _shown(scalar: Tensor) -> str:
    value = scalar.item()
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def kind_of(tensor: Tensor) -> str:
    """A tensor's dtype and shape, such as `float32 (3, 2)`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
