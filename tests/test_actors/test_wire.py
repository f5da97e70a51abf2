"""What travels between actors arrives as it was, and large arrays are not copied."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from fedloom.actors.client import accept_shared_memory, pack, to_arrays, to_tensors, unpack
from fedloom.platform.averaging.aggregators import KeptUpdates
from fedloom.platform.averaging.average import Update, WeightedSums
from fedloom.platform.clients.assignments import ClientResult
from fedloom.platform.clients.execution import ChunkResult
from fedloom.platform.spaces.slices import Slice

OLD = {"w": torch.zeros(4, 3), "n": torch.zeros((), dtype=torch.int64)}


def sums_of(*weights: float) -> WeightedSums:
    sums = WeightedSums()
    for number, weight in enumerate(weights):
        region = ((number % 2, number % 2 + 2), (0, 3))
        tensor = torch.full((2, 3), float(number + 1))
        sums.add(Update({"w": tensor}, {"w": Slice("w", region)}, {"w": weight}))
    return sums


@given(st.lists(st.floats(0.5, 4.0), min_size=1, max_size=5))
def test_a_packed_result_is_unpacked_to_the_same_sums_and_reports(weights: list[float]) -> None:
    reports = [ClientResult(client_id=i, tier="tier1", samples=i) for i in range(3)]
    result = ChunkResult(sums_of(*weights), reports)
    back = unpack(pack(result))
    assert back.client_results == reports
    assert (back.sums.updates, back.sums.weigh_nothing) == (len(weights), False)
    assert torch.equal(back.sums.finish(OLD).weights["w"], sums_of(*weights).finish(OLD).weights["w"])


def test_updates_that_weigh_nothing_are_counted_across() -> None:
    weightless = ChunkResult()
    weightless.sums.add(Update({"w": torch.ones(2)}, {"w": Slice("w")}, {"w": 0.0}))
    back = unpack(pack(weightless)).sums
    assert (back.updates, back.weigh_nothing) == (1, True)
    back.merge(sums_of(1.0))
    assert not back.weigh_nothing
    assert not WeightedSums().weigh_nothing


def test_unpacked_sums_can_be_merged_into_others() -> None:
    whole = WeightedSums()
    whole.merge(unpack(pack(ChunkResult(sums_of(1.0)))).sums)
    whole.merge(unpack(pack(ChunkResult(sums_of(1.0)))).sums)
    # Both held the value 1 in rows 0 and 1.
    assert whole.finish(OLD).weights["w"].tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 2


def test_single_updates_come_back_as_they_were_kept() -> None:
    update = Update({"w": torch.arange(6.0).reshape(2, 3)}, {"w": Slice("w", ((1, 3), (0, 3)))}, {"w": 2.0}, unheld=0.5)
    kept = KeptUpdates()
    kept.add(update)
    (back,) = unpack(pack(ChunkResult(kept))).sums.kept
    assert torch.equal(back.tensors["w"], update.tensors["w"])
    assert (back.slices, back.weights, back.unheld) == (update.slices, update.weights, 0.5)


def test_tensors_and_arrays_share_their_memory() -> None:
    tensors = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(7)}
    arrays = to_arrays(tensors)
    again = to_tensors(arrays)
    assert list(again) == ["w", "n"]
    assert again["w"].data_ptr() == tensors["w"].data_ptr()
    assert (again["n"].dtype, again["n"].item()) == (torch.int64, 7)


def test_bfloat16_travels_although_numpy_lacks_it() -> None:
    tensors = {"w": torch.randn(2, 3).bfloat16(), "scalar": torch.tensor(2.5, dtype=torch.bfloat16)}
    again = to_tensors(to_arrays(tensors))
    for name, tensor in tensors.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=0)


@pytest.mark.ray
def test_large_arrays_arrive_from_the_object_store_without_a_copy(ray_cluster: None) -> None:
    import ray

    accept_shared_memory()
    reference = ray.put(to_arrays({"w": torch.arange(1_000_000.0)}))
    first, second = ray.get(reference), ray.get(reference)
    assert not first["w"].flags.writeable
    assert np.shares_memory(first["w"], second["w"])
    assert to_tensors(first)["w"].data_ptr() == second["w"].ctypes.data
    assert to_tensors(first)["w"][-1].item() == 999_999.0
