"""Time to plan and write the trials of an ablation, compared with composing every configuration separately.

    python -m fedloom.experiments.benchmarks.planning [--trials 1000] [--composed 20] [--experiment fedoras_digits]

Plans a random search over a learning rate, a rule, a value in a free mapping and the split into tiers, writes the plan
and reads it, then composes the first `--composed` configurations one by one and compares them. Prints a table and one
JSON object on the last line; only ratios within one call are meaningful.
"""

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedloom.experiments.ablation.plan import plan_ablation
from fedloom.experiments.runs.configuration import compose_config
from fedloom.experiments.store.ablations import PLAN, Ablation, read_ablation, write_ablation

AXES = """
axes:
  lr: {{key: method.train.lr, log_uniform: [0.0001, 1]}}
  rule: {{key: method.train.weighting, values: [opa, plain]}}
  weight: {{key: tiers.cost_weights.macs, uniform: [0.5, 2]}}
  tiers: {{settings: {{four: {{tiers.count: 4}}, two: {{tiers.count: 2, tiers.rho_high: 0.5}}}}}}
seeds: [1, 2]
search: {{kind: random, samples: {samples}}}
"""


def main() -> None:
    """Measures and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--composed", type=int, default=20)
    parser.add_argument("--experiment", default="fedoras_digits")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(figures_of(Path(folder), args.trials, args.composed, args.experiment)))


def figures_of(root: Path, trials: int, composed: int, experiment: str) -> dict[str, Any]:
    """The figures of one plan; AssertionError if a planned configuration differs from the composed one."""
    file = root / "random.yaml"
    file.write_text(AXES.format(samples=max(1, trials // 2)))
    compose_config([f"experiment={experiment}"])  # imports what both ways need
    marks = [time.perf_counter()]
    ablation = plan_ablation([f"ablation={file}", f"experiment={experiment}", f"results={root}"])
    marks.append(time.perf_counter())
    write_ablation(root, ablation)
    marks.append(time.perf_counter())
    again = read_ablation(ablation.folder(root))
    marks.append(time.perf_counter())
    assert again == ablation
    _compare(ablation, composed)
    marks.append(time.perf_counter())
    plan_s, write_s, read_s, composed_s = (b - a for a, b in pairwise(marks))
    planned, one_by_one = (plan_s + write_s) / len(ablation.trials), composed_s / min(composed, len(ablation.trials))
    figures = {
        "trials": len(ablation.trials),
        "planned_and_written_s_per_trial": planned,
        "composed_s_per_trial": one_by_one,
        "ratio": one_by_one / planned,
        "plan_s": plan_s,
        "write_s": write_s,
        "read_s": read_s,
        "plan_bytes": (ablation.folder(root) / PLAN).stat().st_size,
    }
    titles = ("trials", "plan s", "write s", "read s", "kB", "ms/trial", "composed", "ratio")
    print("".join(f"{title:>10}" for title in titles))
    print(
        f"{figures['trials']:>10}{plan_s:>10.2f}{write_s:>10.3f}{read_s:>10.3f}{figures['plan_bytes'] / 1e3:>10.0f}"
        f"{1e3 * planned:>10.2f}{1e3 * one_by_one:>10.1f}{figures['ratio']:>10.0f}"
    )
    return figures


def _compare(ablation: Ablation, composed: int) -> None:
    for trial in ablation.trials[:composed]:
        config = compose_config([*ablation.overrides, *trial.overrides, f"seed={trial.seed}"])
        assert asdict(config) == dict(trial.config), trial.index


if __name__ == "__main__":
    main()
