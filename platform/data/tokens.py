"""Text for language models: sequences of tokens with the next tokens as labels; Shakespeare and the Penn Treebank."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedloom.platform.data.artefact import AnyArray, ByteArray, Fields, IntArray, hash_of_file

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


# -- Shakespeare as published for TensorFlow Federated: characters, one client per role (McMahan et al. 2017) ---------

SHAKESPEARE_LENGTH = 80
"""As in McMahan et al. 2017."""
CHARACTERS = "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
"""The 86 characters of TensorFlow Federated's text generation tutorial, in its order."""
VOCABULARY = ("<pad>", *CHARACTERS, "<oov>", "<bos>", "<eos>")
PAD, OOV, BOS, EOS = 0, len(CHARACTERS) + 1, len(CHARACTERS) + 2, len(CHARACTERS) + 3
SHAKESPEARE_FILES = {"train": "shakespeare_train.h5", "test": "shakespeare_test.h5"}
EXPECTED_HDF5 = "expected HDF5 with /examples/CLIENT/snippets (bytes)"


_ID_OF_BYTE: ByteArray = np.full(256, OOV, dtype=np.uint8)
_ID_OF_BYTE[np.frombuffer(CHARACTERS.encode(), dtype=np.uint8)] = np.arange(1, len(CHARACTERS) + 1)


