"""The Penn Treebank in Mikolov's preparation: words, one sentence per line (Mikolov et al. 2010)."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fedloom.platform.data.artefact import Fields, hash_of_file
from fedloom.platform.data.tokens import TokenPart, TokenSource, cut

SEQUENCE_LENGTH = 35
VOCABULARY_SIZE = 10_000
END, UNKNOWN = "<eos>", "<unk>"
FOLDERS = ("ptb", "simple-examples/data")
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

    Created by `PtbSource.find`.
    `ptb.valid.txt` is not read: as for all data sets, a client's validation sequences are taken from its training
    sequences. Words that are not in the vocabulary become `<unk>`.
    """

    folder: Path
    sequence_length: int
    client_names: tuple[str, ...] = ()

    @classmethod
    def find(cls, root: Path, sequence_length: int | None) -> "PtbSource | None":
        """The source in `ptb/` or `simple-examples/data/` under `root`; None if neither exists.

        Raises ValueError naming the file that is missing.
        """
        for folder in (root / name for name in FOLDERS):
            if folder.is_dir():
                for file in FILES.values():
                    if not (folder / file).is_file():
                        raise ValueError(f"{folder / file}: not found; ptb needs {' and '.join(FILES.values())}")
                return cls(folder, sequence_length or SEQUENCE_LENGTH)
        return None

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """The vocabulary of the training text (see `make_vocabulary`)."""
        return make_vocabulary(_read(self.folder / FILES["train"]))

    def identity(self) -> Fields:
        return {
            "layout": "ptb words",
            "sha256": {file: hash_of_file(self.folder / file) for file in FILES.values()},
            "sequence_length": self.sequence_length,
        }

    def sequences(self, part: str) -> TokenPart:
        id_of = {word: i for i, word in enumerate(self.vocabulary)}
        unknown = id_of[UNKNOWN]
        tokens = np.array([id_of.get(word, unknown) for word in _read(self.folder / FILES[part])], dtype=np.int64)
        # The vocabulary has no padding word; the loss ignores the positions after the end of the text.
        return TokenPart(*cut(tokens, self.sequence_length, padding=id_of.get(END, unknown)))


def _read(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error}); expected words, one sentence per line") from error
    if not any(line.split() for line in lines):
        raise ValueError(f"{path}: has no text; expected words, one sentence per line")
    return [word for line in lines for word in (*line.split(), END)]
