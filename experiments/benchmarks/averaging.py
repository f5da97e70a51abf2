"""Extraction and averaging of subnets of a supernet, relative to the machine's copy bandwidth and the state's size.

    python -m fedloom.experiments.benchmarks.averaging

Eight subnets (the largest, the smallest, six random ones) are extracted from the supernet, returned and averaged, one
after the other as in a round of the server. Every byte that must be read or written counts once per pass: a copy of a
slice reads and writes it, a weighted sum reads the update and the sum and writes the sum, the mean reads the sum and
writes the weights. Prints one JSON object on its last line.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from torch import Tensor

from fedloom.experiments.runs.huge_pages import prefer_huge_pages
from fedloom.platform.averaging.average import Update, WeightedSums
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.resnet import ResnetDesign
from fedloom.platform.spaces.slices import bytes_of, extract

SUBNETS = 8
TIMES = 5


def one_round(space: ElasticSpace, weights: dict[str, Tensor], seed: int) -> int:
    """Extracts and averages as in one round; returns the number of bytes read and written."""
    rng = np.random.default_rng(seed)
    architectures = [space.largest, space.smallest, *(space.sample(rng) for _ in range(SUBNETS - 2))]
    sums, touched = WeightedSums(), 0
    for architecture in architectures:
        slices = space.slices(architecture)
        update = {name: tensor.clone() for name, tensor in extract(weights, slices).items()}
        sums.add(Update(update, slices, dict.fromkeys(update, 100.0)))
        touched += (2 + 3) * bytes_of(update)
    new = sums.finish(weights).weights
    return touched + 2 * bytes_of(new)


def copy_bandwidth(size_bytes: int) -> float:
    """Bytes per second that a copy of this size reads and writes, between buffers that were accessed before."""
    source, target = torch.ones(size_bytes // 4), torch.zeros(size_bytes // 4)
    target.copy_(source)
    times_s = [_timed(lambda: target.copy_(source))[0] for _ in range(2 * TIMES)]
    return 2 * size_bytes / median(times_s)


def _timed(do: Callable[[], object]) -> tuple[float, object]:
    started = time.perf_counter()
    result = do()
    return time.perf_counter() - started, result


def measure(threads: int) -> dict[str, float]:
    """Measures rates and ratios with this number of threads."""
    prefer_huge_pages()
    torch.set_num_threads(threads)
    space = ElasticSpace(ResnetDesign(norm="batch"))
    weights = space.initial_weights(torch.Generator().manual_seed(0))
    state_bytes = bytes_of(weights)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    one_round(space, weights, seed=0)
    extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    rates, bandwidths = [], []
    for seed in range(1, TIMES + 1):
        bandwidths.append(copy_bandwidth(state_bytes))
        seconds, touched = _timed(lambda seed=seed: one_round(space, weights, seed))  # type: ignore[misc]
        rates.append(float(touched) / seconds)  # type: ignore[arg-type]
    return {
        "threads": threads,
        "state_mb": state_bytes / 1e6,
        "touched_gb_per_s": median(rates) / 1e9,
        "copy_gb_per_s": median(bandwidths) / 1e9,
        "ratio_to_copy": median(r / b for r, b in zip(rates, bandwidths, strict=True)),
        "extra_memory_to_state": extra / state_bytes,
    }


def main() -> None:
    """Measures and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    figures = measure(parser.parse_args().threads)
    for name, value in figures.items():
        print(f"{name:>24}  {value:.3f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
