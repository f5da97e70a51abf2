"""Presets of SuperFedNAS and of the cross-silo methods can begin, on images made up for the test."""

from pathlib import Path

import pytest

from fedloom.experiments.runs.configuration import compose_config
from fedloom.experiments.runs.presets import experiments
from fedloom.platform.federation.building import build_world
from fedloom.platform.runs.run import planned_stages

IMAGES = [n for n in experiments() if n.startswith(("superfednas_c", "ifedavg"))]
SILO_METHODS = ("spider", "local", "ditto", "per_fedavg", "knn_per", "fedmn", "global_nas", "fednas", "fedpnas")
SILOS = [n for n in experiments() if n.startswith(SILO_METHODS) and "digits" not in n]
MADE_UP = ["data.dataset=synthetic", "data.train_samples=4000", "data.test_samples=100", "tiers.paths=1000"]


@pytest.mark.parametrize("name", IMAGES)
def test_a_preset_of_images_can_begin(name: str, tmp_path: Path) -> None:
    config = compose_config([f"experiment={name}", *MADE_UP, "space.num_classes=10", f"results={tmp_path}"])
    stages = planned_stages(build_world(config))
    assert stages[0].name == "supernet" or stages[0].name.startswith("alone/")
    assert stages[-1].name == "evaluation"


@pytest.mark.parametrize("name", SILOS)
def test_a_preset_of_silos_can_begin(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = compose_config([f"experiment={name}", *MADE_UP, "space.num_classes=10", f"results={tmp_path}"])
    world = build_world(config)
    stages = planned_stages(world)
    assert name.startswith(stages[0].name)
    assert [s.name for s in stages[1:]] in (["evaluation"], ["evaluation", "gains"])
    assert world.num_clients == {"cohort": 20, "device": 100}.get(name.rpartition("_")[2], 8)
    assert "will not be" not in caplog.text, "every edge is searched"


def test_spiders_presets_have_the_papers_settings() -> None:
    config = compose_config(["experiment=spider_cifar10"])
    train, search = config.method.train, config.method.search
    assert (train.rounds, train.batch_size, train.momentum, train.clip_norm, train.pull) == (1000, 32, 0.9, 5.0, 0.01)
    assert (search.start, search.every, config.data.alpha, config.data.num_clients) == (30, 20, 0.2, 8)
    assert (config.data.validation_share, config.data.test_share) == (0.2, 0.2)
    assert (train.weight_decay, search.prune_edges, search.statistics) == (0.001, True, "batch")
    gains = config.method.gains
    assert (gains.epochs, gains.start, gains.tune_own, gains.epoch) == (30, "own", False, "test")


def test_the_search_baselines_of_other_papers_have_their_cohorts_and_targets() -> None:
    for name in ("fednas", "fedpnas"):
        config = compose_config([f"experiment={name}_cifar10_cohort"])
        train = config.method.train
        assert (config.data.num_clients, train.clients_per_round, train.rounds) == (20, 8, 1500)
        assert config.method.search.max_macs == 0.95e9
    train = compose_config(["experiment=fednas_cifar10_cross_device"]).method.train
    assert (train.clients_per_round, train.epochs, train.batch_size, train.rounds) == (10, 10, 32, 500)


def test_the_papers_family_is_the_one_of_the_presets() -> None:
    config = compose_config(["experiment=superfednas_cifar10"])
    assert len(config.method.family) == 9
    assert (config.method.train.rounds, config.method.train.clients_per_round, config.data.alpha) == (1500, 8, 100)
    assert compose_config(["experiment=superfednas_cinic10"]).method.train.clients_per_round == 40
    assert compose_config(["experiment=superfednas_cifar100"]).method.train.rounds == 2000
    assert compose_config(["experiment=ifedavg_cifar10"]).method.separately
