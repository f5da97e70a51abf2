"""Presets of SuperFedNAS and of the cross-silo methods can begin, on images made up for the test."""

from pathlib import Path

import pytest

from fedloom.experiments.runs.configuration import compose_config
from fedloom.experiments.runs.presets import experiments
from fedloom.platform.federation.training_config import learning_rate
from fedloom.platform.federation.world import build_world
from fedloom.platform.methods.target_search import targets_of
from fedloom.platform.runs.run import planned_stages
from fedloom.platform.spaces.registry import build_space

IMAGES = [n for n in experiments() if n.startswith(("superfednas_c", "superfednas_vit_c", "ifedavg"))]
SILO_METHODS = ("spider", "local", "ditto", "per_fedavg", "knn_per", "fedmn", "global_nas", "fednas", "fedpnas")
SILOS = [n for n in experiments() if n.startswith(SILO_METHODS) and not n.endswith(("digits", "networks"))]
COSTLY = (
    *("ditto_cifar10_darts", "fednas_cifar10_cohort", "fednas_cifar10_cross_device", "fedpnas_cifar10_cohort"),
    "spider_cifar100_c32",
)
"""Presets of full DARTS spaces, whose cost tables take seconds."""
MADE_UP = ["data.dataset=synthetic", "data.train_samples=4000", "data.test_samples=100", "tiers.paths=1000"]


@pytest.mark.parametrize("name", IMAGES)
def test_a_preset_of_images_can_begin(name: str, tmp_path: Path) -> None:
    config = compose_config([f"experiment={name}", *MADE_UP, "space.num_classes=10", f"results={tmp_path}"])
    stages = planned_stages(build_world(config))
    assert stages[0].name == "supernet" or stages[0].name.startswith("alone/")
    assert stages[-1].name == "evaluation"


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in COSTLY else n for n in SILOS])
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


@pytest.mark.parametrize(("name", "rate"), [("shakespeare", 4.0), ("ptb", 0.4)])
def test_texts_still_learn_at_round_40(name: str, rate: float) -> None:
    config = compose_config([f"experiment=superfednas_{name}"])
    train = config.method.train
    participation = train.clients_per_round / config.data.num_clients
    # A client's 50 local epochs are ten of its rounds of five epochs, and it takes part in C of all rounds.
    assert train.step_rounds == pytest.approx(10 / participation, rel=0.02)
    assert learning_rate(train, 40) == pytest.approx(rate)
    assert (
        learning_rate(
            compose_config([f"experiment=superfednas_{name}", "method.train.schedule=fixed"]).method.train,
            train.rounds - 1,
        )
        == 4.0
    )


def test_images_are_clipped_as_the_authors_ran_them() -> None:
    presets = ["superfednas_cifar10", "superfednas_cifar100", "superfednas_cinic10", "ifedavg_cifar10"]
    assert {compose_config([f"experiment={name}"]).method.train.clip_norm for name in presets} == {10.0}


def test_the_bins_of_the_papers_tables_are_targets_of_the_presets(tmp_path: Path) -> None:
    names = ["superfednas_cifar10", "superfednas_cifar100", "superfednas_cinic10"]
    for name in names:
        config = compose_config([f"experiment={name}", *MADE_UP, "space.num_classes=10", f"results={tmp_path}"])
        bins = [(t.interval.lower, t.interval.upper) for t in targets_of(build_world(config), config.method.search)]
        assert bins == [(0.45e9, 0.95e9), (0.95e9, 1.45e9), (1.45e9, 2.45e9), (2.45e9, 3.75e9)]


def test_twenty_targets_of_fig_4_hold_a_subnet_each(tmp_path: Path) -> None:
    config = compose_config(["experiment=superfednas_cifar10_20targets", *MADE_UP, f"results={tmp_path}"])
    world = build_world(config)
    targets = targets_of(world, config.method.search)
    assert len(targets) == 20
    assert [s.name for s in planned_stages(world)] == ["supernet", "search/samples", "search/winners", "evaluation"]


def macs_per_position(preset: str) -> tuple[float, float]:
    """MACs of the smallest and the largest subnet of a preset's network for text, per position."""
    config = compose_config([f"experiment={preset}"])
    table = build_space(config.space).cost_table("macs")
    positions = build_space(config.space).input_shape[0]
    return table.smallest / positions, table.largest / positions


def test_both_networks_for_shakespeare_have_the_bins_of_tab_4() -> None:
    assert macs_per_position("superfednas_shakespeare") == (486_000, 8_694_000)
    assert macs_per_position("superfednas_shakespeare_450") == (162_000, 3_685_500)
    for name in ("superfednas_shakespeare", "superfednas_shakespeare_450"):
        config = compose_config([f"experiment={name}"])
        search = config.method.search
        table = build_space(config.space).cost_table("macs")
        assert [m / 80 for m in search.macs] == [0.5e6, 1e6, 1.5e6, 2.75e6, 4e6]
        assert [*search.macs_above] == [0, *search.macs[:-1]]
        assert all(search.macs_above[i] < table.largest and table.smallest <= search.macs[i] for i in range(5))
        assert config.objective.name == "last_position"


def test_the_second_preset_of_ptb_has_bais_defaults() -> None:
    config = compose_config(["experiment=superfednas_ptb_tied"])
    space = build_space(config.space)
    assert (config.space.dropout, config.space.embedding_dropout, config.space.tied) == (0.45, 0.25, True)
    assert space.input_shape == (config.data.sequence_length,) == (80,)
    assert (config.objective.name, dict(config.objective.options)) == ("later_positions", {"skip": 40})
    assert "head.linear.weight" not in {n for n, _ in space.build_supernet().named_parameters()}
    assert config.method.search.metric == compose_config(["experiment=superfednas_ptb"]).method.search.metric == "loss"
