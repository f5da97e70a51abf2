"""Text for language models: sequences of tokens, with the next tokens as labels."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from fedloom.platform.data.artefact import AnyArray, Fields, IntArray

IGNORED_LABEL = -100
"""The label of padding, which torch's cross entropy ignores by default."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenPart:
    """A part's sequences x (n, T), labels y (n, T), and each sequence's client index (n,), if known."""

    x: AnyArray
    y: AnyArray
    client: IntArray | None = None


class TokenSource(ABC):
    """A text data set as published, in the parts "train" and "test"."""

    @property
    @abstractmethod
    def vocabulary(self) -> tuple[str, ...]:
        """The tokens in the order of their ids."""

    @property
    @abstractmethod
    def client_names(self) -> tuple[str, ...]:
        """The names of the text's natural clients, sorted; empty if there are none."""

    @abstractmethod
    def identity(self) -> Fields:
        """The fields that determine the content, without local paths."""

    @abstractmethod
    def sequences(self, part: str) -> TokenPart:
        """All sequences of the part, in the order of the text."""


def cut(tokens: IntArray, length: int, padding: int) -> tuple[IntArray, IntArray]:
    """Cuts a text into sequences and labels (n, length); the last sequence is padded with `padding`.

    Every token but the first is a label exactly once, so that sums over labels are sums over the text. Labels of
    padding are IGNORED_LABEL. n is 0 for a text of fewer than two tokens.
    """
    num_labels = max(0, len(tokens) - 1)
    num_sequences = -(-num_labels // length)
    x = np.full(num_sequences * length, padding, dtype=np.int64)
    y = np.full(num_sequences * length, IGNORED_LABEL, dtype=np.int64)
    x[:num_labels] = tokens[:num_labels]
    y[:num_labels] = tokens[1:]
    return x.reshape(num_sequences, length), y.reshape(num_sequences, length)


def compact(part: TokenPart, vocabulary_size: int) -> TokenPart:
    """The part in the smallest integer types that hold the vocabulary, and for labels also IGNORED_LABEL."""
    x_type = np.min_scalar_type(vocabulary_size - 1)
    y_type = np.min_scalar_type(-max(vocabulary_size, -IGNORED_LABEL))
    return TokenPart(part.x.astype(x_type), part.y.astype(y_type), part.client)
