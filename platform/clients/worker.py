"""A worker: the space, the data and the re-used modules of a process that executes assignments. Independent of Ray."""

import platform
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedloom.platform.clients.device import (
    Kernels,
    check_device,
    compiled,
    is_out_of_memory,
    overflows_channels_last,
    set_up_process,
)
from fedloom.platform.clients.objectives import CLASSIFICATION, OBJECTIVES, Objective
from fedloom.platform.clients.training import Outputs, Samples
from fedloom.platform.data.dataset import StoredSamples
from fedloom.platform.data.federated import FederatedData
from fedloom.platform.data.on_device import moved
from fedloom.platform.data.source import LabelSet
from fedloom.platform.data.trees import Tree, rows_of, single
from fedloom.platform.plugins import ComponentSpec, in_one_line
from fedloom.platform.seeding import stream
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.capabilities import with_tasks
from fedloom.platform.spaces.initialisation import draws_randomly, is_of_others
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import Architecture, SliceMap, Subspace, Weights
from fedloom.platform.spaces.space_config import SpaceConfig
from fedloom.tiers.costs import CostTable

SUBNETS_KEPT = 8
"""Number of stand-alone modules kept for re-use: a client trains one, a final evaluation scores many in turn."""

DATA_SHARE = 0.25
"""The largest share of a worker's GPU memory that the prepared data may occupy permanently; training uses the rest."""

AnySamples = TypeVar("AnySamples", Samples, StoredSamples)


@dataclass(frozen=True)
class WorkerSpec:
    """Plain data from which any process builds an identical worker.

    `cost_table` is in the measure of the budgets, `macs_table` counts the MACs of the rows. `training_seed` is the root
    of the clients' random streams.
    """

    space: SpaceConfig
    dataset_path: str
    partition_path: str
    training_seed: int
    cost_table: CostTable
    macs_table: CostTable
    threads: int = 1
    precision: str = "float32"
    memory_format: str = "auto"
    deterministic: bool = False
    compile: bool = False
    objective: ComponentSpec = CLASSIFICATION
    label_sets: tuple[LabelSet, ...] = ()
    """The classes of every task; empty for one task with the data set's classes."""
    device: str = "cpu"
    device_bytes: int = 0
    """The memory of a GPU that the worker may use."""
    node: str = ""
    """The name of the worker's node; empty for the host name."""
    plugins: tuple[str, ...] = ()
    """The modules of the user's code that the configuration names."""
    constants: str = ""
    """The hash of the server's constants (`SearchSpace.constants_hash`)."""
    torch: str = ""
    """The server's version of torch, if other processes must have the same one."""


