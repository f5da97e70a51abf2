"""Sounds of one's own: WAV files of a second (16 kHz, mono) in SPEAKER/WORD_*.wav, one client per speaker."""

from pathlib import Path
from typing import Annotated

import numpy as np

from fedloom.platform.data.arrays import Arrays
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.speech import mfcc, read_second
from fedloom.platform.settings import NOT_EMPTY


def sounds(config: DataConfig, *, path: Annotated[str, NOT_EMPTY, "the folder of the speakers' folders"]) -> Arrays:
    """Cepstral coefficients (n, 1, 40, 51), the words, which are the files' names up to `_`, and the speakers."""
    del config
    files = sorted(Path(path).glob("*/*.wav"))
    if not files:
        raise ValueError(
            f"data.options.path={path}: has no SPEAKER/WORD_*.wav; give the folder of the speakers' folders"
        )
    of_files = [file.stem.partition("_")[0] for file in files]
    words = sorted(set(of_files))
    x = np.stack([mfcc(read_second(file)) for file in files])[:, None]
    y = np.array([words.index(word) for word in of_files])
    return Arrays(train=(x, y, [file.parent.name for file in files]), class_names=words)
