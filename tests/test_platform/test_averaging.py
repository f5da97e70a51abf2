"""The averaging function: worked numbers, a naive reference, and the laws that every rule must obey."""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from fedloom.platform.averaging.average import TensorSum, Update, WeightedSums, average
from fedloom.platform.averaging.weighting import Work, fedavg, opa, plain
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.slices import Region, Slice, first_not_finite, part_of


def whole(tensors: Mapping[str, Tensor], weights: Mapping[str, float]) -> Update:
    return Update(tensors, {name: Slice(name) for name in tensors}, weights)


def piece(tensor: Tensor, region: Region | None, weight: float, source: str = "w") -> Update:
    return Update({"own": tensor}, {"own": Slice(source, region)}, {"own": weight})


# -- worked numbers ---------------------------------------------------------------------------------------------------

# Three clients: one fixed tensor, operator a touched by clients 1 and 2, operator b by client 3 alone.
WORK = (
    Work(samples=10, seen_samples=20, seen_by_tensor={"fixed": 20, "a": 12, "b": 0}),
    Work(samples=30, seen_samples=60, seen_by_tensor={"fixed": 60, "a": 4, "b": 0}),
    Work(samples=60, seen_samples=120, seen_by_tensor={"fixed": 120, "a": 0, "b": 120}),
)
VALUES = ({"fixed": 1.0, "a": 4.0, "b": -1.0}, {"fixed": 2.0, "a": 8.0, "b": -1.0}, {"fixed": 5.0, "a": -1.0, "b": 7.0})
OLD = {"fixed": torch.tensor([-1.0]), "a": torch.tensor([-1.0]), "b": torch.tensor([-1.0])}


def averaged(rule: object, min_contributors: int = 1) -> dict[str, float]:
    updates = [
        whole({n: torch.tensor([v]) for n, v in values.items()}, rule(work))  # type: ignore[operator]
        for values, work in zip(VALUES, WORK, strict=True)
    ]
    return {name: tensor.item() for name, tensor in average(OLD, updates, min_contributors).items()}


def test_fedavg_by_hand() -> None:
    # fixed (10*1 + 30*2 + 60*5)/100; a (10*4 + 30*8 + 60*-1)/100; b (-10 - 30 + 60*7)/100
    assert averaged(fedavg) == pytest.approx({"fixed": 3.7, "a": 2.2, "b": 3.8})


def test_an_update_for_which_memory_runs_out_is_not_added_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"a": torch.zeros(4), "b": torch.zeros(2)}
    sums = WeightedSums()
    sums.add(piece(torch.tensor([2.0]), ((1, 2),), 1.0, "a"))

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(TensorSum, "of", full)
    both = {"a": Slice("a", ((0, 4),)), "b": Slice("b")}
    with pytest.raises(torch.OutOfMemoryError):
        sums.add(Update({"a": torch.ones(4), "b": torch.ones(2)}, both, {"a": 1.0, "b": 1.0}))
    assert sums.updates == 1
    found = sums.finish(old).weights
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"a": [0, 2, 0, 0], "b": [0, 0]}


def test_rows_that_do_not_count_by_hand() -> None:
    # The first client, of weight 1, counts in rows 0 and 2; the second, narrower and of weight 3, in rows 2 and 3.
    first = Update({"w": torch.full((5, 2), 4.0)}, {"w": Slice("w")}, {"w": 1.0}, rows={"w": ((0, 1), (2, 3))})
    second = Update(
        {"w": torch.full((5, 1), 8.0)}, {"w": Slice("w", ((0, 5), (0, 1)))}, {"w": 3.0}, rows={"w": ((2, 4),)}
    )
    found = average({"w": torch.zeros(5, 2)}, [first, second])["w"]
    assert found.tolist() == [[4, 4], [0, 0], [(4 + 3 * 8) / 4, 4], [8, 0], [0, 0]]


def test_plain_by_hand() -> None:
    assert averaged(plain) == pytest.approx({"fixed": 8 / 3, "a": 11 / 3, "b": 5 / 3})


def test_opa_by_hand() -> None:
    # fixed (20*1 + 60*2 + 120*5)/200; a (12*4 + 4*8)/16; b only client 3
    assert averaged(opa) == pytest.approx({"fixed": 3.7, "a": 5.0, "b": 7.0})


