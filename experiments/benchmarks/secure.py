"""The cost of secure aggregation: a client's relative to its training, the server's relative to plain sums.

    python -m fedloom.experiments.benchmarks.secure

Ten clients of FedorAS' supernet for digits, each with a random half of it, as in a round of `fedoras_digits`. Prints
one JSON object on its last line: bytes per client, and seconds as ratios within this run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import numpy as np
import torch

from fedloom.platform.averaging.average import Update, WeightedSums
from fedloom.platform.averaging.secure import SecureRound, needed_of
from fedloom.platform.methods.fedoras_sampling import communication_limit, sample_subspace
from fedloom.platform.spaces.capabilities import with_subspaces
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import SliceMap, bytes_of, extract
from fedloom.platform.spaces.space_config import SpaceConfig

T = TypeVar("T")
CLIENTS, DROPPED, TIMES = 10, 2, 5


def timed(do: Callable[[], T]) -> tuple[float, T]:
    """The median seconds of several calls, and the result."""
    seconds, result = [], do()
    for _ in range(TIMES):
        started = time.perf_counter()
        result = do()
        seconds.append(time.perf_counter() - started)
    return median(seconds), result


def summed(updates: list[Update]) -> WeightedSums:
    """The weighted sums of a round's updates."""
    sums = WeightedSums()
    for update in updates:
        sums.add(update)
    return sums


def main() -> None:
    """Measures a round."""
    torch.set_num_threads(1)
    space = with_subspaces(build_space(SpaceConfig("cnn_digits")), "fedoras")
    old = space.initial_weights(torch.Generator().manual_seed(0))
    sizes, limit = communication_limit(space, "fraction", 0.5)
    slices: list[SliceMap] = [
        space.subspace_slices(sample_subspace(sizes, limit, np.random.default_rng(c))) for c in range(CLIENTS)
    ]
    whole = {name: tuple((0, n) for n in tensor.shape) for name, tensor in old.items()}
    held = {c: {p.source: whole[p.source] for p in parts.values()} for c, parts in enumerate(slices)}
    secure = SecureRound(1, ("supernet", 0), held, needed_of(CLIENTS, 0.5))
    received = [extract(old, parts) for parts in slices]
    plain = [
        Update(
            {n: t + 0.01 if t.is_floating_point() else t for n, t in tensors.items()}, parts, dict.fromkeys(parts, 1.0)
        )
        for tensors, parts in zip(received, slices, strict=True)
    ]
    mask_s, masked = timed(lambda: secure.masked(0, plain[0], received[0]))
    masks = [masked, *(secure.masked(c, plain[c], received[c]) for c in range(1, CLIENTS))]
    plain_s, _ = timed(lambda: summed(plain).finish(old))
    all_s, _ = timed(lambda: secure.unmasked(summed(masks), range(CLIENTS), old))
    some = range(CLIENTS - DROPPED)
    some_s, _ = timed(lambda: secure.unmasked(summed(masks[:-DROPPED]), some, old))
    module, x = space.build_subnet(space.smallest), torch.rand(32, 1, 8, 8)
    module.load_state_dict({n: t.clone() for n, t in extract(old, space.slices(space.smallest)).items()})
    step_s, _ = timed(lambda: module(x).sum().backward())
    down, up = secure.message_bytes
    model = bytes_of(plain[0].tensors)
    figures = {
        "update_bytes": model,
        "more_bytes_down": down,
        "more_bytes_up": up,
        "more_bytes_share": round((down + up) / (2 * model), 4),
        "masking_per_training_step": round(mask_s / step_s, 2),
        "server_per_plain_sum": round(all_s / plain_s, 1),
        f"server_per_plain_sum_{DROPPED}_dropped": round(some_s / plain_s, 1),
        "masking_s": round(mask_s, 4),
        "server_s": round(all_s, 4),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
