"""Random streams of a run, derived only from (seed, purpose, stage, round, client)."""

from hashlib import blake2b

import numpy as np
import torch

Id = str | int


def _key(seed: int, purpose: str, ids: tuple[Id, ...]) -> int:
    # A hash of the joined text instead of arithmetic on the numbers, so that (1, 23) and (12, 3) differ.
    text = "\x1f".join([str(seed), purpose, *(str(i) for i in ids)])
    return int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little")


def stream(seed: int, purpose: str, *ids: Id) -> np.random.Generator:
    """A NumPy generator for one purpose, identical in every process and at any time.

    `ids` name the place of use, such as stage, round and client.
    """
    return np.random.Generator(np.random.PCG64(_key(seed, purpose, ids)))


def torch_stream(seed: int, purpose: str, *ids: Id) -> torch.Generator:
    """A CPU torch generator for one purpose; see `stream`."""
    generator = torch.Generator()
    generator.manual_seed(_key(seed, purpose, ids) & (2**63 - 1))
    return generator
