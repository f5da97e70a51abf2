"""Server time of aggregators that compare clients, in a round of a hundred clients with a million parameters each.

    python -m fedloom.experiments.benchmarks.aggregators

Prints one JSON object on its last line: CPU seconds of one thread, the minimum of three repeats.
"""

from __future__ import annotations

import json
import time

import torch

from fedloom.platform.averaging.aggregators import AGGREGATORS, KeptUpdates
from fedloom.platform.averaging.average import Update
from fedloom.platform.plugins import ComponentSpec
from fedloom.platform.spaces.slices import Slice

CLIENTS, TIMES = 100, 3
SHAPES = {"hidden.weight": (1020, 784), "second.weight": (200, 1020), "logits.weight": (10, 200)}
OPTIONS = {"norm_bound": (("bound", 1.0),)}


def main() -> None:
    """Measures a round with every built-in aggregator."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    old = {name: 0.05 * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    slices, weights = {name: Slice(name) for name in old}, dict.fromkeys(old, 1.0)
    updates = [
        Update({name: t + 0.01 * torch.randn(t.shape, generator=generator) for name, t in old.items()}, slices, weights)
        for _ in range(CLIENTS)
    ]

    def seconds(name: str) -> float:
        started = time.process_time()
        KeptUpdates(updates, ComponentSpec(name, OPTIONS.get(name, ()))).finish(old)
        return time.process_time() - started

    figures = {f"{name}_s": round(min(seconds(name) for _ in range(TIMES)), 2) for name in AGGREGATORS.known}
    print(json.dumps({"clients": CLIENTS, "parameters": sum(t.numel() for t in old.values()), **figures}))


if __name__ == "__main__":
    main()
