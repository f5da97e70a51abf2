"""Presets of SuperFedNAS can begin: spaces, families and targets fit each other, on images made up for the test."""

from pathlib import Path

import pytest

from fedloom.experiments.config import compose_config
from fedloom.experiments.presets import experiments
from fedloom.platform.run import planned_stages
from fedloom.platform.world import build_world

IMAGES = [n for n in experiments() if n.startswith(("superfednas_c", "ifedavg", "fedavg"))]
MADE_UP = ["data.dataset=synthetic", "data.train_samples=4000", "data.test_samples=100", "tiers.paths=1000"]


@pytest.mark.parametrize("name", IMAGES)
def test_a_preset_of_images_can_begin(name: str, tmp_path: Path) -> None:
    config = compose_config([f"experiment={name}", *MADE_UP, "space.num_classes=10", f"results={tmp_path}"])
    stages = planned_stages(build_world(config))
    assert stages[0].name == "supernet" or stages[0].name.startswith("alone/")
    assert stages[-1].name == "evaluation"


def test_the_papers_family_is_the_one_of_the_presets() -> None:
    config = compose_config(["experiment=superfednas_cifar10"])
    assert len(config.method.family) == 9
    assert (config.method.train.rounds, config.method.train.clients_per_round, config.data.alpha) == (1500, 8, 100)
    assert compose_config(["experiment=superfednas_cinic10"]).method.train.clients_per_round == 40
    assert compose_config(["experiment=superfednas_cifar100"]).method.train.rounds == 2000
    assert compose_config(["experiment=ifedavg_cifar10"]).method.separately
