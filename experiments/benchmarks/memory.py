"""Peak memory of a silo's round: the two models of SPIDER and of Ditto, each relative to FedAvg with one model.

    python -m fedloom.experiments.benchmarks.memory

Each case runs two rounds of one silo on synthetic images in a separate process. The figure is the peak of the second
round minus the memory of the process before it built a model: parameters, optimiser state, the silo's kept state,
activations and gradients of a batch. (The paper reports 4.18 GB for SPIDER's two models and 2.14 GB for the supernet,
2.90 GB for Ditto's two ResNet-18 and 1.45 GB for one.) Prints one JSON object on its last line.
"""

import argparse
import json
import sys
import tempfile

import torch

from fedloom.experiments.benchmarks.processes import printed
from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.averaging.average import WeightedSums
from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.clients.device import peak_memory_bytes
from fedloom.platform.clients.execution import SharedWeights, run_assignment
from fedloom.platform.clients.networks import Countable, MixedNetwork, Subnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.algorithm import SUPERNET, RunState, TrainingStage
from fedloom.platform.federation.training_config import local_sgd
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.spaces.slices import Architecture

ONLY: Architecture = (0,)
ALONE: dict[str, tuple[str, Countable]] = {"supernet": ("spider", MixedNetwork()), "resnet18": ("ditto", Subnet(ONLY))}
"""Cases with one model that is trained alone, each with the method that provides the configuration."""
CASES = {"supernet": "darts_s2", "spider": "darts_s2", "resnet18": "resnet18", "ditto": "resnet18"}
"""The measured cases and their spaces."""


def peak_of(case: str, space: str, batch_size: int, extra: list[str]) -> int:
    """Bytes of one case, measured in this process, which must not have run other work before."""
    with tempfile.TemporaryDirectory() as folder:
        config = compose_config(
            [
                f"method={ALONE[case][0] if case in ALONE else case}",
                f"space.name={space}",
                "data.dataset=synthetic",
                "data.num_clients=1",
                f"data.train_samples={4 * batch_size}",
                "data.test_samples=10",
                "data.alpha=1000",
                "data.validation_share=0.25",
                f"data.cache={folder}",
                "tiers.count=1",
                f"method.train.batch_size={batch_size}",
                *extra,
            ]
        )
        world = build_world(config)
        stage = build_stages(world)[0]
        assert isinstance(stage, TrainingStage), "the cases begin with training"
        worker = Worker(world.spec)
        torch.set_num_threads(1)
        worker.client_data(0, "train")
        before = peak_memory_bytes(worker.device)
        state = stage.begin(RunState())
        task = stage.plan(state).assignments[0].task
        if case in ALONE:
            task = Train(ALONE[case][1], local_sgd(stage.config, 0, world.augment, balanced=False))
        weights = SharedWeights(state.weights(SUPERNET), state.version(SUPERNET))
        silo_state = None
        for round_ in range(2):
            report = run_assignment(
                worker, Assignment(stage.name, round_, 0, "tier1", task, state=silo_state), weights, WeightedSums()
            )
            assert report.status == "ok", report.error
            silo_state = report.state
        return (report.peak_memory_bytes or 0) - before


def measure(batch_size: int, extra: list[str]) -> dict[str, float]:
    """Peaks in MB, and the ratios of two models to one model."""
    peaks = {}
    for case in CASES:
        command = [sys.executable, "-m", __spec__.name, "--case", case, "--batch-size", str(batch_size), *extra]
        peaks[case] = int(printed(command))
    return {
        **{f"{case}_mb": peak / 1e6 for case, peak in peaks.items()},
        "spider_to_supernet": peaks["spider"] / peaks["supernet"],
        "ditto_to_resnet18": peaks["ditto"] / peaks["resnet18"],
    }


def main() -> None:
    """Measures and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES], help="measure this case alone and print its bytes")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("overrides", nargs="*", help="configuration for all cases, such as space.channels=8")
    args = parser.parse_args()
    if args.case:
        print(peak_of(args.case, CASES[args.case], args.batch_size, args.overrides))
        return
    figures = measure(args.batch_size, args.overrides)
    for name, value in figures.items():
        print(f"{name:>24}  {value:.2f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
