"""Finished runs of every kind of space that is exported: each is made once, when the first test asks for it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fedloom.platform.clients.execution import SerialExecutor
from fedloom.platform.clients.worker import Worker
from fedloom.platform.data.config import DataConfig
from fedloom.platform.federation.config import RunConfig, TiersConfig
from fedloom.platform.federation.training_config import TrainingConfig
from fedloom.platform.federation.world import World
from fedloom.platform.methods.depthfl import DepthFLConfig
from fedloom.platform.methods.fedavg import FedAvgConfig
from fedloom.platform.methods.fedoras import FedorASConfig, SupernetConfig
from fedloom.platform.methods.superfednas import ElasticTrainingConfig, SuperFedNASConfig
from fedloom.platform.methods.tier_search import TierSearchConfig
from fedloom.platform.results.paths import RunPaths, list_runs
from fedloom.platform.results.tables import read_table
from fedloom.platform.runs.run import start_run
from fedloom.platform.search.targets import TargetSearchConfig
from fedloom.platform.spaces.space_config import SpaceConfig

MIDDLE = "d=0,1 e=.5"


@dataclass(frozen=True)
class Run:
    """A finished run and its world."""

    paths: RunPaths
    world: World

    @property
    def results(self) -> Path:
        return self.paths.root

    def recorded(self, architecture: str, model: str, split: str = "test") -> float:
        rows = read_table(self.results, "evaluations")
        own = (rows["architecture"] == architecture) & (rows["model"] == model) & (rows["split"] == split)
        own &= rows["client_id"].isna() & (rows["metric"] == "accuracy") & (rows["stage"] == "evaluation")
        return float(rows[own]["value"].iloc[-1])


def elastic_training(rounds: int) -> ElasticTrainingConfig:
    return ElasticTrainingConfig(
        rounds=rounds, clients_per_round=3, epochs=4, batch_size=16, lr=0.3, evaluate_every=1, evaluate=["smallest"]
    )


NO_SEARCH = TargetSearchConfig(samples=0)


def images(results: Path, norm: str, search: TargetSearchConfig = NO_SEARCH) -> RunConfig:
    space = SpaceConfig("resnet_elastic_small", input_shape=[1, 8, 8], stem_channels=8, norm=norm)
    space = replace(space, stage_widths=[8, 16], stage_strides=[1, 2], depths=[1, 1])
    if norm == "none":  # biases are exported, too, and so few rounds teach nothing from torch's small weights
        space = replace(space, initialisation="he", bias=True)
    return RunConfig(
        experiment=f"elastic_{norm}",
        results=str(results),
        data=DataConfig(num_clients=4, train_samples=320, test_samples=300, alpha=100),
        space=space,
        tiers=TiersConfig(count=1, paths=500),
        method=SuperFedNASConfig(
            family=["smallest", MIDDLE, "largest"], train=elastic_training(6 if norm == "none" else 2), search=search
        ),
    )


def family(results: Path) -> RunConfig:
    config = images(results, "none")
    method = SuperFedNASConfig(family=["smallest", MIDDLE], separately=True, train=elastic_training(1))
    return replace(config, experiment="family", method=method)


def texts(results: Path, root: Path) -> RunConfig:
    (root / "ptb").mkdir(parents=True)
    for part, lines in (("train", 60), ("test", 12)):
        (root / "ptb" / f"ptb.{part}.txt").write_text(" the cat sat on the mat \n a dog <unk> the cat \n" * lines)
    return RunConfig(
        experiment="elastic_text",
        results=str(results),
        data=DataConfig("ptb", str(root), partition="iid", num_clients=3, sequence_length=6),
        space=SpaceConfig("tcn_elastic", num_classes=9, input_shape=[6], channels=8, embedding_size=8),
        tiers=TiersConfig(count=1, paths=500),
        method=SuperFedNASConfig(family=["smallest"], train=elastic_training(1), search=NO_SEARCH),
    )


def recurrent(results: Path, root: Path) -> RunConfig:
    """A GRU and a light GRU side by side, then a quasi-recurrent layer and an LSTM."""
    config = texts(results, root)
    train = TrainingConfig(rounds=1, clients_per_round=2, batch_size=16, lr=0.5)
    space = SpaceConfig("rnn_shakespeare", num_classes=9, input_shape=[6], channels=8, embedding_size=4)
    method = FedAvgConfig(architecture="1-2-3-0", train=train)
    return replace(config, experiment="recurrent", space=space, method=method)


def paths_of_operators(results: Path) -> RunConfig:
    short = TrainingConfig(rounds=1, clients_per_round=2, batch_size=16, lr=0.05)
    operators = ["conv(1)", "ds(3,.5)", "mb(1,2)", "identity"]
    return RunConfig(
        experiment="operators",
        results=str(results),
        data=DataConfig(num_clients=4, train_samples=320, test_samples=300),
        space=SpaceConfig("cnn_digits", stem_channels=4, stage_layers=[1, 2], operators=operators),
        tiers=TiersConfig(count=2, paths=2000, rho_high=0.5),
        method=FedorASConfig(
            train=SupernetConfig(rounds=2, clients_per_round=4, epochs=1, batch_size=16),
            search=TierSearchConfig(population=4, offspring=2, budget=6),
            finetune=short,
            rand_init=replace(short, rounds=0),
        ),
    )


def depths(results: Path) -> RunConfig:
    train = TrainingConfig(rounds=1, clients_per_round=4, batch_size=16, lr=0.05, weighting="plain")
    space = SpaceConfig("cnn_depth", input_shape=[1, 8, 8], stage_widths=[4, 6], stage_layers=[1, 1])
    return RunConfig(
        experiment="depths",
        results=str(results),
        data=DataConfig(num_clients=4, train_samples=320, test_samples=300),
        space=replace(space, stage_strides=[1, 2]),
        tiers=TiersConfig(count=2, upper_bounds=[3000.0, 7000.0]),
        method=DepthFLConfig(train=train),
    )


def trained(config: RunConfig) -> Run:
    worlds: list[World] = []

    def serial(world: World) -> SerialExecutor:
        worlds.append(world)
        return SerialExecutor(Worker(world.spec))

    run_id = start_run(config, serial)
    (paths,) = (run for run in list_runs(Path(config.results)) if run.run_id == run_id)
    return Run(paths, worlds[0])


class Runs:
    """Runs by name, trained when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        search = TargetSearchConfig(macs=[200e3], predictor="none", budget=3, population=2, tolerance=0.5)
        self._configs: dict[str, Callable[[], RunConfig]] = {
            "none": lambda: images(folder / "none", "none", search),
            "batch": lambda: images(folder / "batch", "batch"),
            "family": lambda: family(folder / "family"),
            "text": lambda: texts(folder / "text", folder / "root"),
            "depths": lambda: depths(folder / "depths"),
            "recurrent": lambda: recurrent(folder / "recurrent", folder / "recurrent_root"),
            "operators": lambda: paths_of_operators(folder / "operators"),
        }
        self._trained: dict[str, Run] = {}

    def __getitem__(self, name: str) -> Run:
        if name not in self._trained:
            self._trained[name] = trained(self._configs[name]())
        return self._trained[name]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs to be exported, which no test changes: an elastic space with and without norms, texts, and operators."""
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder that is not there yet, for the files."""
    return tmp_path / "files" / "out"
