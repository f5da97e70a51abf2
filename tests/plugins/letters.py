"""A text of one's own: a Parquet file with the columns `text` and `user`, or any text file, by character or word."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd

from fedloom.platform.data.arrays import Arrays
from fedloom.platform.data.config import DataConfig
from fedloom.platform.data.tokens import cut
from fedloom.platform.settings import NOT_EMPTY, ONE_OR_MORE


def letters(
    config: DataConfig,
    *,
    path: Annotated[str, NOT_EMPTY, "the Parquet file, or a text file, whose lines are no client's"],
    most: Annotated[int, ONE_OR_MORE, "characters or words that are told apart, the most frequent ones"] = 90,
    words: Annotated[bool, "words instead of characters"] = False,
) -> Arrays:
    """Sequences (n, T) of every user's texts, one after the other; the next characters or words are the targets."""
    if not Path(path).is_file():
        raise ValueError(f"data.options.path={path}: not found; give a file with the columns text and user")
    if path.endswith(".parquet"):
        texts = pd.read_parquet(path, columns=["text", "user"]).groupby("user")["text"].agg("\n".join)
    else:
        texts = pd.Series({"": Path(path).read_text(encoding="utf-8")})
    pieces = [text.split() if words else list(text) for text in texts]
    known = ["<pad>", "<other>", *(p for p, _ in Counter(p for of in pieces for p in of).most_common(most))]
    ids = {piece: i for i, piece in enumerate(known)}
    parts = [cut(np.array([ids.get(p, 1) for p in of]), config.sequence_length or 80, padding=0) for of in pieces]
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    users = np.repeat(texts.index.astype(str), [len(tokens) for tokens, _ in parts])
    return Arrays(train=(x, y, users) if len(texts) > 1 else (x, y), class_names=known)
