"""Samples that lie on a device: what is read there is what main memory holds, under the same lock."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.platform.data.augment import augmentation, crop_flip, crop_flip_stack
from fedloom.platform.data.dataset import TestReadError
from fedloom.platform.data.federated import FederatedData
from fedloom.platform.data.on_device import OnDevice, moved, upload
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import build_world
from fedloom.platform.plugins import ComponentSpec

CPU = torch.device("cpu")
PLENTY = 10**9


@pytest.fixture
def data(tiny_config: Callable[..., RunConfig]) -> FederatedData:
    spec = build_world(tiny_config()).spec
    return FederatedData.open(Path(spec.dataset_path), Path(spec.partition_path))


@pytest.mark.parametrize("most_bytes", [PLENTY, 0])
def test_samples_are_the_same_wherever_they_lie(data: FederatedData, most_bytes: int) -> None:
    on_device = data.on(CPU, most_bytes)
    for client in (0, 3):
        for found, expected in zip(on_device.client(client, "train"), data.client(client, "train"), strict=True):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
    (x, y), sizes = on_device.clients([2, 5], ["train", "validation"])
    (x2, y2), sizes2 = data.clients([2, 5], ["train", "validation"])
    assert (x.dtype, sizes) == (torch.uint8, sizes2)
    assert torch.equal(x, x2)
    assert torch.equal(y, y2)
    assert torch.equal(on_device.central("validation").tensors()[0], data.central("validation").tensors()[0])


def test_samples_on_a_device_are_under_the_lock_also_after_they_were_read(data: FederatedData) -> None:
    on_device = data.on(CPU, PLENTY)
    with on_device.reading_test():
        assert len(on_device.client(0, "test")[1])
    for read in (lambda: on_device.client(0, "test"), lambda: on_device.dataset.stored("test", np.arange(2))):
        with pytest.raises(TestReadError):
            read()


def test_parts_are_uploaded_once_while_they_fit() -> None:
    stored = torch.arange(20_000, dtype=torch.uint8), torch.arange(20_000)
    reads: list[int] = []

    def read(indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        reads.append(len(indices))
        return stored[0][indices], stored[1][indices]

    store = OnDevice(CPU, most_bytes=9 * 20_000)  # a byte and eight of a label
    for part, expected in (("train", [1, 8192, 8192, 3616]), ("test", [1, 2, 2])):
        reads.clear()
        for _ in range(2):
            x, y = store.take(part, np.array([5, 19_999]), read, 20_000)
            assert (x.tolist(), y.tolist()) == ([5, 19_999 % 256], [5, 19_999])
        assert reads == expected, part


def test_a_part_without_samples_is_read_as_it_is() -> None:
    empty = torch.zeros((0, 3), dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
    x, y = OnDevice(CPU, PLENTY).take("test", np.arange(0), lambda _indices: empty, 0)
    assert (x.shape, y.shape) == ((0, 3), (0,))


def test_a_tensor_that_is_there_is_not_copied() -> None:
    tensor = torch.ones(3)
    assert upload(tensor, CPU) is tensor


def test_the_images_of_a_stack_move_as_those_of_each_client_alone() -> None:
    assert augmentation(ComponentSpec("crop_flip")) is crop_flip, "by which a stack knows that it may move all at once"
    images, sizes = torch.randn(3, 5, 3, 8, 8), (5, 2, 4)
    together = crop_flip_stack(images, sizes, [torch.Generator().manual_seed(k) for k in range(3)])
    for k, size in enumerate(sizes):
        alone = crop_flip(images[k, :size], torch.Generator().manual_seed(k))
        assert torch.equal(together[k, :size], alone)
        assert torch.equal(together[k, size:], images[k, size:]), "samples that do not count stay as they are"


def test_tensors_travel_in_one_copy_per_type(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Tensor] = []

    def upload(tensor: Tensor, device: torch.device) -> Tensor:
        assert device.type == "meta"
        copies.append(tensor.clone())
        return copies[-1]

    monkeypatch.setattr("fedloom.platform.data.on_device.upload", upload)
    last = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    tensors = {
        "a": torch.randn(3),
        "steps": torch.tensor(7),
        "b": last,
        "none": torch.zeros(0, 2),
        "c": torch.randn(()),
    }
    there = moved(tensors, torch.device("meta"))
    assert [(copy.dtype, copy.numel()) for copy in copies] == [(torch.float32, 124), (torch.int64, 1)]
    assert list(there) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(there[name], tensor), name
    there["a"].zero_()
    assert torch.equal(there["b"], last), "they share memory, but no values"


def test_tensors_that_are_there_stay_themselves() -> None:
    tensors = {"a": torch.randn(3), "b": torch.randn(2)}
    assert all(moved(tensors, torch.device("cpu"))[name] is tensor for name, tensor in tensors.items())
