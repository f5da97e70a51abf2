"""A device that exists on paper: work runs on fake tensors of it, which have shapes, types and a place but no values.

Every chunk of a run is executed once more as a GPU's actor would execute it, before it is executed in earnest. Torch
refuses what mixes devices, and a dispatch mode counts what a GPU would have to do: kernels, copies, and the points at
which the processor waits for it. Nothing is computed, so that figures are exact and a GPU is not needed; what depends
on values (which branch, how long) takes the branch of ones.

    PYTHONPATH=tests python -m tools.fake_device [NAME ...]     the table of these runs and presets, by default of all

The device is called `lazy:0`, a type of torch's that no build uses: fake tensors of it have gradients, those of `cuda`
need a driver for that.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.clients import training
from fedloom.platform.clients.assignments import Assignment
from fedloom.platform.clients.execution import Chunk, ChunkResult, SharedWeights, run_chunk
from fedloom.platform.clients.worker import Worker, WorkerSpec
from fedloom.platform.federation.algorithm import RunState
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.methods.registry import build_stages
from fedloom.platform.runs.run import start_run
from tools.frozen_runs import RUNS

DEVICE = "lazy:0"
ROOT = str(Path(__file__).parents[2])

FAMILIES = (
    *("fedoras", "superfednas", "spider", "scaffold"),
    *("fedpnas", "ditto", "knn_per", "depthfl", "fedavg_secure"),
    *("superfednas_shakespeare", "heterofl", "superfednas_vit", "pfedme", "splitmix", "feddf", "fedmask"),
    *("multi_stage", "fedmn", "fedavg_private", "fedoras_tasks", "milenas", "fednas", "per_fedavg", "local_adaptation"),
    *("global_nas", "zerofl", "feddyn", "ofa", "scalefl"),
)
"""Frozen runs that together have every kind of work; those of the last two rows have little that the others lack."""
PAPERS = {
    "fedoras_cifar10": 850,
    "fedoras_shakespeare": 3050,
    "superfednas_cifar10": 290,
    "superfednas_shakespeare_450": 270,
    "spider_cifar10": 3650,
    "ditto_cifar10": 320,
    "heterofl_cifar10": 370,
    "zerofl_cifar10": 400,
}
"""Presets in the papers' sizes, and the most kernels that a step of theirs may have."""
STEPS = 2
"""Steps of a client on the device: what is between two, as all are alike."""
NO_KERNEL = frozenset(
    {
        *(
            "device",
            "detach",
            "alias",
            "view",
            "_unsafe_view",
            "t",
            "transpose",
            "permute",
            "expand",
            "slice",
            "select",
        ),
        *("unsqueeze", "squeeze", "split", "split_with_sizes", "unbind", "as_strided", "chunk", "unfold", "narrow"),
        *("_reshape_alias", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh"),
        *(
            "diagonal",
            "is_same_size",
            "sym_size",
            "resize_",
            "set_",
            "_has_same_storage_numel",
            "size",
            "stride",
            "real",
        ),
    }
)
"""Operations that launch nothing on a GPU: they make views, or reserve memory."""
WAITS = frozenset({"item", "nonzero", "unique", "bincount", "copy from the device", "blocking copy to the device"})
"""What makes the processor wait until the GPU has done all that was queued."""


@dataclass
class Counts:
    """What a device was asked for: kernels by operation, and copies and waits by kind and line of fedloom's code."""

    kernels: Counter[str] = field(default_factory=Counter)
    events: Counter[tuple[str, str]] = field(default_factory=Counter)

    def minus(self, before: Counts) -> Counts:
        """What was added since `before`."""
        return Counts(self.kernels - before.kernels, self.events - before.events)

    def copy(self) -> Counts:
        """The counts so far."""
        return Counts(self.kernels.copy(), self.events.copy())

    def of(self, *kinds: str) -> dict[str, int]:
        """How often these kinds of events happened, by line."""
        lines: Counter[str] = Counter()
        for (kind, line), count in self.events.items():
            if kind in kinds:
                lines[f"{kind} at {line}"] += count
        return dict(lines)

    @property
    def waits(self) -> dict[str, int]:
        """How often the processor waited, by kind and line."""
        return self.of(*WAITS)

    @property
    def copies(self) -> int:
        """How many tensors were copied to the device, waited for or not."""
        return sum(self.of("copy to the device", "blocking copy to the device").values())


class _Counting(TorchDispatchMode):
    """Counts what the fake device is asked for, and answers what only values could."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def _note(self, kind: str) -> None:
        at = here = sys._getframe()  # a traceback would read the source of every line
        while at.f_back is not None and not _is_own(at.f_code.co_filename):
            at = at.f_back
        at = at if _is_own(at.f_code.co_filename) else here
        file = at.f_code.co_filename.removeprefix(f"{ROOT}/").removeprefix(".typing/fedloom/")
        self.counts.events[kind, f"{file}:{at.f_lineno}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        tensors = [t for t in _flat([*args, *kwargs.values()]) if isinstance(t, Tensor)]
        fake, on_device = any(isinstance(t, FakeTensor) for t in tensors), any(map(_on_device, tensors))
        target = kwargs.get("device")
        if not fake and (target is None or torch.device(target).type == "cpu"):
            with _disable_current_modes():
                return func(*args, **kwargs)
        answer = self._answer(name, args, kwargs, on_device) if fake else None
        if answer is not None:
            return answer
        out = func(*args, **kwargs)
        if name == "_to_copy" and _on_device(args[0]) != _on_device(out):
            waits = "" if kwargs.get("non_blocking", False) else "blocking "
            self._note(f"{waits}copy to the device" if _on_device(out) else "copy from the device")
        elif name == "copy_" and _on_device(args[0]) != _on_device(args[1]):
            waits = "" if (kwargs.get("non_blocking") or (len(args) > 2 and args[2])) else "blocking "
            self._note(f"{waits}copy to the device" if _on_device(args[0]) else "copy from the device")
        elif (on_device or _on_device(out)) and name not in NO_KERNEL:
            self.counts.kernels[name] += 1
        return out

    def _answer(self, name: str, args: Any, kwargs: Any, on_device: bool) -> Any:
        """The result of an operation whose result depends on values: ones, or a first index."""
        if name == "_local_scalar_dense":
            if on_device:
                self._note("item")
            return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        if name == "nonzero":
            if on_device:
                self._note("nonzero")
            return torch.zeros((1, args[0].dim()), dtype=torch.int64, device=args[0].device)
        if name == "index" and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1]):
            (mask,) = args[1]
            self._note("nonzero")
            return torch.zeros((1, *args[0].shape[mask.dim() :]), dtype=args[0].dtype, device=args[0].device)
        if name == "_unique2" and on_device:
            self._note("unique")
            one = torch.zeros((1,), dtype=args[0].dtype, device=DEVICE)
            return one, one.long(), one.long()
        if name == "bincount" and on_device:
            self._note("bincount")
            least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
            return torch.zeros((max(1, least),), dtype=torch.int64, device=DEVICE)
        return None


@cache
def _is_own(file: str) -> bool:
    return file.startswith(ROOT) and ".venv" not in file and Path(file).name != Path(__file__).name


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == torch.device(DEVICE).type


@dataclass
class Work:
    """What a chunk of one kind of work asked of the device.

    `steps` are the counts between two optimiser steps of the same client or stack, so that what happens once per
    client is in none of them.
    """

    stage: str
    task: str
    clients: int
    stack: int
    result: ChunkResult
    counts: Counts
    steps: list[Counts]

    @property
    def failures(self) -> list[str]:
        """The errors of its clients, with tracebacks."""
        return [f"{r.error}\n{r.traceback}" for r in self.result.client_results if r.status == "failed"]

    @property
    def fallbacks(self) -> list[str]:
        """Why clients were not trained in their stack."""
        return [r.fallback for r in self.result.client_results if r.fallback is not None]

    @property
    def sums_elsewhere(self) -> list[str]:
        """The tensors whose sums are not on the device."""
        sums: dict[str, Any] = getattr(self.result.sums, "tensors", {})
        return [name for name, tensor_sum in sums.items() if not _on_device(tensor_sum.total)]

    @property
    def kernels_per_step(self) -> int:
        """Kernels of a step, the median."""
        counts = sorted(sum(step.kernels.values()) for step in self.steps)
        return counts[len(counts) // 2] if counts else 0

    @property
    def waits_per_step(self) -> dict[str, int]:
        """Where the processor waits in every step, or in any."""
        return dict(sum((Counter(step.waits) for step in self.steps), Counter()))

    @property
    def waits_per_client(self) -> float:
        """How often the processor waits for the device, per client."""
        return sum(self.counts.waits.values()) / max(1, self.clients)


class FakeDevice:
    """An executor that runs the first chunk of every kind of work on the fake device, and a step of all in earnest."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.worker, self._spec = Worker(spec), spec
        self._fake: Worker | None = None
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.work: dict[tuple[str, str, bool, bool], Work] = {}

    def close(self) -> None:
        """Does nothing."""

    def run(self, chunks: Sequence[Chunk], weights: SharedWeights) -> Iterator[ChunkResult]:
        """Yields the results of the work in earnest."""
        for chunk in chunks:
            first = chunk.assignments[0]
            stage = first.stage.partition("/")[0]  # every tier's is alike
            kind = (stage, type(first.task).__name__, first.client_id is None, chunk.stack > 1)
            if kind not in self.work and not all(a.dropped for a in chunk.assignments):
                self.work[kind] = self.on_paper(chunk, weights)
            yield run_chunk(self.worker, _shortened(chunk, 1), weights)

    def on_paper(self, chunk: Chunk, weights: SharedWeights) -> Work:
        """What a chunk asks of the device, once its networks and data are there, in the first steps of each client."""
        warming, chunk = (_shortened(chunk, steps) for steps in (1, STEPS))
        counting, steps = _Counting(), list[Counts]()
        with _as_a_device(), self._mode, _marked_steps(counting, steps):
            if self._fake is None:
                self._fake = Worker(replace(self._spec, device=DEVICE, device_bytes=10**10))
            with counting:
                shared = SharedWeights(self._fake.uploaded(weights.tensors), weights.version)
                run_chunk(self._fake, warming, shared)  # builds networks, and uploads the data
                counting.counts, steps[:] = Counts(), []
                result = run_chunk(self._fake, chunk, shared)
        first, clients = chunk.assignments[0], sum(not a.dropped for a in chunk.assignments)
        return Work(first.stage, type(first.task).__name__, clients, chunk.stack, result, counting.counts, steps)


@contextmanager
def _marked_steps(counting: _Counting, steps: list[Counts]) -> Iterator[None]:
    """Writes down what was counted between two steps of one optimiser."""
    last: dict[training.Optimizer, Counts] = {}  # a method may step two in turn, such as a router's and its modules'
    step = training.Optimizer.step

    def marked(self: training.Optimizer) -> None:
        step(self)
        now = counting.counts.copy()
        if self in last:
            steps.append(now.minus(last[self]))
        last[self] = now

    training.Optimizer.step = marked  # type: ignore[method-assign]
    try:
        yield
    finally:
        training.Optimizer.step = step  # type: ignore[method-assign]


@contextmanager
def moves_modules() -> Iterator[None]:
    """What torch does for real devices and not for those that are written in Python: moving modules."""

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in self.children():
            child._apply(fn)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                with torch.no_grad():
                    moved = fn(parameter)
                self._parameters[name] = nn.Parameter(moved, parameter.requires_grad)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    real = nn.Module._apply
    nn.Module._apply = apply  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module._apply = real  # type: ignore[method-assign]


@contextmanager
def _as_a_device() -> Iterator[None]:
    """What torch does for real devices and not for fake ones: moving modules, and arrays of what was copied."""

    def numpy(self: FakeTensor) -> np.ndarray:
        assert not _on_device(self), "arrays are made of what is in main memory"
        return np.zeros(tuple(self.shape), dtype=str(self.dtype).split(".")[1])

    FakeTensor.numpy = numpy  # type: ignore[method-assign, assignment]
    try:
        with moves_modules():
            yield
    finally:
        del FakeTensor.numpy


def _shortened(chunk: Chunk, steps: int) -> Chunk:
    def shortened(assignment: Assignment) -> Assignment:
        task: Any = assignment.task
        if not hasattr(task, "local"):
            return assignment
        return replace(assignment, task=replace(task, local=replace(task.local, steps=steps)))

    return replace(chunk, assignments=tuple(map(shortened, chunk.assignments)))


def family(name: str, *overrides: str) -> RunConfig:
    """A frozen run whose clients make several steps each, of few rounds and layers."""
    several = ["executor.kind=serial", "method.train.batch_size=4"]
    several += ["data.partition=iid"] if name == "superfednas_shakespeare" else []
    one_round = ("fed", "scaffold", "heterofl", "knn", "ditto", "spider")
    several += [f"method.train.rounds={2 if name == 'fedmn' else 1}"] if name.startswith(one_round) else []
    several += ["space.stage_layers=[1,2]"] if name.startswith(("fedoras", "fedavg", "scaffold")) else []
    if name.startswith("fedoras"):
        several += ["method.finetune.rounds=1", "method.rand_init.rounds=1", "method.search.budget=4"]
        several += ["method.search.population=3", "method.search.offspring=1"]
        several += [f"method.{part}.clients_per_round={n}" for part, n in (("train", 4), ("finetune", 2))]
    return compose_config([*RUNS[name], *several, *overrides])


def work_of(config: RunConfig) -> list[Work]:
    """Runs a configuration on the CPU; returns what each kind of its work would have asked of a device."""
    made: list[FakeDevice] = []

    def make(world: World) -> FakeDevice:
        made.append(FakeDevice(world.spec))
        return made[-1]

    start_run(config, make)
    return [work for device in made for work in device.work.values()]


def first_work_of(config: RunConfig) -> Work:
    """What the first client of a run would ask of a device in its first steps, for runs that are too large to run."""
    world = build_world(config)
    stage = build_stages(world)[0]
    state = stage.begin(RunState())
    plan = stage.plan(state)
    first = next(a for a in plan.assignments if a.client_id is not None and not a.dropped)
    device = FakeDevice(world.spec)
    return device.on_paper(Chunk(first.tier, (first,)), SharedWeights(state.weights(plan.group), "first"))


def main(names: Sequence[str]) -> None:
    """Prints what the first training of each run or preset asks of a device."""
    print("| run | kernels per step | waits per step | waits per client | copies per client |")
    print("|---|---|---|---|---|")
    for name in names or (*FAMILIES, *PAPERS):
        with TemporaryDirectory() as results:
            if name in PAPERS:
                first = first_work_of(compose_config([f"experiment={name}"]))
            else:
                first = next(work for work in work_of(family(name, f"results={results}")) if work.steps)
        waits = sum(first.waits_per_step.values()) / len(first.steps)
        copies = first.counts.copies / first.clients
        print(
            f"| {name} | {first.kernels_per_step} | {waits:g} | {first.waits_per_client:g} | {copies:g} |", flush=True
        )


if __name__ == "__main__":
    main(sys.argv[1:])
