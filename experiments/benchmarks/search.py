"""Search of a trained supernet for many targets: its duration, and the accuracy of its winners.

    fedloom run experiment=superfednas_digits
    python -m fedloom.experiments.benchmarks.search results RUN

For each seed `samples` subnets are measured and predictors fitted; then 20 MACs targets are searched (only this part is
timed) and the best predicted subnets of each target are verified. Random search has as many real evaluations, divided
among the same targets' intervals. Winners are chosen on validation data and compared on the whole test set. Prints one
JSON object on its last line.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedloom.experiments.runs.search import Trained, load_trained
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.scoring import scored_subnet
from fedloom.platform.clients.training import Score, evaluate
from fedloom.platform.clients.worker import Worker
from fedloom.platform.methods.stages.target_search import costs_of
from fedloom.platform.search.base import Interval
from fedloom.platform.search.constraint import TableConstraint
from fedloom.platform.search.targets import (
    Sample,
    Target,
    TargetSearchConfig,
    choose,
    draw_samples,
    finalists,
    fit_predictors,
)
from fedloom.platform.seeding import stream
from fedloom.platform.spaces.slices import Architecture

TARGETS = 20


@dataclass
class Judge:
    """Evaluates subnets on the server's data, and caches the scores."""

    trained: Trained
    worker: Worker
    known: dict[tuple[Architecture, str], Score]

    def score(self, architecture: Architecture, split: str = "validation") -> Score:
        """Loss and accuracy on a split of the server's data."""
        if (architecture, split) not in self.known:
            module = scored_subnet(self.worker, Subnet(architecture), self.trained.weights)
            with self.worker.data.reading_test():
                self.known[architecture, split] = evaluate(
                    module, self.worker.central_data(split), self.worker.objective
                )
        return self.known[architecture, split]

    def samples(self, architectures: Sequence[Architecture]) -> list[Sample]:
        """The validation scores of several subnets as samples."""
        scores = [self.score(a) for a in architectures]
        return [Sample(a, s.loss, s.metric) for a, s in zip(architectures, scores, strict=True)]


def targets_between(trained: Trained) -> list[Target]:
    """Evenly spaced MACs targets between a sixth and nine tenths of the space's range."""
    macs, tolerance = trained.world.macs_table, trained.config.tolerance
    low, size = macs.smallest, macs.largest - macs.smallest
    values = np.linspace(low + size / 6, low + 0.9 * size, TARGETS)
    return [Target(f"macs={v:.10g}", "macs", Interval(v * (1 - tolerance), v)) for v in values.tolist()]


def one_seed(trained: Trained, judge: Judge, config: TargetSearchConfig, seed: int) -> dict[str, float]:
    """The figures of one seed."""
    costs, targets = costs_of(trained.world), targets_between(trained)
    cost = trained.world.macs_table.cost
    samples = judge.samples(draw_samples(costs.genome, costs.macs, config.samples, seed))
    predictors = fit_predictors(costs.genome, samples, config, seed)
    started = time.perf_counter()
    found = {t: finalists(t, costs, predictors, config, seed) for t in targets}
    seconds = time.perf_counter() - started
    per_target = (config.samples + TARGETS * config.verify) // TARGETS
    rng = stream(seed, "random_baseline")
    drawn = {t: TableConstraint(costs.macs, t.interval, costs.genome).sample(per_target, (), rng) for t in targets}
    ours = _winners(judge, {t: list(f) for t, f in found.items()}, trained)
    random = _winners(judge, drawn, trained)
    below = [1 - cost(a) / t.interval.upper for t, a in ours.items()]
    return {
        "seed": seed,
        "tau": predictors.metric.tau,
        "search_s": seconds,
        "furthest_below_target": max(below),
        "above_target": sum(b < 0 for b in below),
        "test_accuracy": float(np.mean([judge.score(a, "test").metric for a in ours.values()])),
        "random_test_accuracy": float(np.mean([judge.score(a, "test").metric for a in random.values()])),
        "validation_accuracy": float(np.mean([judge.score(a).metric for a in ours.values()])),
        "random_validation_accuracy": float(np.mean([judge.score(a).metric for a in random.values()])),
    }


def _winners(
    judge: Judge, candidates: Mapping[Target, Sequence[Architecture]], trained: Trained
) -> dict[Target, Architecture]:
    cost = trained.world.macs_table.cost
    won = {t: choose(t, judge.samples(own), {a: cost(a) for a in own}) for t, own in candidates.items()}
    return {t: sample.architecture for t, sample in won.items() if sample is not None}


def main() -> None:
    """Measures and prints the figures per seed and their means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("run")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--verify", type=int, default=5)
    args = parser.parse_args()
    trained = load_trained(args.results, args.run)
    config = replace(trained.config, samples=args.samples, verify=args.verify)
    judge = Judge(trained, Worker(trained.world.spec), {})
    rows = [one_seed(trained, judge, config, seed) for seed in range(1, args.seeds + 1)]
    for row in rows:
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
    means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0] if name != "seed"}
    print(json.dumps({"targets": TARGETS, "means": means, "seeds": rows}))


if __name__ == "__main__":
    main()
