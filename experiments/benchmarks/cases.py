"""The cases of the overhead benchmark: FedAvg rounds on random data of CIFAR-10's shape, and on digits."""

from dataclasses import dataclass

from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.config import ExecutorConfig, RayConfig, RunConfig, TiersConfig
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.methods.tiered.fedavg import FedAvgConfig
from fedloom.platform.spaces.space_config import SpaceConfig


@dataclass(frozen=True)
class Case:
    """A federation: `samples` images for each of `clients`, of which `cohort` train in a round."""

    network: str
    clients: int
    cohort: int
    samples: int
    rounds: int
    chunk_size: int
    batch_size: int = 32
    lr: float = 0.01
    dataset: str = "synthetic"


CASES = {
    "cnn": Case("cnn", clients=100, cohort=10, samples=500, rounds=8, chunk_size=1),
    "logistic": Case("logistic", clients=1000, cohort=100, samples=50, rounds=60, chunk_size=50),
    "tiny": Case("tiny", clients=40, cohort=40, samples=35, rounds=60, chunk_size=20, batch_size=8, dataset="digits"),
    "registered_100": Case("logistic", clients=100, cohort=10, samples=1, rounds=100, chunk_size=5),
    "registered_100000": Case("logistic", clients=100_000, cohort=10, samples=1, rounds=100, chunk_size=5),
    "cohort_200": Case("logistic", clients=2000, cohort=200, samples=8, rounds=12, chunk_size=50, batch_size=8),
    "cohort_2000": Case("logistic", clients=2000, cohort=2000, samples=8, rounds=6, chunk_size=50, batch_size=8),
    "long": Case("logistic", clients=100, cohort=10, samples=50, rounds=51, chunk_size=5),
}


def run_config(case: Case, actors: int, results: str, precision: str = "float32") -> RunConfig:
    """The case as a run configuration; 0 actors means the serial executor."""
    train = TrainingConfig(
        rounds=case.rounds,
        clients_per_round=case.cohort,
        epochs=1,
        batch_size=case.batch_size,
        lr=case.lr,
        momentum=0.0,
    )
    return RunConfig(
        experiment="overhead",
        results=results,
        data=DataConfig(
            dataset=case.dataset,
            train_samples=case.clients * case.samples,
            test_samples=100,
            num_clients=case.clients,
            alpha=1000.0,
            validation_share=0.0,
        ),
        space=SpaceConfig(name=f"fedloom.experiments.benchmarks.networks:{case.network}"),
        tiers=TiersConfig(count=1, paths=10),
        method=FedAvgConfig(train=train, evaluate=False),
        executor=ExecutorConfig(
            kind="ray" if actors else "serial",
            actors=actors or None,
            chunk_size=case.chunk_size,
            threads=1,
            precision=precision,
        ),
        ray=RayConfig(address="local", num_cpus=max(1, actors), object_store_memory_bytes=300_000_000),
    )
