"""DeepFedNAS' fitness and path, against the formulas in loops and against all subnets of a small space."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fedloom.platform.methods.distribution import Distribution, pareto_path
from fedloom.platform.search.fitness import MOST_RHO, fitness_of, path_of_the_fittest as path_of
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.elastic import ElasticSpace
from fedloom.platform.spaces.genome import as_array
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.resnet import ResnetDesign, in_eights
from fedloom.platform.spaces.slices import Architecture
from fedloom.platform.spaces.space_config import SpaceConfig


def small_space(**changes: Any) -> SearchSpace:
    sizes: Mapping[str, Any] = {
        "name": "resnet_elastic_small", "input_shape": [1, 8, 8], "stem_channels": 8, "stage_widths": [64, 128],
        "stage_strides": [1, 2], "depths": [1, 2], "expansions": [0.5, 1.0], "norm": "group",
    }  # fmt: skip
    return build_space(SpaceConfig(**{**sizes, **changes}))


def written_out(space: Any, architecture: Architecture) -> float:
    """The formulas as in the paper, in loops over stages, blocks and convolutions."""
    design: ResnetDesign = space.design
    entropy, logs, depths, side = 0.0, [math.log(1 * 9)], [], 8
    inputs = in_eights(8)
    for stage, content in enumerate(space.contents(architecture)):
        outputs, side = design.channels[stage + 1], side // design.stage_strides[stage]
        own: list[float] = []
        for block, width in enumerate(content):
            own += [math.log(9 * inputs), math.log(9 * design.mid_channels(stage, width))]
            own += [math.log(inputs)] if block == 0 else []
            inputs = outputs
        entropy += math.log(side * side * outputs) * sum(own)
        logs, depths = logs + own, [*depths, len(content)]
    rho = len(logs) / math.exp(sum(logs) / len(logs))
    return entropy - 10 * math.exp(float(np.var(depths))) + 1000 * rho if rho <= MOST_RHO else -math.inf


def test_the_fitness_is_that_of_the_formulas() -> None:
    space = small_space()
    everything = list(space.enumerate())
    found = fitness_of(space)(space.genome.one_hot(as_array(everything)))
    assert found == pytest.approx([written_out(space, a) for a in everything], rel=1e-12)
    assert len(set(np.round(found, 9))) > 10


def test_layers_too_narrow_for_their_number_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    space = small_space(stage_widths=[8, 8], expansions=[1.0], depths=[5, 5])
    smallest, largest = fitness_of(space)(space.genome.one_hot(as_array([space.smallest, space.largest])))
    assert smallest == pytest.approx(written_out(space, space.smallest))
    assert largest == written_out(space, space.largest) == -math.inf
    assert space.largest not in path_of(space, 5)
    monkeypatch.setattr("fedloom.platform.search.fitness.MOST_RHO", 0.0)
    with pytest.raises(ValueError, match="too narrow"):
        path_of(space, 3)


def test_the_path_is_the_fittest_within_each_limit() -> None:
    space = small_space()
    table, everything = space.cost_table("macs"), list(space.enumerate())
    limits = np.linspace(table.smallest, table.largest, 7).tolist()
    best = [max(written_out(space, a) for a in everything if table.cost(a) <= limit) for limit in limits]
    path = path_of(space, 7)
    # Subnets that differ in the order of a stage's widths alone are equally fit.
    assert [written_out(space, a) for a in path] == pytest.approx(list(dict.fromkeys(np.round(best, 9))))
    assert path_of(small_space(), 7) == path  # the same at every start


def test_every_member_of_a_long_path_is_fitter_than_those_before_it_and_than_its_neighbours() -> None:
    space = build_space(SpaceConfig(name="resnet_elastic"))
    assert isinstance(space, ElasticSpace)
    fitness, genome, table = fitness_of(space), space.genome, space.cost_table("macs")
    limits = np.linspace(table.smallest, table.largest, 12).tolist()
    path = path_of(space, 12)
    found = fitness(genome.one_hot(as_array(path)))
    assert (np.diff(found) > 0).all()
    for architecture, own in zip(path, found, strict=True):
        limit = next(limit for limit in limits if limit >= table.cost(architecture))
        near = genome.neighbours(architecture)
        assert fitness(genome.one_hot(near[table.costs(near) <= limit])).max() <= own


def test_neighbours_differ_in_one_depth_or_width() -> None:
    space = small_space()
    assert isinstance(space, ElasticSpace)
    near = {tuple(row) for row in space.genome.neighbours(space.of_contents(((0,), (1, 0)))).tolist()}
    wanted = [((1,), (1, 0)), ((0, 0), (1, 0)), ((0,), (0, 0)), ((0,), (1, 1)), ((0,), (1,)), ((0,), (1, 0, 0))]
    assert near == {space.of_contents(contents) for contents in [((0,), (1, 0)), *wanted]}


def test_temporal_convolutions_count_too() -> None:
    space = build_space(SpaceConfig(name="tcn_elastic", num_classes=10, input_shape=(16,)))
    assert isinstance(space, ElasticSpace)
    design = space.design
    fitness = fitness_of(space)
    found = fitness(space.genome.one_hot(as_array([space.smallest, space.largest])))
    assert np.isfinite(found).all()
    blocks = [
        design.build_block(stage, block, width)
        for stage, content in enumerate(space.contents(space.smallest))
        for block, width in enumerate(content)
    ]
    weights = [p[0].numel() for block in blocks for n, p in block.named_parameters() if p.dim() == 3 and "mag" not in n]
    smallest = space.genome.one_hot(as_array([space.smallest]))[0]
    assert ((smallest * fitness.layers).sum(), (smallest * fitness.log_widths).sum()) == (
        len(weights),
        pytest.approx(math.fsum(map(math.log, weights))),
    )


def test_clients_get_members_of_the_path_that_they_afford() -> None:
    space = small_space()
    table = space.cost_table("macs")
    path = path_of(space, 7)
    budgets = (table.smallest, table.cost(path[2]), *[math.inf] * 4)
    seen = set()
    for round_ in range(20):
        rng = np.random.default_rng(round_)
        given = pareto_path(Distribution(space, table, round_, tuple(range(6)), budgets, (), {}, rng), limits=7)
        assert sum(a == space.largest for a in given) >= 1
        assert all(table.cost(a) <= b for a, b in zip(given, budgets, strict=True))
        assert set(given) <= {*path, space.smallest, space.largest}
        seen |= set(given)
    assert seen == {*path, space.smallest, space.largest}


def test_other_spaces_have_no_fitness() -> None:
    with pytest.raises(ValueError, match="DeepFedNAS' fitness cannot use space cnn_digits"):
        fitness_of(build_space(SpaceConfig(name="cnn_digits")))
