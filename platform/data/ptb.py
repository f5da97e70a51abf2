"""The Penn Treebank in Mikolov's preparation: words, one sentence per line (Mikolov et al. 2010)."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedloom.platform.data.artefact import Fields, hash_of_file
from fedloom.platform.data.tokens import TokenPart, TokenSource, cut

SEQUENCE_LENGTH = 35
VOCABULARY_SIZE = 10_000
END, UNKNOWN = "<eos>", "<unk>"
FOLDERS = ("ptb", "ptb/penn_treebank", "simple-examples/data")
COLUMN = "sentence"
"""The column of the hub's Parquet files, whose rows are lines."""
FILES = {"train": "ptb.train.txt", "test": "ptb.test.txt"}


def make_vocabulary(words: list[str], size: int = VOCABULARY_SIZE) -> tuple[str, ...]:
    """The `size` most frequent words, by descending frequency, then alphabetically; `<unk>` is always one of them."""
    ranked = sorted(Counter(words).items(), key=lambda item: (-item[1], item[0]))
    kept = [word for word, _ in ranked[:size]]
    if UNKNOWN not in kept:
        kept = [*kept[: size - 1], UNKNOWN]
    return tuple(kept)


@dataclass(frozen=True, eq=False)
class PtbSource(TokenSource):
    """The words of `ptb.train.txt` and `ptb.test.txt`, with `<eos>` at the end of every line, read on demand.

    Created by `PtbSource.find`; also of the hub's `train-*.parquet` and `test-*.parquet`.
    `ptb.valid.txt` is not read: as for all data sets, a client's validation sequences are taken from its training
    sequences. Words that are not in the vocabulary become `<unk>`.
    """

    files: Mapping[str, tuple[Path, ...]]
    sequence_length: int
    client_names: tuple[str, ...] = ()

    @classmethod
    def find(cls, root: Path, sequence_length: int | None) -> "PtbSource | None":
        """The source in one of `FOLDERS` under `root`; None if none exists.

        Raises ValueError naming the file that is missing.
        """
        folders = [root / name for name in FOLDERS if (root / name).is_dir()]
        for folder in folders:
            files = {part: folder / name for part, name in FILES.items()}
            tables = {part: sorted(folder.glob(f"{part}-*.parquet")) for part in FILES}
            if any(file.is_file() for file in files.values()):
                missing = next((file for file in files.values() if not file.is_file()), None)
                if missing is not None:
                    raise ValueError(f"{missing}: not found; ptb needs {' and '.join(FILES.values())}")
                texts = {part: (file,) for part, file in files.items()}
                return cls(texts, sequence_length or SEQUENCE_LENGTH)
            if all(tables.values()):
                return cls({part: tuple(of) for part, of in tables.items()}, sequence_length or SEQUENCE_LENGTH)
        if folders:
            raise ValueError(f"{folders[0] / FILES['train']}: not found; ptb needs {' and '.join(FILES.values())}")
        return None

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """The vocabulary of the training text (see `make_vocabulary`)."""
        return make_vocabulary(self._words("train"))

    def _words(self, part: str) -> list[str]:
        return [word for file in self.files[part] for word in _read(file)]

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


def _lines(path: Path) -> list[str]:
    try:
        if path.suffix == ".parquet":
            return [str(line) for line in pq.read_table(path, columns=[COLUMN]).column(0).to_pylist()]
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error}); expected words, one sentence per line") from error
    except (pa.ArrowException, OSError) as error:
        said = str(error).splitlines()[0]
        raise ValueError(f"{path}: cannot be read ({said}); expected a Parquet file with a column {COLUMN}") from error


def _read(path: Path) -> list[str]:
    lines = _lines(path)
    if not any(line.split() for line in lines):
        raise ValueError(f"{path}: has no text; expected words, one sentence per line")
    return [word for line in lines for word in (*line.split(), END)]
