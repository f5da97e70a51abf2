"""A device that is pretended: the processor computes what is asked of it, so that it gives the processor's bits.

Tensors of it are wrappers, which no operation takes together with tensors of main memory. Unlike the device on paper
(`tools.fake_device`) it has values, so that whole runs go through it; it counts no kernels.

    PYTHONPATH=tests python -m tools.pretend_device SHARES KEY=VALUE ...

runs a configuration in this process, first on the CPU and then with these shares of the device, such as `[0,0.5]`, and
prints both runs and what was copied as JSON. Torch's backward passes only know devices that are there before the first
of them, which is why this is a program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.clients import execution
from fedloom.platform.clients.execution import Chunk, ChunkResult, SerialExecutor, SharedWeights
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.world import World
from fedloom.platform.runs import run
from fedloom.platform.spaces.slices import Weights
from tools.fake_device import moves_modules

DEVICE = "pretend:0"
COPIES = ("aten::_to_copy", "aten::copy_")


class Pretended(Tensor):
    """A tensor of the device: `raw` has its values."""

    raw: Tensor
    downloads: ClassVar[int] = 0
    """How often something was copied from the device, figures of one number included."""

    @staticmethod
    def __new__(cls, raw: Tensor) -> Pretended:
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        return Tensor._make_wrapper_subclass(cls, raw.shape, **layout, device=DEVICE)  # type: ignore[attr-defined]

    def __init__(self, raw: Tensor) -> None:
        self.raw = raw

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pretended({self.raw!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched(func, args, kwargs or {})


def dispatched(func: Any, args: Any, kwargs: Any) -> Any:
    """The operation on the values; its results are on the device, unless it copies them from there."""
    name = func.name().split(".")[0]
    flat, layout = pytree.tree_flatten((args, kwargs))
    there = any(isinstance(a, Pretended) for a in flat)
    target = kwargs.get("device")
    on_device = there if target is None else torch.device(target).type == "pretend"
    strangers = [a for a in flat if isinstance(a, Tensor) and not isinstance(a, Pretended) and a.dim() > 0]
    if strangers and there and name not in COPIES:
        raise RuntimeError(f"{name} takes tensors of main memory and of the device")
    if name == "aten::copy_":
        source, on_device = args[1], isinstance(args[0], Pretended)
        Pretended.downloads += isinstance(source, Pretended) and not on_device
    elif there and (not on_device or name == "aten::_local_scalar_dense"):
        Pretended.downloads += 1
    cpu = torch.device("cpu")
    values = [a.raw if isinstance(a, Pretended) else cpu if isinstance(a, torch.device) else a for a in flat]
    raw_args, raw_kwargs = pytree.tree_unflatten(values, layout)
    out = func(*raw_args, **raw_kwargs)
    if func._schema.is_mutable:
        return kwargs.get("out", args[0] if isinstance(out, Tensor) else None)
    if not on_device:
        return out
    return pytree.tree_map(lambda t: Pretended(t) if isinstance(t, Tensor) else t, out)


class _Factories(TorchDispatchMode):
    """Makes tensors on the device, and copies tensors of main memory to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = (kwargs or {}).get("device")
        if target is not None and torch.device(target).type == "pretend":
            return dispatched(func, args, kwargs)
        return func(*args, **(kwargs or {}))


@contextmanager
def pretended() -> Iterator[None]:
    """In the block serial runs take the device for their GPU."""
    with (
        moves_modules(),
        _Factories(),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(run, "GPU", DEVICE),
        mock.patch.object(run, "memory_of", lambda device, _share: 0 if device == "cpu" else 10**9),
    ):
        yield


class Watched(SerialExecutor):
    """Counts what is copied, and the versions of weights that are to be copied."""

    def __init__(self, executor: SerialExecutor) -> None:
        self.__dict__.update(executor.__dict__)
        self.versions: list[str] = []
        self.uploads = 0
        self.copies_back: list[int] = []

    def run(self, chunks: Sequence[Chunk], weights: SharedWeights) -> Iterator[ChunkResult]:
        if chunks and self.versions[-1:] != [weights.version]:
            self.versions.append(weights.version)
        uploaded, brought_back = Worker.uploaded, execution._in_main_memory

        def counted_upload(worker: Worker, weights: Weights) -> Weights:
            self.uploads += worker.device.type == "pretend"
            return uploaded(worker, weights)

        def counted_copies(result: ChunkResult) -> ChunkResult:
            before = Pretended.downloads
            result = brought_back(result)
            self.copies_back.append(Pretended.downloads - before)
            return result

        with (
            mock.patch.object(Worker, "uploaded", counted_upload),
            mock.patch.object(execution, "_in_main_memory", counted_copies),
        ):
            yield from super().run(chunks, weights)


def main(shares: str, overrides: Sequence[str]) -> None:
    """Runs a configuration on the CPU and on the device."""
    _setup_privateuseone_for_python_backend("pretend")
    given, made = [*overrides, "executor.kind=serial"], list[Watched]()

    def watched(world: World) -> Watched:
        made.append(Watched(run.make_serial(world)))
        return made[-1]

    on_cpu = run.start_run(compose_config(given), run.make_serial)
    with pretended():
        on_device = run.start_run(compose_config([*given, f"tiers.num_gpus={shares}"]), watched)
    counts = {name: getattr(made[0], name) for name in ("versions", "uploads", "copies_back")}
    print(json.dumps({"runs": [on_cpu, on_device], **counts}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
