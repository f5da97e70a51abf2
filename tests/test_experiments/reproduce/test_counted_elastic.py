"""Costs of elastic supernets that items count: exact means over the space, and literal sums."""

import itertools

import pytest

from fedloom.experiments.reproduce.counting import FACTS
from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.registry import build_space

TINY = [
    "experiment=superfednas_digits",
    "space.stage_widths=[16,16]",
    "space.stage_strides=[1,2]",
    "space.depths=[1,1]",
    "space.expansions=[0.5,1.0]",
    "method.family=[smallest,'d=1,0 e=.5',largest]",
    "method.train.clients_per_round=4",
]
"""A space of 36 subnets, two stages of one or two blocks of two widths."""


@pytest.fixture(scope="module")
def space() -> ElasticSpace:
    space = build_space(compose_config(TINY).space)
    assert isinstance(space, ElasticSpace)
    return space


def drawn(space: ElasticSpace, measure: str, *, widest: bool = False) -> float:
    """The mean over all draws of depths and widths, each as likely: widths of absent blocks are drawn and ignored."""
    table, costs = space.cost_table(measure), []
    widths = (1,) if widest else (0, 1)
    for d1, d2, a, b, c, d in itertools.product((1, 2), (1, 2), *[widths] * 4):
        costs.append(table.cost(space.of_contents(((a, b)[:d1], (c, d)[:d2]))))
    return sum(costs) / len(costs)


def test_random_subnets_count_by_their_mean_over_the_space(space: ElasticSpace) -> None:
    facts = FACTS["elastic_round"](TINY)
    assert facts["compute"]["single-stage"] == pytest.approx(4 * drawn(space, "macs"))
    assert facts["communication"]["single-stage"] == pytest.approx(2 * 4 * drawn(space, "bytes"))


def test_maxnet_gives_one_client_the_largest_and_one_the_smallest(space: ElasticSpace) -> None:
    facts, macs, sizes = FACTS["elastic_round"](TINY), space.cost_table("macs"), space.cost_table("bytes")
    ends = [sum(table.cost(end) for end in (space.smallest, space.largest)) for table in (macs, sizes)]
    assert facts["compute"]["MaxNet"] == pytest.approx(ends[0] + 2 * drawn(space, "macs"))
    assert facts["communication"]["MaxNet"] == pytest.approx(2 * (ends[1] + 2 * drawn(space, "bytes")))


def test_multi_stage_trains_four_subnets_per_batch_the_widest_in_the_first_half(space: ElasticSpace) -> None:
    facts = FACTS["elastic_round"](TINY)
    mean = (drawn(space, "macs", widest=True) + drawn(space, "macs")) / 2
    assert facts["compute"]["multi-stage"] == pytest.approx(4 * 4 * mean)
    assert facts["communication"]["multi-stage"] == 2 * 4 * space.cost_table("bytes").cost(space.largest)


def test_k_models_are_the_k_most_expensive() -> None:
    family, facts = FACTS["family"](TINY), FACTS["elastic_round"](TINY)["family"]
    small, middle, large = (family["macs"][name] for name in ("smallest", "d=1,0 e=.5", "largest"))
    assert small < middle < large
    assert facts["compute"] == pytest.approx(
        {"1": 4 * large, "2": 4 * (large + middle), "3": 4 * (large + middle + small)}
    )
    assert facts["communication"]["3"] == pytest.approx(2 * 4 * sum(family["bytes"].values()))