def test_an_operator_of_one_client_keeps_its_weights_to_protect_it() -> None:
    assert averaged(opa, min_contributors=2) == pytest.approx({"fixed": 3.7, "a": 5.0, "b": -1.0})
    assert averaged(opa, min_contributors=3) == pytest.approx({"fixed": 3.7, "a": -1.0, "b": -1.0})
    assert averaged(opa, min_contributors=4) == {"fixed": -1.0, "a": -1.0, "b": -1.0}


def test_overlapping_slices_by_hand() -> None:
    old = {"w": torch.tensor([9.0, 9.0, 9.0, 9.0, 9.0])}
    left = piece(torch.tensor([1.0, 2.0, 3.0]), ((0, 3),), 1.0)
    right = piece(torch.tensor([7.0, 8.0]), ((2, 4),), 3.0)
    assert average(old, [left, right])["w"].tolist() == [1.0, 2.0, (3 + 21) / 4, 8.0, 9.0]
    assert average(old, [left, right], min_contributors=2)["w"].tolist() == [9.0, 9.0, 6.0, 9.0, 9.0]


def test_no_update_leaves_all_as_it_was() -> None:
    assert average(OLD, []) == OLD


# -- the laws ---------------------------------------------------------------------------------------------------------


def naive(old: Tensor, updates: Sequence[Update], min_contributors: int) -> Tensor:
    """Scalar by scalar, in double precision; NaN where the old value must stay."""
    new = torch.full(old.shape, math.nan, dtype=torch.float64)
    for index in itertools.product(*(range(n) for n in old.shape)):
        total = weight_sum = 0.0
        contributors = 0
        for update in updates:
            weight = update.weights["own"]
            region = update.slices["own"].region
            if region is None:
                region = tuple((0, n) for n in old.shape)
            inside = all(start <= i < stop for i, (start, stop) in zip(index, region, strict=True))
            if inside and weight > 0:
                place = tuple(i - start for i, (start, _) in zip(index, region, strict=True))
                total += weight * update.tensors["own"][place].item()
                weight_sum += weight
                contributors += 1
        if contributors >= min_contributors:
            new[index] = total / weight_sum
    return new


@st.composite
def slices_of_one_tensor(draw: st.DrawFn) -> tuple[Tensor, list[Update]]:
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    generator = torch_stream(draw(st.integers(0, 999)), "test")
    updates: list[Update] = []
    for _ in range(draw(st.integers(0, 5))):
        if draw(st.booleans()) and updates:
            region = updates[draw(st.integers(0, len(updates) - 1))].slices["own"].region  # an identical slice
        elif draw(st.booleans()):
            ends = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
            region = tuple((start, stop) for start, stop in ends)
        else:
            region = None
        size = shape if region is None else [stop - start for start, stop in region]
        weight = draw(st.sampled_from([0.0, 0.5, 1.0, 3.0, 40.0]))
        updates.append(piece(torch.randn(size, generator=generator), region, weight))
    return torch.randn(shape, generator=generator), updates


@settings(max_examples=300, deadline=None)
@given(slices_of_one_tensor(), st.integers(1, 3))
def test_equals_the_naive_dense_reference(case: tuple[Tensor, list[Update]], min_contributors: int) -> None:
    old, updates = case
    before = old.clone()
    new = average({"w": old}, updates, min_contributors)["w"]
    expected = naive(old, updates, min_contributors)
    stays = expected.isnan()
    torch.testing.assert_close(new[~stays].double(), expected[~stays], rtol=1e-5, atol=1e-6)
    # Bit for bit, not merely close: nobody trained these.
    assert torch.equal(new[stays].view(torch.int32), before[stays].view(torch.int32))
    assert torch.equal(old, before), "the old weights are an argument, not a workspace"


@settings(max_examples=100, deadline=None)
@given(slices_of_one_tensor(), st.integers(1, 3))
def test_the_coverage_says_of_every_scalar_whether_it_is_a_mean(
    case: tuple[Tensor, list[Update]], min_contributors: int
) -> None:
    old, updates = case
    sums = WeightedSums()
    for update in updates:
        sums.add(update)
    regions = sums.finish({"w": old}, min_contributors).coverage.get("w", {})
    contributors = torch.zeros(old.shape)
    for update in updates:
        region = update.slices["own"].region or tuple((0, n) for n in old.shape)
        part_of(contributors, region).add_(float(update.weights["own"] > 0))
    found = torch.zeros(old.shape)
    for region, covered in regions.items():
        assert not bool(part_of(found, region).any()), "regions do not overlap"
        part_of(found, region).fill_(covered.contributors)
    assert torch.equal(found, torch.where(contributors >= min_contributors, contributors, 0.0))


