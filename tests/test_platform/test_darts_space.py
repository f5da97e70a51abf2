"""Spaces of DARTS cells: edges, subspaces, tensors and costs."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.platform.seeding import stream, torch_stream
from fedloom.platform.spaces.darts import DARTS, DartsDesign, DartsNetwork, DartsSpace, plan_cells
from fedloom.platform.spaces.initialisation import on_meta
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import Subspace, bytes_of, extract
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.costs import size_of
from fedloom.tiers.measure import MEASURES, activation_bytes_of, macs_of, parameters_of
from tests.test_platform.test_spaces_operator_choice import tensors_of

pytestmark = pytest.mark.usefixtures("one_thread")


def space_of(name: str, **changes: Any) -> DartsSpace:
    space = build_space(SpaceConfig(name, **changes))
    assert isinstance(space, DartsSpace)
    return space


SMALL = space_of("darts_s2_small")
MIXED = DartsSpace(
    DartsDesign("mixed", (2, 8, 8), 5, cells=4, channels=2, nodes=2, operators=tuple(DARTS), affine=True)
)
STRIDED = space_of("darts_s2_small", stem_stride=2, input_shape=[1, 16, 16])


def inputs(space: DartsSpace, batch: int = 2) -> Tensor:
    return torch.randn(batch, *space.input_shape, generator=torch_stream(0, "x"))


def random_subspace(space: DartsSpace, rng: np.random.Generator) -> Subspace:
    """Each operator kept with probability .4: some edges are pruned, some nodes are left with nothing."""
    return tuple(tuple(np.flatnonzero(rng.random(n) < 0.4).tolist()) for n in space.options)


# -- edges and counts -------------------------------------------------------------------------------------------------


def test_the_published_counts() -> None:
    s2 = space_of("darts_s2")
    assert s2.options == (2,) * 28
    assert s2.num_architectures == 268_435_456
    assert s2.operator_names == (("skip_connect", "sep_conv_3x3"),) * 28
    assert space_of("darts_s3").operator_names[27] == ("none", "skip_connect", "sep_conv_3x3")
    assert space_of("darts_s4").operator_names[0] == ("noise", "sep_conv_3x3")
    assert space_of("darts_full").options == (8,) * 28


def test_s1_has_two_operators_of_its_own_on_every_edge() -> None:
    s1 = space_of("darts_s1")
    assert s1.options == (2,) * 28
    assert s1.operator_names[0] == ("skip_connect", "dil_conv_3x3")
    assert s1.operator_names[13] == ("dil_conv_3x3", "dil_conv_5x5")
    assert s1.operator_names[14] == ("max_pool_3x3", "avg_pool_3x3")
    assert s1.operator_names[20] == ("max_pool_3x3", "sep_conv_3x3")
    assert s1.operator_names[27] == ("skip_connect", "dil_conv_5x5")


def test_edges_are_named_for_people() -> None:
    s2 = space_of("darts_s2")
    edges = s2.edges("normal")
    assert edges[:5] == ((0, 2), (1, 2), (0, 3), (1, 3), (2, 3))
    assert len(edges) == 14
    assert edges[-1] == (4, 5)
    assert s2.edges("reduction") == edges
    assert s2.decisions("reduction") == range(14, 28)
    assert [s2.design.edge_name(d) for d in (0, 13, 14, 27)] == [
        "normal 0->2",
        "normal 4->5",
        "reduction 0->2",
        "reduction 4->5",
    ]
    with pytest.raises(ValueError, match="unknown cell type 'reduce': known are normal, reduction"):
        s2.edges("reduce")


@pytest.mark.parametrize(("cells", "at"), [(3, [1, 2]), (4, [1, 2]), (5, [1, 3]), (8, [2, 5]), (20, [6, 13])])
def test_reductions_are_at_a_third_and_two_thirds(cells: int, at: list[int]) -> None:
    plans = plan_cells(DartsDesign("d", cells=cells))
    assert [i for i, plan in enumerate(plans) if plan.reduction] == at
    assert [i for i, plan in enumerate(plans) if plan.halve_first] == [i + 1 for i in at if i + 1 < cells]
    assert (plans[0].channels, plans[-1].channels) == (16, 64)


def test_sizes_of_the_search_networks() -> None:
    """DARTS prints 1.930618 million for its own search network of this size; the others follow by hand.

    s2: a separable convolution of c channels has 2 (9 c + c^2) parameters, on 14 edges of 2 + 2 + 2 normal cells of
    16, 32, 64 channels and of two reduction cells of 32, 64; a strided skip has c^2, on 8 edges; the rest is fixed.
    """
    assert space_of("darts_full").num_parameters.supernet == 1_930_618
    sizes = space_of("darts_s2").num_parameters
    separable = {c: 2 * (9 * c + c * c) for c in (16, 32, 64)}
    searched = 14 * (2 * sum(separable.values()) + separable[32] + separable[64]) + 8 * (32**2 + 64**2)
    stem, preprocessing, head = 3 * 48 * 9 + 2 * 48, 95_488, 256 * 10 + 10
    assert sizes.fixed == stem + preprocessing + head == 99_450
    assert sizes.supernet == sizes.fixed + searched == 665_466
    assert sizes.largest_path == 665_466 - 40_960


def test_architectures_are_sampled_and_enumerated() -> None:
    assert SMALL.num_architectures == 1024
    assert list(itertools.islice(SMALL.enumerate(), 3)) == [(0,) * 10, (0,) * 9 + (1,), (0,) * 8 + (1, 0)]
    rng = stream(1, "test")
    drawn = [SMALL.sample(rng) for _ in range(2000)]
    assert all(type(option) is int for option in drawn[0])
    assert np.abs(np.array(drawn).mean(axis=0) - 0.5).max() < 0.05  # 4.5 standard deviations


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ((0,) * 9, "an architecture of darts_s2_small has 10 edges, given 9"),
        ((0, 0, 2, *(0,) * 7), r"normal 0->3 .* operators 0 \(skip_connect\), 1 \(sep_conv_3x3\), given 2"),
        ((*(0,) * 9, -1), "reduction 2->3 .* given -1"),
        ((*(0,) * 9, 1.0), r"reduction 2->3 .* given 1\.0"),
    ],
)
def test_an_architecture_outside_the_space_is_named(architecture: Any, message: str) -> None:
    for refuse in (SMALL.validate, SMALL.slices, SMALL.build_subnet):
        with pytest.raises(ValueError, match=message):
            refuse(architecture)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (((0,),) * 11, "a subspace of darts_s2_small has 10 edges, given 11"),
        (((0,), (1, 0), *((0,),) * 8), r"normal 1->2 .* distinct operators in order, given \(1, 0\)"),
        (((0,), (1, 1), *((0,),) * 8), r"normal 1->2 .* given \(1, 1\)"),
        ((*((0,),) * 9, (0, 2)), "reduction 2->3 .* given 2"),
        ((0,) * 10, "normal 0->2 .* must be a tuple of operators, given 0"),
    ],
)
def test_a_subspace_outside_the_space_is_named(kept: Any, message: str) -> None:
    for refuse in (SMALL.validate_subspace, SMALL.subspace_slices, SMALL.build_subspace):
        with pytest.raises(ValueError, match=message):
            refuse(kept)


def test_a_network_names_what_it_does_not_hold() -> None:
    net = SMALL.build_subspace(((0,), (), *((0, 1),) * 8))
    x = inputs(SMALL)
    with pytest.raises(ValueError, match=r"normal 0->2 holds 0 \(skip_connect\), not 1 \(sep_conv_3x3\)"):
        net(x, ((1,), (), *((0, 1),) * 8))
    with pytest.raises(ValueError, match=r"normal 1->2 holds nothing, not 0 \(skip_connect\)"):
        net(x, (0,) * 10)
    with pytest.raises(ValueError, match="not 7"):
        net(x, ((7,), (), *((0, 1),) * 8))
    with pytest.raises(ValueError, match=r"has 10 edges \(5 per cell type\), given 9"):
        net(x, (0,) * 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cells": 2}, "cells must be at least 3, given 2"),
        ({"nodes": 0}, "nodes must be at least 1"),
        ({"channels": 0}, "channels must be at least 1"),
        ({"input_shape": [1, 6, 8]}, r"multiples of 4, given \(1, 6, 8\)"),
        ({"stem_stride": 4}, r"multiples of 16, given \(1, 8, 8\)"),
        ({"stem_stride": 0}, "stem_stride must be at least 1, given 0"),
        ({"input_shape": [8, 8]}, "takes images"),
        ({"operators": ["skip_connect", "conv"]}, "edge normal 0->2: unknown operator 'conv': known are none, noise"),
        ({"operators": ["noise", "noise"]}, "each once, given noise, noise"),
        ({"operators": []}, "at least one operator"),
        ({"stem_channels": 3}, "has no stem_channels; it has .*cells, channels, nodes"),
    ],
)
def test_designs_that_cannot_be_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        space_of("darts_s2_small", **changes)


def test_a_table_of_operators_belongs_to_its_edges() -> None:
    with pytest.raises(ValueError, match="each of the 10 edges, given 28 tuples and 0 names"):
        space_of("darts_s1", nodes=2)
    assert space_of("darts_s1", nodes=2, operators=["noise"]).options == (1,) * 10


# -- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", [SMALL, MIXED], ids=["small", "mixed"])
def test_slices_are_complete_and_disjoint(space: DartsSpace) -> None:
    names = list(space.build_supernet().state_dict())
    assert list(space.owner_of) == names
    pairs = [(decision, option) for decision, n in enumerate(space.options) for option in range(n)]
    groups = [tensors_of(space, None), *(tensors_of(space, pair) for pair in pairs)]
    assert sorted(itertools.chain(*groups)) == sorted(names)
    assert set(space.subspace_slices(space.largest_subspace)) == set(names)
    nothing: Subspace = ((),) * len(space.options)
    assert set(space.subspace_slices(nothing)) == set(tensors_of(space, None)) == set(_state(space, nothing))


def _state(space: DartsSpace, kept: Subspace) -> dict[str, Tensor]:
    return space.build_subspace(kept).state_dict()


def test_an_operators_tensors_are_those_of_all_cells_of_its_type() -> None:
    s2 = space_of("darts_s2")
    assert {name.split(".")[1] for name in tensors_of(s2, (3, 1))} == {"0", "1", "3", "4", "6", "7"}
    assert {name.split(".")[1] for name in tensors_of(s2, (14 + 3, 1))} == {"2", "5"}
    assert tensors_of(s2, (3, 0)) == ()  # an identity
    assert s2.owner_of["cells.5.edges.0.ops.0.even.weight"] == (14, 0)
    assert s2.owner_of["cells.5.preprocess0.conv.weight"] is None
    assert s2.owner_of["cells.6.preprocess0.odd.weight"] is None
    assert {None} == {s2.owner_of[name] for name in s2.owner_of if name.startswith(("stem", "head"))}


def test_slices_name_exactly_the_tensors_of_a_network() -> None:
    weights = MIXED.initial_weights(torch_stream(0, "test"))
    rng = stream(2, "test")
    for _ in range(5):
        kept = random_subspace(MIXED, rng)
        own, state = extract(weights, MIXED.subspace_slices(kept)), _state(MIXED, kept)
        assert set(own) == set(state)
        assert all(own[name].shape == t.shape and own[name].dtype == t.dtype for name, t in state.items())
        assert all(own[name].data_ptr() == weights[name].data_ptr() for name in own)


def test_initial_weights_come_from_the_generator_alone() -> None:
    before = torch.get_rng_state()
    first = SMALL.initial_weights(torch_stream(1, "init"))
    again = SMALL.initial_weights(torch_stream(1, "init"))
    other = SMALL.initial_weights(torch_stream(2, "init"))
    path = (1, 0) * 5
    subnet = SMALL.initial_subnet_weights(path, torch_stream(1, "init"))
    assert torch.equal(torch.get_rng_state(), before)
    assert list(first) == list(SMALL.owner_of)
    assert all(torch.equal(first[name], again[name]) and bool(first[name].isfinite().all()) for name in first)
    assert not torch.equal(first["stem.0.weight"], other["stem.0.weight"])
    assert set(subnet) == set(SMALL.slices(path))


def test_networks_without_weights_do_not_pass_for_trained_ones() -> None:
    assert bool(SMALL.build_supernet().eval()(inputs(SMALL)).isnan().all())
    assert bool(SMALL.build_subnet((0,) * 10).eval()(inputs(SMALL)).isnan().all())


def test_norms_have_scale_and_shift_only_if_asked() -> None:
    assert "cells.0.preprocess1.norm.weight" not in SMALL.owner_of
    assert "cells.0.preprocess1.norm.weight" in MIXED.owner_of
    assert "stem.1.weight" in SMALL.owner_of


# -- costs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", [SMALL, MIXED, STRIDED], ids=["small", "mixed", "strided"])
def test_tables_equal_measures_of_whole_networks(space: DartsSpace) -> None:
    rng, x = stream(8, "test"), inputs(space, 1)
    for path in [(0,) * 10, *(space.sample(rng) for _ in range(3))]:
        subnet = space.build_subnet(path)
        assert space.cost_table("macs").cost(path) == macs_of(subnet, x)
        assert space.cost_table("parameters").cost(path) == parameters_of(subnet)
        assert space.cost_table("bytes").cost(path) == bytes_of(subnet.state_dict())
        assert space.cost_table("activation_bytes").cost(path) == activation_bytes_of(subnet, x)


def test_a_stem_of_stride_two_sees_a_quarter_of_the_pixels() -> None:
    same = [space.cost_table("macs") for space in (STRIDED, space_of("darts_s2_small", input_shape=[1, 8, 8]))]
    assert same[0].options == same[1].options
    assert same[0].fixed == same[1].fixed


def test_tables_add_up_over_subspaces() -> None:
    rng, x = stream(9, "test"), inputs(MIXED, 1)
    for kept in [MIXED.largest_subspace, *(random_subspace(MIXED, rng) for _ in range(3))]:
        net = MIXED.build_subspace(kept)
        assert size_of(MIXED.cost_table("macs"), kept) == macs_of(net, x)
        assert size_of(MIXED.cost_table("parameters"), kept) == parameters_of(net)
        assert size_of(MIXED.cost_table("bytes"), kept) == bytes_of(net.state_dict())


class _WithBase(nn.Module):
    """Cells that hold everything, then cells that hold what is kept: nothing else is there to be counted."""

    def __init__(self, design: DartsDesign, kept: Subspace, base_cells: int) -> None:
        super().__init__()
        self.net, pruned = DartsNetwork(design, DartsSpace(design).largest_subspace), DartsNetwork(design, kept)
        self.net.cells = nn.ModuleList([*self.net.cells[:base_cells], *pruned.cells[base_cells:]])
        self.kept, self.base_cells = kept, base_cells

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x, self.kept, None, self.base_cells)
        return y


def _with_base(kept: Subspace, base_cells: int) -> nn.Module:
    return on_meta(lambda: _WithBase(MIXED.design, kept, base_cells))


@pytest.mark.parametrize("base_cells", [1, 2, 4])
def test_the_cost_of_a_shared_base_is_that_of_such_a_network(base_cells: int) -> None:
    rng, x = stream(10, "test", base_cells), inputs(MIXED, 1)
    kept = random_subspace(MIXED, rng)
    assert MIXED.cost_of_cells("macs", kept, base_cells) == macs_of(_with_base(kept, base_cells), x)
    for kept in [((),) * 10, random_subspace(MIXED, rng)]:
        net = _with_base(kept, base_cells)
        assert MIXED.cost_of_cells("parameters", kept, base_cells) == parameters_of(net)
        assert MIXED.cost_of_cells("bytes", kept, base_cells) == bytes_of(net.state_dict())


def test_without_a_base_the_cost_is_that_of_the_subspace() -> None:
    rng = stream(11, "test")
    for space in (SMALL, MIXED, space_of("darts_full")):
        for kept in [space.largest_subspace, *(random_subspace(space, rng) for _ in range(3))]:
            for measure in ("macs", "parameters", "bytes"):
                assert space.cost_of_cells(measure, kept, 0) == size_of(space.cost_table(measure), kept)
                whole = space.cost_of_cells(measure, kept, space.design.cells)
                assert whole == size_of(space.cost_table(measure), space.largest_subspace)


def test_a_base_outside_the_network_is_refused() -> None:
    for measure in ("activation_bytes", "latency_s", "flops"):
        with pytest.raises(ValueError, match=f"'{measure}' is not counted by cells: choose one of macs, parameters"):
            SMALL.cost_of_cells(measure, SMALL.largest_subspace, 1)
    for base_cells in (-1, 4):
        for refuse in (lambda n: SMALL.cost_of_cells("macs", SMALL.largest_subspace, n), SMALL.base_tensors):
            with pytest.raises(ValueError, match=f"has 3 cells: base_cells={base_cells} must be from 0 to that"):
                refuse(base_cells)
    with pytest.raises(ValueError, match="a subspace of darts_s2_small has 10 edges, given 1"):
        SMALL.cost_of_cells("macs", ((0,),), 1)


def test_the_tensors_of_a_base() -> None:
    full = space_of("darts_s2", cells=12)  # cells 1 and 10 begin alike
    assert set(full.base_tensors(0)) == {name for name in full.owner_of if name.startswith("stem.")}
    base = full.base_tensors(2)
    assert {name.split(".")[1] for name in base if name.startswith("cells")} == {"0", "1"}
    beyond = {n for n in full.owner_of if n.startswith("head") or (n.startswith("cells") and int(n.split(".")[1]) >= 2)}
    assert set(base) == set(full.owner_of) - beyond
    assert list(base) == [name for name in full.owner_of if name in set(base)]
    assert set(full.owner_of) - set(full.base_tensors(12)) == {"head.weight", "head.bias"}


def test_costs_of_the_published_size() -> None:
    s2 = space_of("darts_s2")
    path = (1, 0, 0, 1) * 7
    subnet = s2.build_subnet(path)
    assert s2.cost_table("macs").cost(path) == macs_of(subnet, torch.zeros(1, 3, 32, 32))
    assert s2.cost_table("parameters").cost(path) == parameters_of(subnet)
    # One separable convolution on a normal edge: 2 (9 c + c^2) parameters at 32^2, 16^2 and 8^2 pixels, two cells each.
    assert s2.cost_table("macs").options[0] == (0, 2 * (800 * 32**2 + 2624 * 16**2 + 9344 * 8**2))


def test_tables_are_computed_once_and_know_their_kind() -> None:
    for measure in ("macs", "parameters", "activation_bytes", "bytes"):
        table = SMALL.cost_table(measure)
        assert table is SMALL.cost_table(measure)
        assert (table.measure, table.reduce) == (measure, MEASURES.get(measure, "sum"))
    with pytest.raises(ValueError, match="unknown measure 'flops': known are macs, parameters"):
        SMALL.cost_table("flops")


def test_latency_is_measured_without_touching_the_global_generator() -> None:
    space = space_of("darts_s2_small", operators=["noise", "skip_connect", "sep_conv_3x3"])
    before = torch.get_rng_state()
    table = space.cost_table("latency_s")
    assert torch.equal(torch.get_rng_state(), before)
    assert table.fixed > 0
    assert table.options[0][1] == 0 < table.options[5][1]  # an identity; a factorised reduction
    assert all(row[0] > 0 and row[2] > 0 for row in table.options)
