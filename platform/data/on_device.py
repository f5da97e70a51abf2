"""Samples on an accelerator: copies that do not wait for it, and data sets that are uploaded once, as stored."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.platform.data.trees import Tree, mapped, taken, tensors_of

Indices = npt.NDArray[np.int64]
Read = Callable[[Indices], tuple[Tree, Tree]]
"""Reads the stored inputs and labels of the samples at some indices into main memory."""

PIECE = 8192
"""Samples uploaded at a time: a second copy of the data set in main memory would be too much with many actors."""


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; a copy to a GPU is queued behind the GPU's pending work, without waiting for it.

    A copy from ordinary memory waits until the GPU has done everything queued before, because that memory may be moved
    or freed. Pinned memory stays in place, and torch re-uses it only after the copy.
    """
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


@torch.no_grad()
def moved(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The tensors on the device, moved by one copy per dtype instead of one per tensor; those there are not copied.

    Moved tensors of one dtype are views of the same memory.
    """
    there, away = dict(tensors), dict[torch.dtype, list[str]]()
    for name, tensor in tensors.items():
        if tensor.device.type != device.type:
            away.setdefault(tensor.dtype, []).append(name)
    for names in away.values():
        together = torch.cat([tensors[name].reshape(-1) for name in names])
        parts = torch.split(upload(together, device), [tensors[name].numel() for name in names])
        there.update((name, part.view(tensors[name].shape)) for name, part in zip(names, parts, strict=True))
    return there


class OnDevice:
    """Parts of a data set on one device, each as a whole while they fit into `most_bytes`; others upload on access."""

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        self.device = device
        self._left_bytes = most_bytes
        self._parts: dict[str, tuple[Tree, Tree] | None] = {}
        self._reading: dict[tuple[str, bytes], Future[tuple[Tree, Tree]]] = {}
        self._reader = ThreadPoolExecutor(1, "samples-to-come")

    def expect(self, wanted: Iterable[tuple[str, Indices, Read]]) -> None:
        """Starts reading samples that `take` will be asked for, in a thread; drops earlier ones not wanted any more.

        Skips parts that are on the device as a whole, or of which nothing was taken yet. Errors are raised by `take`.
        """
        before, self._reading = self._reading, {}
        for part, indices, read in wanted:
            if self._parts.get(part, ()) is None:
                key = part, indices.tobytes()
                expected = before.pop(key) if key in before else self._reader.submit(self._pinned, read, indices)
                self._reading[key] = expected
        for unwanted in before.values():
            unwanted.cancel()

    def _pinned(self, read: Read, indices: Indices) -> tuple[Tree, Tree]:
        x, y = read(indices)
        return (mapped(Tensor.pin_memory, x), mapped(Tensor.pin_memory, y)) if self.device.type == "cuda" else (x, y)

    def take(self, part: str, indices: Indices, read: Read, num_samples: int) -> tuple[Tree, Tree]:
        """The samples at `indices` on the device, read by `read`; a part that fits is uploaded whole at first use."""
        if part not in self._parts:
            self._parts[part] = self._whole(read, num_samples)
        whole = self._parts[part]
        if whole is None:
            expected = self._reading.pop((part, indices.tobytes()), None)
            x, y = read(indices) if expected is None else expected.result()
            return mapped(self._upload, x), mapped(self._upload, y)
        on_device = upload(torch.from_numpy(np.array(indices, dtype=np.int64)), self.device)
        return taken(whole[0], on_device), taken(whole[1], on_device)

    def _upload(self, tensor: Tensor) -> Tensor:
        return upload(tensor, self.device)

    def _whole(self, read: Read, num_samples: int) -> tuple[Tree, Tree] | None:
        one = read(np.arange(min(1, num_samples)))
        size_bytes = num_samples * sum(t.nbytes for tree in one for t in tensors_of(tree))
        if not 0 < size_bytes <= self._left_bytes:
            return None
        self._left_bytes -= size_bytes

        def room(tensor: Tensor) -> Tensor:
            return torch.empty((num_samples, *tensor.shape[1:]), dtype=tensor.dtype, device=self.device)

        x, y = mapped(room, one[0]), mapped(room, one[1])
        for start in range(0, num_samples, PIECE):
            stop = min(start + PIECE, num_samples)
            for whole, piece in zip((x, y), read(np.arange(start, stop)), strict=True):
                for to, tensor in zip(tensors_of(whole), tensors_of(piece), strict=True):
                    to[start:stop].copy_(tensor)
        return x, y