@settings(max_examples=100, deadline=None)
@given(slices_of_one_tensor(), st.integers(1, 3), st.integers(1, 3))
def test_partial_sums_of_any_chunking_agree(
    case: tuple[Tensor, list[Update]], size: int, min_contributors: int
) -> None:
    old, updates = case
    merged = WeightedSums()
    for start in range(0, len(updates), size):
        chunk = WeightedSums()
        for update in updates[start : start + size]:
            chunk.add(update)
        merged.merge(chunk)
    new = merged.finish({"w": old}, min_contributors).weights["w"]
    torch.testing.assert_close(new, average({"w": old}, updates, min_contributors)["w"], rtol=1e-5, atol=1e-6)


def test_merging_only_reads_what_it_is_given() -> None:
    # A chunk's sums may lie in memory that is shared and read-only.
    chunks = []
    for value, region in ((1.0, ((0, 2),)), (7.0, ((0, 2),)), (5.0, ((1, 3),)), (5.0, ((1, 3),))):
        chunk = WeightedSums()
        chunk.add(piece(torch.full((2,), value), region, 2.0))
        chunks.append(chunk)
    copies = [(c.tensors["w"].total.clone(), c.tensors["w"].box, str(c.tensors["w"].coverage)) for c in chunks]
    merged = WeightedSums()
    for chunk in chunks:
        merged.merge(chunk)
    assert merged.finish({"w": torch.zeros(4)}).weights["w"].tolist() == pytest.approx([4.0, 18 / 4, 5.0, 0.0])
    for chunk, (total, box, coverage) in zip(chunks, copies, strict=True):
        assert torch.equal(chunk.tensors["w"].total, total)
        assert (chunk.tensors["w"].box, str(chunk.tensors["w"].coverage)) == (box, coverage)


def test_sums_do_not_hold_on_to_the_clients_tensors() -> None:
    # A worker's module is used for the next client at once.
    tensor, sums = torch.ones(3), WeightedSums()
    sums.add(piece(tensor, None, 1.0))
    tensor.fill_(100.0)
    assert sums.finish({"w": torch.zeros(3)}).weights["w"].tolist() == [1.0, 1.0, 1.0]


def test_identical_updates_average_to_themselves() -> None:
    tensor = torch.randn(5, 3, generator=torch_stream(1, "test"))
    updates = [piece(tensor, None, w) for w in (1.0, 7.0, 23.0)]
    torch.testing.assert_close(average({"w": torch.zeros(5, 3)}, updates)["w"], tensor)


def test_a_scalar_tensor_has_a_region_too() -> None:
    updates = [piece(torch.tensor(2.0), (), 1.0), piece(torch.tensor(8.0), None, 2.0)]
    assert average({"w": torch.tensor(0.0)}, updates)["w"].item() == 6.0


def test_tensors_that_nobody_covered_are_passed_on_uncopied() -> None:
    old = {"w": torch.zeros(2), "other": torch.ones(2)}
    assert average(old, [piece(torch.ones(2), None, 1.0)])["other"] is old["other"]


# -- kinds of tensors -------------------------------------------------------------------------------------------------


def test_integer_counters_keep_their_type_and_take_the_largest() -> None:
    old = {"w": torch.tensor(3, dtype=torch.int64)}
    updates = [piece(torch.tensor(n), None, w) for n, w in ((7, 1.0), (9, 0.5), (8, 2.0), (50, 0.0))]
    new = average(old, updates)["w"]
    assert (new.dtype, new.item()) == (torch.int64, 9)


def test_integer_counters_obey_min_contributors() -> None:
    old = {"w": torch.tensor(3, dtype=torch.int64)}
    assert average(old, [piece(torch.tensor(7), None, 1.0)], min_contributors=2)["w"].item() == 3


