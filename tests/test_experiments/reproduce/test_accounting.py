"""What FedorAS and methods of widths send, counted without training, against sums that are known."""

import pytest

from fedloom.experiments.reproduce.facts import accounts, fedoras_accounts
from fedloom.experiments.reproduce.items import load_item
from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.registry import build_space

DEMO = ["experiment=fedoras_digits"]
WHOLE = "method.train.communication.value=1.0"


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    return build_space(compose_config(DEMO).space)


def test_whole_supernet_is_sent_in_both_directions(space: SearchSpace) -> None:
    sizes = space.cost_table("parameters")
    whole = sizes.fixed + sum(map(sum, sizes.options))
    facts = fedoras_accounts([*DEMO, WHOLE, "method.train.rounds=7", "method.train.clients_per_round=3"])
    assert facts["sent_parameters"] == facts["supernet_parameters"] == whole
    assert facts["supernet_bytes"] == 7 * 3 * whole * 4 * 2


def test_a_subspace_is_within_the_budget_and_near_it() -> None:
    facts = fedoras_accounts(DEMO)
    assert 0.4 < facts["sent_parameters"] / facts["supernet_parameters"] <= 0.5


def test_without_tiers_a_client_trains_the_mean_path(space: SearchSpace) -> None:
    macs = space.cost_table("macs")
    mean = macs.fixed + sum(sum(row) / len(row) for row in macs.options)
    facts = fedoras_accounts([*DEMO, WHOLE, "tiers.count=1", "method.train.epochs=4"])
    assert facts["macs_per_sample"] == pytest.approx(mean, rel=0.02)
    assert facts["macs_per_round"] == pytest.approx(4 * facts["macs_per_sample"])


def test_clients_of_low_tiers_train_cheaper_paths() -> None:
    low, high = (fedoras_accounts([*DEMO, f"tiers.shares={shares}"]) for shares in ([1, 0, 0, 0], [0, 0, 0, 1]))
    assert low["macs_per_sample"] < 0.8 * high["macs_per_sample"]


def test_fine_tuning_sends_the_tiers_model(space: SearchSpace) -> None:
    sizes = space.cost_table("parameters")
    mean = sizes.fixed + sum(sum(row) / len(row) for row in sizes.options)
    changes = ["tiers.count=1", "method.finetune.rounds=5", "method.finetune.clients_per_round=2"]
    facts = fedoras_accounts([*DEMO, *changes])
    assert facts["model_parameters"] == [pytest.approx(mean, rel=0.02)]
    assert facts["finetune_bytes"] == [5 * 2 * facts["model_parameters"][0] * 4 * 2]
    assert facts["mean_finetune_bytes"] == facts["finetune_bytes"][0]


def test_widths_are_sent_in_both_directions_as_tiers_afford_them() -> None:
    """The sizes of ResNet-18's quarters are those of Tab. 5; the three tiers train one, two and four quarters."""
    changes = ["experiment=fjord_cifar10", "tiers.count=3", "tiers.shares=[0.5,0.25,0.25]", "method.train.rounds=7"]
    facts = accounts([*changes, "tiers.upper_bounds=[50e6,200e6,600e6]", "method.train.clients_per_round=3"])
    mean = 0.5 * 701_466 + 0.25 * 2_797_610 + 0.25 * 11_173_962
    assert facts == {
        "sent_parameters": mean,
        "supernet_parameters": 11_173_962,
        "supernet_bytes": 7 * 3 * mean * 4 * 2,
    }
    assert accounts(DEMO) == fedoras_accounts(DEMO)


@pytest.mark.parametrize("name", ["fedoras/tab17", "fedoras/tab18"])
def test_published_bytes_are_rounds_times_clients_times_size_in_both_directions(name: str) -> None:
    """Four bytes per parameter, and 1 GB of 1024 million bytes: every row, as far as its size was rounded."""
    published = {kind: quantity.published for kind, quantity in load_item(name).quantities.items()}
    sizes = published["size of what is sent" if name.endswith("17") else "mean size"]
    misprinted = ("CIFAR-10, ZeroFL", "")  # 11.7 M, where Tab. 5 has 11.17 M
    oort = ("Speech Commands, Oort", "")  # sends to 1300 clients and receives from 100
    assert len(sizes) >= 6
    for spot, size in sizes.items():
        millions = 11.17 if spot == misprinted else size.value
        directions = (1300 + 100) if spot == oort else 2 * published["clients per round"][spot].value
        total = published["rounds"][spot].value * directions * millions * 4 / 1024
        assert published["communication"][spot].value == pytest.approx(total, rel=0.025), spot