def encode(snippets: Iterable[bytes]) -> IntArray:
    """Token ids of a client's concatenated lines, each between BOS and EOS; a byte not in the vocabulary becomes OOV.

    Sequences are cut from the concatenated text, whereas TensorFlow Federated's own preprocessing pads the last
    sequence of every line.
    """
    bos, eos = np.array([BOS], dtype=np.uint8), np.array([EOS], dtype=np.uint8)
    pieces = [np.empty(0, dtype=np.uint8)]
    for snippet in snippets:
        pieces += [bos, _ID_OF_BYTE[np.frombuffer(snippet, dtype=np.uint8)], eos]
    return np.concatenate(pieces, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class ShakespeareSource(TokenSource):
    """The roles' lines of both files, read on demand; created by `ShakespeareSource.find`.

    A role's test lines are the last ones of its play. Sequences are sorted by the roles' names, then in text order.
    With `padded_lines` every line is cut separately, and the padding after it is predicted like any other token.
    `roles` are glob patterns; a role is read if its name matches one of them.
    """

    folder: Path
    sequence_length: int
    padded_lines: bool = False
    roles: tuple[str, ...] = ("*",)
    vocabulary: tuple[str, ...] = VOCABULARY

    @classmethod
    def find(
        cls,
        root: Path,
        sequence_length: int | None,
        *,
        padded_lines: bool = False,
        roles: tuple[str, ...] = ("*",),
    ) -> "ShakespeareSource | None":
        """The source in `shakespeare/` under `root`; None if the folder does not exist.

        Raises ValueError naming the file that is missing.
        """
        folder = root / "shakespeare"
        if not folder.is_dir():
            return None
        for file in SHAKESPEARE_FILES.values():
            if not (folder / file).is_file():
                raise ValueError(
                    f"{folder / file}: not found; shakespeare needs {' and '.join(SHAKESPEARE_FILES.values())}"
                )
        return cls(folder, sequence_length or SHAKESPEARE_LENGTH, padded_lines, roles)

    @cached_property
    def client_names(self) -> tuple[str, ...]:
        """The roles of both files that match `roles`, sorted; ValueError if none does."""
        names: set[str] = set()
        for file in SHAKESPEARE_FILES.values():
            with _clients_of(self.folder / file) as group:
                names.update(group)
        fitting = [name for name in sorted(names) if any(fnmatchcase(name, pattern) for pattern in self.roles)]
        if not fitting:
            raise ValueError(
                f"data.options.roles={list(self.roles)}: no role has such a name; there are {len(names)}, such as "
                f"{min(names)}"
            )
        return tuple(fitting)

    def identity(self) -> Fields:
        return {
            "layout": "shakespeare HDF5",
            "sha256": {file: hash_of_file(self.folder / file) for file in SHAKESPEARE_FILES.values()},
            "sequence_length": self.sequence_length,
            # Omitted at their defaults, so that data sets prepared before these options existed are still found.
            **({"padded_lines": True} if self.padded_lines else {}),
            **({"roles": list(self.roles)} if self.roles != ("*",) else {}),
        }

    def sequences(self, part: str) -> TokenPart:
        import h5py

        path = self.folder / SHAKESPEARE_FILES[part]
        with _clients_of(path) as group:
            lines: dict[str, list[bytes]] = {}
            for role in sorted({*group} & {*self.client_names}):
                text = group[role].get("snippets") if isinstance(group[role], h5py.Group) else None
                if not isinstance(text, h5py.Dataset) or h5py.check_string_dtype(text.dtype) is None or text.ndim != 1:
                    raise ValueError(f"{path}: {group[role].name} has no lines of text; {EXPECTED_HDF5}")
                lines[role] = [bytes(line) for line in text[()]]
        cuts = [self._cut(of_role) for of_role in lines.values()]
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
                raise ValueError(f"{path}: has no group /examples with clients; {EXPECTED_HDF5}")
            yield group
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({str(error).splitlines()[0]}); {EXPECTED_HDF5}") from error


# -- the Penn Treebank in Mikolov's preparation: words, one sentence per line (Mikolov et al. 2010) -------------------

PTB_LENGTH = 35
PTB_VOCABULARY_SIZE = 10_000
END, UNKNOWN = "<eos>", "<unk>"
PTB_FOLDERS = ("ptb", "ptb/penn_treebank", "simple-examples/data")
PTB_COLUMN = "sentence"
"""The text column of the Hugging Face hub's Parquet files, in which each row is a line."""
PTB_FILES = {"train": "ptb.train.txt", "test": "ptb.test.txt"}


def make_vocabulary(words: list[str], size: int = PTB_VOCABULARY_SIZE) -> tuple[str, ...]:
    """The `size` most frequent words, by descending frequency, then alphabetically; `<unk>` is always one of them."""
    ranked = sorted(Counter(words).items(), key=lambda item: (-item[1], item[0]))
    words_kept = [word for word, _ in ranked[:size]]
    if UNKNOWN not in words_kept:
        words_kept = [*words_kept[: size - 1], UNKNOWN]
    return tuple(words_kept)


@dataclass(frozen=True, eq=False)
class PtbSource(TokenSource):
    """The words of `ptb.train.txt` and `ptb.test.txt`, with `<eos>` at the end of every line, read on demand.

    Created by `PtbSource.find`, which also finds the hub's `train-*.parquet` and `test-*.parquet`.
    `ptb.valid.txt` is not read: as for all data sets, a client's validation sequences are taken from its training
    sequences. Words that are not in the vocabulary become `<unk>`.
    """

    files: Mapping[str, tuple[Path, ...]]
    sequence_length: int
    client_names: tuple[str, ...] = ()

    @classmethod
    def find(cls, root: Path, sequence_length: int | None) -> "PtbSource | None":
        """The source in one of `PTB_FOLDERS` under `root`; None if none exists.

        Raises ValueError naming the file that is missing.
        """
        length, needed = sequence_length or PTB_LENGTH, " and ".join(PTB_FILES.values())
        folders = [root / name for name in PTB_FOLDERS if (root / name).is_dir()]
        for folder in folders:
            texts = {part: folder / name for part, name in PTB_FILES.items()}
            if any(file.is_file() for file in texts.values()):
                for file in texts.values():
                    if not file.is_file():
                        raise ValueError(f"{file}: not found; ptb needs {needed}")
                return cls({part: (file,) for part, file in texts.items()}, length)
            tables = {part: tuple(sorted(folder.glob(f"{part}-*.parquet"))) for part in PTB_FILES}
            if all(tables.values()):
                return cls(tables, length)
        if folders:
            raise ValueError(f"{folders[0] / PTB_FILES['train']}: not found; ptb needs {needed}")
        return None

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """The vocabulary of the training text (see `make_vocabulary`)."""
        return make_vocabulary(self._words("train"))

    def _words(self, part: str) -> list[str]:
        return [word for file in self.files[part] for word in _ptb_words(file)]

    def identity(self) -> Fields:
        return {
            "layout": "ptb words",
            "sha256": {file.name: hash_of_file(file) for files in self.files.values() for file in files},
            "sequence_length": self.sequence_length,
        }

    def sequences(self, part: str) -> TokenPart:
        id_of = {word: i for i, word in enumerate(self.vocabulary)}
        unknown = id_of[UNKNOWN]
        tokens = np.array([id_of.get(word, unknown) for word in self._words(part)], dtype=np.int64)
        # The vocabulary has no padding word; the loss ignores the positions after the end of the text.
        return TokenPart(*cut(tokens, self.sequence_length, padding=id_of.get(END, unknown)))


def _ptb_words(path: Path) -> list[str]:
    try:
        if path.suffix == ".parquet":
            lines = [str(line) for line in pq.read_table(path, columns=[PTB_COLUMN]).column(0).to_pylist()]
        else:
            lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error}); expected words, one sentence per line") from error
    except (pa.ArrowException, OSError) as error:
        said = str(error).splitlines()[0]
        raise ValueError(
            f"{path}: cannot be read ({said}); expected a Parquet file with a column {PTB_COLUMN}"
        ) from error
    if not any(line.split() for line in lines):
        raise ValueError(f"{path}: has no text; expected words, one sentence per line")
    return [word for line in lines for word in (*line.split(), END)]