def test_running_variance_stays_positive_over_many_rounds() -> None:
    generator = torch_stream(3, "test")
    weights = {"w": torch.ones(16)}
    for _ in range(50):
        updates = [
            piece(weights["w"] * torch.rand(16, generator=generator) * 1e-3, None, float(w)) for w in (1, 500, 1e6)
        ]
        weights = average(weights, updates)
    assert (weights["w"] >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_types_are_kept(dtype: torch.dtype) -> None:
    updates = [piece(torch.ones(2, dtype=dtype), None, 1.0)]
    assert average({"w": torch.zeros(2, dtype=dtype)}, updates)["w"].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_summed_in_float32(dtype: torch.dtype) -> None:
    values = torch.randn(100, 50, generator=torch_stream(4, "test")).to(dtype)
    old = {"w": torch.zeros(50, dtype=dtype)}
    mean = average(old, [piece(value, None, 1000.0) for value in values])["w"]
    assert torch.equal(mean, values.double().mean(dim=0).to(dtype))
    sums = [WeightedSums(), WeightedSums()]
    for index, value in enumerate(values):
        sums[index // 50].add(piece(value, None, 1000.0))
    sums[0].merge(sums[1])
    torch.testing.assert_close(sums[0].finish(old).weights["w"], mean)


# -- weights ----------------------------------------------------------------------------------------------------------


def test_weight_zero_is_no_contributor() -> None:
    old = {"w": torch.tensor([4.0])}
    silent = piece(torch.tensor([100.0]), None, 0.0)
    assert average(old, [silent])["w"].item() == 4.0
    one = piece(torch.tensor([6.0]), None, 1.0)
    assert average(old, [silent, one], min_contributors=2)["w"].item() == 4.0
    assert average(old, [silent, one])["w"].item() == 6.0


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_impossible_weights_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=rf"weight of own is {weight}: "):
        average({"w": torch.zeros(1)}, [piece(torch.ones(1), None, weight)])


@pytest.mark.parametrize("weight", [1e-60, 1e-21, 1e21, 1e60])
def test_weights_that_a_sum_of_float32_cannot_hold_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=r"weight of own is .*: sums of float32 need weights of 0, or of 1e-20 to"):
        average({"w": torch.zeros(1)}, [piece(torch.ones(1), None, weight)])


@pytest.mark.parametrize("weight", [1e-20, 1e20])
def test_the_lightest_and_the_heaviest_weights_give_means(weight: float) -> None:
    updates = [piece(torch.tensor([value]), None, weight) for value in (1e3, 3e3)]
    assert average({"w": torch.zeros(1)}, updates)["w"].item() == pytest.approx(2e3)


def test_a_refused_update_leaves_no_trace_in_the_sums() -> None:
    sums = WeightedSums()
    bad = whole({"a": torch.ones(1), "b": torch.ones(1)}, {"a": 1.0, "b": -1.0})
    with pytest.raises(ValueError, match="weight of b"):
        sums.add(bad)
    with pytest.raises(ValueError, match="no weight for b"):
        sums.add(whole({"a": torch.ones(1), "b": torch.ones(1)}, {"a": 1.0}))
    assert sums.tensors == {}


def test_numpy_weights_work_as_well() -> None:
    assert average({"w": torch.zeros(1)}, [piece(torch.ones(1), None, np.float64(2.0))])["w"].item() == 1.0


def test_sums_that_were_finished_are_used_up() -> None:
    old = {"w": torch.zeros(2)}
    update = Update({"w": torch.ones(2)}, {"w": Slice("w")}, {"w": 1.0})
    sums = WeightedSums()
    sums.add(update)
    assert sums.finish(old).weights["w"].tolist() == [1.0, 1.0]
    for misuse in (lambda: sums.add(update), lambda: sums.finish(old), lambda: sums.merge(WeightedSums())):
        with pytest.raises(ValueError, match="these sums were finished"):
            misuse()
    with pytest.raises(ValueError, match="these sums were finished"):
        WeightedSums().merge(sums)


def test_the_first_tensor_that_is_not_finite_is_named() -> None:
    fine = {"count": torch.tensor([3]), "a": torch.ones(2), "b": torch.ones(2, dtype=torch.float64)}
    assert first_not_finite(fine) is None
    assert first_not_finite({"count": torch.tensor([3])}) is None
    broken = {"c": torch.tensor([math.inf, -math.inf]), "d": torch.tensor([math.nan])}
    assert first_not_finite({**fine, **broken}) == "c"
    great = torch.full((1,), 3e38)
    assert first_not_finite({"a": great, "b": great}) is None, "only their sum overflows"
    mask = torch.tensor([0.0, -math.inf])
    assert first_not_finite({"a": mask}, lambda _: mask.clone()) is None
    for received in (None, torch.zeros(2), torch.tensor([0.0, math.inf])):
        assert first_not_finite({"a": mask}, lambda _, received=received: received) == "a"
    assert first_not_finite(broken, broken.get) == "d", "NaN equals nothing"
    assert first_not_finite({"a": torch.full((2,), 6e4, dtype=torch.float16)}) is None
