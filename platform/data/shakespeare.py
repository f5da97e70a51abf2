"""Shakespeare as published for TensorFlow Federated: characters, one client per role (McMahan et al. 2017)."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.platform.data.artefact import ByteArray, Fields, IntArray, hash_of_file
from fedloom.platform.data.tokens import IGNORED_LABEL, TokenPart, TokenSource, cut

SEQUENCE_LENGTH = 80
"""As in McMahan et al. 2017."""
CHARACTERS = "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
"""The 86 characters of TensorFlow Federated's text generation tutorial, in its order."""
VOCABULARY = ("<pad>", *CHARACTERS, "<oov>", "<bos>", "<eos>")
PAD, OOV, BOS, EOS = 0, len(CHARACTERS) + 1, len(CHARACTERS) + 2, len(CHARACTERS) + 3
FILES = {"train": "shakespeare_train.h5", "test": "shakespeare_test.h5"}
EXPECTED = "expected HDF5 with /examples/CLIENT/snippets (bytes)"


def _id_of_byte() -> ByteArray:
    ids = np.full(256, OOV, dtype=np.uint8)
    ids[np.frombuffer(CHARACTERS.encode(), dtype=np.uint8)] = np.arange(1, len(CHARACTERS) + 1)
    return ids


def encode(snippets: Iterable[bytes]) -> IntArray:
    """Token ids of a client's concatenated lines, each between BOS and EOS; a byte not in the vocabulary becomes OOV.

    Sequences are cut from the concatenated text, whereas TensorFlow Federated's own preprocessing pads the last
    sequence of every line.
    """
    ids = _id_of_byte()
    bos, eos = np.array([BOS], dtype=np.uint8), np.array([EOS], dtype=np.uint8)
    pieces = [np.empty(0, dtype=np.uint8)]
    for snippet in snippets:
        pieces += [bos, ids[np.frombuffer(snippet, dtype=np.uint8)], eos]
    return np.concatenate(pieces, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class ShakespeareSource(TokenSource):
    """The roles' lines of both files, read on demand; created by `ShakespeareSource.find`.

    A role's test lines are the last ones of its play. Sequences are sorted by the roles' names, then in text order.
    With `padded_lines` every line is cut alone, and the padding after it is a token to be predicted like any other.
    """

    folder: Path
    sequence_length: int
    padded_lines: bool = False
    vocabulary: tuple[str, ...] = VOCABULARY

    @classmethod
    def find(cls, root: Path, sequence_length: int | None, *, padded_lines: bool = False) -> "ShakespeareSource | None":
        """The source in `shakespeare/` under `root`; None if the folder does not exist.

        Raises ValueError naming the file that is missing.
        """
        folder = root / "shakespeare"
        if not folder.is_dir():
            return None
        for file in FILES.values():
            if not (folder / file).is_file():
                raise ValueError(f"{folder / file}: not found; shakespeare needs {' and '.join(FILES.values())}")
        return cls(folder, sequence_length or SEQUENCE_LENGTH, padded_lines)

    @cached_property
    def client_names(self) -> tuple[str, ...]:
        """The roles of both files."""
        names: set[str] = set()
        for file in FILES.values():
            with _clients_of(self.folder / file) as group:
                names.update(group)
        return tuple(sorted(names))

    def identity(self) -> Fields:
        return {
            "layout": "shakespeare HDF5",
            "sha256": {file: hash_of_file(self.folder / file) for file in FILES.values()},
            "sequence_length": self.sequence_length,
            # Unless it is so, for the data sets that were prepared before it could be.
            **({"padded_lines": True} if self.padded_lines else {}),
        }

    def sequences(self, part: str) -> TokenPart:
        path = self.folder / FILES[part]
        with _clients_of(path) as group:
            lines = {role: _snippets(group[role], path) for role in sorted(group)}
        cuts = [self._cut(own) for own in lines.values()]
        clients = np.searchsorted(self.client_names, list(lines))
        return TokenPart(
            np.concatenate([x for x, _ in cuts]),
            np.concatenate([y for _, y in cuts]),
            np.repeat(clients, [len(x) for x, _ in cuts]),
        )

    def _cut(self, lines: Sequence[bytes]) -> tuple[IntArray, IntArray]:
        """The sequences and labels (n, T) of a role's lines."""
        if not self.padded_lines:
            return cut(encode(lines), self.sequence_length, PAD)
        pieces = [cut(encode([line]), self.sequence_length, PAD) for line in lines]
        nothing = np.empty((0, self.sequence_length), dtype=np.int64)
        x, y = (np.concatenate([nothing, *arrays]) for arrays in zip(*pieces, strict=True))
        return x, np.where(y == IGNORED_LABEL, PAD, y)


@contextmanager
def _clients_of(path: Path) -> Iterator[Any]:
    """The group /examples of the file, open within the block."""
    # Imported here because only the preparation of this data set needs it, and the import would delay every worker.
    import h5py

    try:
        with h5py.File(path, "r") as file:
            group = file.get("examples")
            if not isinstance(group, h5py.Group) or not len(group):
                raise ValueError(f"{path}: has no group /examples with clients; {EXPECTED}")
            yield group
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({str(error).splitlines()[0]}); {EXPECTED}") from error


def _snippets(client: Any, path: Path) -> list[bytes]:
    import h5py

    snippets = client.get("snippets") if isinstance(client, h5py.Group) else None
    if not isinstance(snippets, h5py.Dataset) or h5py.check_string_dtype(snippets.dtype) is None or snippets.ndim != 1:
        raise ValueError(f"{path}: {client.name} has no lines of text; {EXPECTED}")
    return [bytes(snippet) for snippet in snippets[()]]