class Worker:
    """Executes assignments one after the other with one supernet module and a few subnet modules, all re-used."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        set_up_process(spec.precision, deterministic=spec.deterministic)
        self.device = torch.device(spec.device)
        self.node = spec.node or platform.node()
        self._subnets: OrderedDict[Architecture, nn.Module] = OrderedDict()
        self._tensors = WeakKeyDictionary[nn.Module, dict[str, Tensor]]()
        self._draws = WeakKeyDictionary[nn.Module, bool]()
        self._loaded: object = None
        self.calibration: Tree | None = None
        self._statistics: tuple[str, dict[Architecture, dict[str, Tensor]]] | None = None
        self._label_maps: dict[int, Tensor] = {}
        self._compiled: dict[nn.Module, dict[int, Callable[[Tensor], Tensor] | str]] = {}
        self.not_compiled: str | None = None
        """Why the current client's network is not compiled, although the run asks for it."""

    @cached_property
    def objective(self) -> Objective:
        """The objective of training and evaluation."""
        return OBJECTIVES.make(self.spec.objective)

    @cached_property
    def space(self) -> SearchSpace:
        """The search space; ValueError if its constants differ from the server's."""
        space = build_space(self.spec.space)
        if space.constants_hash != self.spec.constants:
            raise ValueError(
                f"node {self.node} builds other constants than the server: space.build, and the files that it reads, "
                "have to give the same everywhere"
            )
        return space

    @cached_property
    def kernels(self) -> Kernels:
        """The precision and the memory format in which this worker's networks compute."""
        wanted = self.spec.memory_format
        last = self.space.channels_last if wanted == "auto" else wanted == "channels_last"
        if last and self.device.type == "cpu":
            narrow = partial(self.space.build_subnet, (0,) * len(self.space.options))
            last = not (overflows_channels_last(self.space.build_supernet) or overflows_channels_last(narrow))
        return Kernels(self.spec.precision, channels_last=last)

    @cached_property
    def data(self) -> FederatedData:
        """The federated data set, memory-mapped or uploaded once; ValueError if it is missing on this node."""
        missing = self.missing_data()
        if missing is not None:
            raise ValueError(missing)
        data = FederatedData.open(Path(self.spec.dataset_path), Path(self.spec.partition_path))
        if self.device.type == "cpu":
            return data
        return data.on(self.device, int(DATA_SHARE * self.spec.device_bytes))

    def missing_data(self) -> str | None:
        """An error message for the first prepared folder that is missing on this node, None if there is none."""
        for folder in (self.spec.dataset_path, self.spec.partition_path):
            if not Path(folder).is_dir():
                return (
                    f"node {self.node} does not have {folder}: let data.cache be a folder that all nodes share, or run "
                    "`fedloom prepare` for this experiment on every node"
                )
        return None

    @cached_property
    def supernet(self) -> nn.Module:
        """The supernet module; its tensors hold the weights that were loaded last."""
        return self.kernels.prepared(self.space.build_supernet(), self.device)

    def subnet(self, architecture: Architecture) -> nn.Module:
        """A stand-alone module of the architecture, built at first use and then re-used."""
        if architecture not in self._subnets:
            with self.device:  # on which the process holds the constants once for all modules
                built = self.space.build_subnet(architecture)
            self._subnets[architecture] = self.kernels.prepared(built, self.device)
            if len(self._subnets) > SUBNETS_KEPT:
                self._compiled.pop(self._subnets.popitem(last=False)[1], None)
        self._subnets.move_to_end(architecture)
        return self._subnets[architecture]

    def tensors_of(self, module: nn.Module) -> dict[str, Tensor]:
        """Parameters and buffers of a module by name (cached), without its constants."""
        if module not in self._tensors:
            parameters = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
            self._tensors[module] = {**parameters, **dict(module.named_buffers())}
        return self._tensors[module]

    def constants_of(self, module: nn.Module) -> dict[str, Tensor]:
        """The parameters of a module that are neither trained nor sent."""
        return {name: tensor for name, tensor in module.named_parameters() if name not in self.tensors_of(module)}

    def randomness(self, module: nn.Module, generator: torch.Generator) -> AbstractContextManager[None]:
        """A context in which a module's dropout and noise depend only on the generator's seed."""
        if module not in self._draws:
            self._draws[module] = any(draws_randomly(part) or is_of_others(part) for part in module.modules())
        return own_randomness(generator, self.device) if self._draws[module] else nullcontext()

    def training_forward(self, module: nn.Module, x: Tree, batch_size: int) -> Callable[[Any], Outputs]:
        """The forward pass for training on samples (n, ...), compiled for batches of this size if the run asks for it.

        Compiling changes the module's gradients and running statistics. A module that cannot be compiled runs
        uncompiled, and `not_compiled` says why.
        """
        if not self.spec.compile or rows_of(x) < batch_size:
            return module
        if not isinstance(x, Tensor):
            self.not_compiled = "not compiled: its inputs are several tensors"
            return module
        sizes = self._compiled.setdefault(module, {})
        if batch_size not in sizes:
            sizes[batch_size] = self._tried(module, x[:batch_size])
        forward = sizes[batch_size]
        if isinstance(forward, str):
            self.not_compiled = forward
            return module
        return forward

    def _tried(self, module: nn.Module, x_B: Tensor) -> Callable[[Tensor], Tensor] | str:
        """The compiled forward pass, or why there is none."""
        if any(draws_randomly(part) for part in module.modules()):
            return "not compiled: its layers would draw different random numbers"
        self.set_mode(module, training=True)
        try:
            return compiled(module, x_B)
        except RuntimeError as error:
            check_device(error)
            if is_out_of_memory(error):
                raise
            return f"not compiled: {in_one_line(error)}"

    @staticmethod
    def set_mode(module: nn.Module, training: bool) -> None:
        """Sets the mode only when it changes, because a supernet has about a thousand submodules to visit."""
        if module.training != training:
            module.train(training)

    @torch.no_grad()
    def load(self, module: nn.Module, weights: Weights, slices: SliceMap) -> dict[str, Tensor]:
        """Copies the slices of the shared weights into the module and returns the module's loaded tensors by name."""
        if module is self.__dict__.get("supernet"):  # if it has been built
            self._loaded = None
        tensors = self.tensors_of(module)
        loaded = {name: tensors[name] for name in slices}
        received = moved({name: piece.of(weights[piece.source]) for name, piece in slices.items()}, self.device)
        torch._foreach_copy_(list(loaded.values()), list(received.values()))
        return loaded

    def uploaded(self, weights: Weights) -> Weights:
        """The shared weights on the worker's device, where the slices of all clients are cut from them."""
        return moved(weights, self.device)

    def load_whole(self, weights: Weights, version: object) -> nn.Module:
        """The supernet module with all shared weights, copied only when `version` changes."""
        if self._loaded != version or version is None:
            tensors = self.tensors_of(self.supernet)
            with torch.no_grad():
                for name, tensor in tensors.items():
                    tensor.copy_(weights[name])
            self._loaded = version
        return self.supernet

    def in_task(self, data: AnySamples, options: Architecture | Subspace) -> AnySamples:
        """The samples with their labels mapped to the classes of the task that the options belong to."""
        if not self.spec.label_sets:
            return data
        task = self._task(options)
        if task not in self._label_maps:
            self._label_maps[task] = torch.tensor(self.spec.label_sets[task].of, device=self.device)
        if isinstance(data, StoredSamples):
            return replace(data, label_map=self._label_maps[task])
        return data[0], self._label_maps[task][single(data[1], "a federation of several tasks")]

    def class_names(self, options: Architecture) -> tuple[str, ...]:
        """The names of an architecture's outputs: classes, or the tokens of a text."""
        if not self.spec.label_sets:
            return self.data.dataset.class_names
        return self.spec.label_sets[self._task(options)].names

    def _task(self, options: Architecture | Subspace) -> int:
        return with_tasks(self.space, "tiers.tasks").task_of(options)

    def client_data(self, client_id: int, split: str) -> Samples:
        """One client's samples on the device."""
        return self.data.client(client_id, split)

    def expect(self, splits_of_clients: Iterable[tuple[int, Sequence[str]]]) -> None:
        """Prefetches the samples that clients train on next, once the data are open; see `FederatedData.expect`."""
        data: FederatedData | None = self.__dict__.get("data")
        if data is not None:
            data.expect(splits_of_clients)

    def statistics_of(self, version: str) -> dict[Architecture, dict[str, Tensor]]:
        """The running statistics of subnets with this version of the weights; those of other versions are dropped."""
        if self._statistics is None or self._statistics[0] != version:
            self._statistics = (version, {})
        return self._statistics[1]

    def central_data(self, split: str, share: float = 1.0) -> StoredSamples:
        """The server's samples of a split, the same at every call."""
        rng = stream(self.spec.training_seed, "central_data", split)
        return self.data.central(split, share=share, rng=rng)

    def scored_data(self, client_id: int | None, split: str, share: float = 1.0) -> StoredSamples:
        """The samples to score on: one client's of a split, or a share of the server's if `client_id` is None."""
        return self.central_data(split, share) if client_id is None else self.data.stored(client_id, split)


@contextmanager
def own_randomness(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Seeds torch's global generators, which dropout draws from, with `generator`'s seed; restores them on exit."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # `torch.manual_seed` also seeds unused devices, and formats the call stack for each: 0.7 ms per client.
        torch.default_generator.manual_seed(generator.initial_seed())
        if device.type == "cuda":
            torch.cuda.manual_seed(generator.initial_seed())
        yield
