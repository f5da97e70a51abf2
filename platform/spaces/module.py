"""A space with a user's network, unchanged: `space.name=module space.build=my_net:build`.

`build(input_shape, num_classes)` or `build()` returns any `nn.Module`; `space.options` sets its keyword-only
parameters. Training starts from the module's own weights. Parameters that require a gradient are trained and sent, and
buffers are sent too. All other tensors, such as a frozen backbone, are constants: every process gets them from its own
call of `build`, holds them once, and never sends them.
"""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedloom.platform.data.dataset import Dataset
from fedloom.platform.data.trees import Tree
from fedloom.platform.plugins import NOT_CAUGHT, PluginError, an, blaming, imported, in_one_line, nearest, place_of
from fedloom.platform.spaces.base import FixedSpace, Measure, SearchSpace, once, travelling
from fedloom.platform.spaces.slices import Architecture, Slice, SliceMap, bytes_of
from fedloom.platform.spaces.space_config import SpaceConfig, Spaces, weight_files
from fedloom.platform.words import said
from fedloom.tiers.costs import CostTable

CONSTANTS_SEED = 0
"""The seed of torch's generator for the network that provides the constants, the same in all runs."""


@dataclass
class FittedConfig(SpaceConfig):
    """The configuration of a network with several inputs, whose shapes come from the data set."""

    input_shapes: Mapping[str, tuple[int, ...]] | None = None


class WithConstants(SearchSpace):
    """A space of networks with constants: tensors never trained or sent, which all networks of a process share.

    Parameters that require a gradient are trained and sent; buffers are sent too.
    """

    stacks = False  # a user's `forward` may not work on a batch of clients
    config: SpaceConfig
    batch: Tree | None = None
    """The batch on whose first sample costs are measured; None (zeros of the input shape) until the data are known."""

    @abstractmethod
    def largest_network(self, seed: int) -> nn.Module: ...

    def _blame(self) -> str:
        """The network and the place where it is built, for messages."""
        path = self.config.build
        return f"network {path!r}{place_of(imported('network', path))}" if path else f"the network of space {self.name}"

    @cached_property
    def _template(self) -> nn.Module:
        """The network with its constants, from which copies are made; it is never trained itself."""
        with torch.device("cpu"):  # even if the first call is made while building on the meta device
            return self.largest_network(CONSTANTS_SEED)

    @property
    def keeps_statistics(self) -> bool:
        """False: all subnets share the statistics of one network."""
        return False

    @property
    def slices_tensors(self) -> bool:
        """True, so that stand-alone modules score it: a supernet would hold the constants a second time."""
        return True

    def _copy(self) -> nn.Module:
        """A copy of the template on the default device that shares the process's constants; all else is NaN."""
        device = torch.get_default_device()
        held = once(self, f"constants on {device}", lambda _: self._constants_on(device))
        module = copy.deepcopy(self._template, dict(held)).to(device)
        with torch.no_grad():
            for tensor in travelling(module).values():
                tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        module.register_forward_pre_hook(_by_name, with_kwargs=True)
        return module

    def _constants_on(self, device: torch.device) -> dict[int, nn.Parameter]:
        constants = _constants(self._template).values()
        return {id(t): nn.Parameter(t.detach().to(device), requires_grad=False) for t in constants}

    def tried(self, x: Tree, y: Tree | None) -> Any:
        """The network's outputs for a batch of the data, with gradients; `y` is None if they may have any shape.

        Raises PluginError, with the line of the user's code, for a network that fails (naming the layer and its
        inputs), has nothing to train or a complex tensor, or returns logits that are not (B, classes) for labels (B,),
        or (B, classes, T) for labels (B, T).
        """
        self.batch, module = x, self.build_subnet(tuple(count - 1 for count in self.options))
        module.load_state_dict(self.initial_weights(torch.Generator().manual_seed(0)), strict=False)
        if not self.parameter_names:
            raise PluginError(f"{self._blame()} has no parameter that needs a gradient: there is nothing to train")
        of_complex = next((name for name, tensor in travelling(module).items() if tensor.is_complex()), None)
        if of_complex is not None:
            raise PluginError(
                f"{self._blame()}: its {of_complex} is complex, and only real numbers are averaged: hold its real and "
                "imaginary parts, as torch.view_as_real gives them"
            )
        entered = _followed(module.train())
        try:
            with torch.random.fork_rng(devices=[]):
                outputs = self._outputs(module, x)
        except NOT_CAUGHT:
            raise
        except BaseException as error:
            raise PluginError(f"{self._blame()} fails{entered[-1]}: {in_one_line(error)}") from error
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else outputs
        if isinstance(logits, Tensor) and isinstance(y, Tensor):
            expected = (len(y), self.config.num_classes, *y.shape[1:])
            if tuple(logits.shape) != expected:
                raise PluginError(
                    f"{self._blame()} gives {tuple(logits.shape)} for labels {tuple(y.shape)} of "
                    f"{self.config.num_classes} classes: expected {expected}"
                )
        if isinstance(logits, Tensor) and not logits.requires_grad:
            raise PluginError(f"{self._blame()}: its outputs depend on no parameter that needs a gradient")
        return outputs

    def _outputs(self, module: nn.Module, x: Tree) -> Any:
        """The outputs of the largest network."""
        return module(x)

    # -- tensors ----------------------------------------------------------------------------------------------------

    @property
    def parameter_names(self) -> frozenset[str]:
        return frozenset(name for name, p in self._template.named_parameters() if p.requires_grad)

    @cached_property
    def constants_hash(self) -> str:
        """SHA-256 (hex) of the constants; empty if there are none."""
        constants = _constants(self._template)
        digest = sha256()
        for name, tensor in constants.items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest() if constants else ""

    def initial_weights(self, generator: torch.Generator) -> dict[str, Tensor]:
        """The exchanged tensors of a network that is built with this generator's seed."""
        with torch.device("cpu"):
            module = self.largest_network(generator.initial_seed() % 2**63)
        return {name: tensor.detach().clone() for name, tensor in travelling(module).items()}

    # -- costs ------------------------------------------------------------------------------------------------------

    def _measured(self, measure: Measure, module: nn.Module) -> float:
        """The cost of a whole network; bytes count only the exchanged tensors."""
        if measure.name == "bytes":
            return float(bytes_of(travelling(module)))
        module = copy.deepcopy(module).eval()
        module.register_forward_pre_hook(_by_name, with_kwargs=True)
        return float(measure.of(module, self._batch()))

    def _batch(self) -> Any:
        if self.batch is not None:
            return self.batch
        shapes: Any = self.input_shape
        if isinstance(shapes, Mapping):
            return {name: torch.zeros((1, *shape)) for name, shape in shapes.items()}
        return torch.zeros((1, *shapes), dtype=self.input_dtype)


class ModuleSpace(WithConstants, FixedSpace):
    """A user's network as a space of one architecture, `(0,)`: `forward(x)`, or `forward(**x)` for named inputs."""

    def __init__(self, config: SpaceConfig) -> None:
        self.config, self.name, self.options = config, config.name, (1,)

    @property
    def input_shape(self) -> Any:  # type: ignore[override]  # shapes by name for several inputs
        """The shape of one sample; ValueError if neither the configuration nor the data set gives it."""
        if isinstance(self.config, FittedConfig) and self.config.input_shapes:
            return dict(self.config.input_shapes)
        if self.config.input_shape is None:
            raise ValueError("space.input_shape is not known without the data: give the shape of one sample")
        return tuple(self.config.input_shape)

    def fitted(self, config: SpaceConfig, dataset: Dataset) -> tuple[ModuleSpace, SpaceConfig]:
        """The space with a data set's number of classes, and its shapes where the configuration leaves them open."""
        shapes = dataset.input_shape
        if isinstance(shapes, Mapping):
            config = FittedConfig(**vars(config), input_shapes=shapes)
        elif config.input_shape is None:
            config = replace(config, input_shape=list(shapes))
        config = replace(config, num_classes=dataset.num_classes)
        return ModuleSpace(config), config

    def largest_network(self, seed: int) -> nn.Module:
        """The module that the user's function returns with torch's generator at this seed.

        Raises PluginError if it returns no module, one that torch.jit has compiled, or one whose lazy layers have no
        shapes yet.
        """
        path = self.config.build or ""
        with torch.random.fork_rng(devices=[]), blaming("network", path):
            build = imported("network", path)
            if isinstance(build, nn.Module):
                raise PluginError(f"network {path!r} is {an(type(build).__name__)}: name a function that builds it")
            # Set after the import, which may draw random numbers, but only in the first call.
            torch.default_generator.manual_seed(seed)
            arguments = (self.input_shape, self.config.num_classes) if _takes_arguments(build) else ()
            made = build(*arguments, **self.config.options)
        if not isinstance(made, nn.Module):
            raise PluginError(f"{self._blame()} gives {an(type(made).__name__)}: give a torch.nn.Module")
        if any(isinstance(part, torch.jit.ScriptModule) for part in made.modules()):  # they take no hooks
            raise PluginError(
                f"{self._blame()} is compiled by torch.jit, in whole or in part: give the torch.nn.Module without it"
            )
        lazy = [name for name, tensor in (*made.named_parameters(), *made.named_buffers()) if is_lazy(tensor)]
        if lazy:
            raise PluginError(f"{self._blame()}: {lazy[0]} has no shape yet: give sizes to its lazy layers")
        if self.config.weights is not None:
            load_stored(made, Path(self.config.weights).expanduser(), self.config.weights_names or {})
        return made

    def build_subnet(self, architecture: Architecture) -> nn.Module:
        """The network, whose trained tensors are NaN until weights are loaded."""
        self.validate(architecture)
        return self._copy()

    def build_supernet(self) -> nn.Module:
        """The same, called with `(x, architecture)`."""
        return self.build_subnet((0,))

    def initial_subnet_weights(self, architecture: Architecture, generator: torch.Generator) -> dict[str, Tensor]:
        self.validate(architecture)
        return self.initial_weights(generator)

    def slices(self, architecture: Architecture) -> SliceMap:
        """All exchanged tensors, each as a whole."""
        self.validate(architecture)
        return {name: Slice(name) for name in travelling(self._template)}

    def _table_of(self, measure: Measure) -> CostTable:
        return measure.table(self._measured(measure, self._template), [[0.0]])


def load_stored(module: nn.Module, file: Path, names: Mapping[str, str]) -> None:
    """Copies a file's tensors into a network; `names` maps prefixes of their names, of which the longest match counts.

    The file is safetensors, or the JSON index of several, as Hugging Face writes them. Tensors of the network that are
    not in the file keep their values. Raises ValueError for a file that cannot be read, and for a tensor that the
    network lacks or has with another shape.
    """
    try:
        stored = {name: t for part in weight_files(file) for name, t in load_file(file.parent / part).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ValueError(f"space.weights={file}: no safetensors can be read from it ({said(error)})") from error
    tensors = module.state_dict(keep_vars=True)
    for stored_name, tensor in stored.items():
        old = max((name for name in names if stored_name.startswith(name)), key=len, default="")
        name = names.get(old, "") + stored_name[len(old) :]
        if name not in tensors or tensors[name].shape != tensor.shape:
            known = tensors.get(name)
            has = f"none{nearest(name, [*tensors])}" if known is None else f"it as {tuple(known.shape)}"
            raise ValueError(
                f"space.weights={file}: its {stored_name} is {tuple(tensor.shape)}, the network has {has}; "
                "space.weights_names maps beginnings of names"
            )
        with torch.no_grad():
            tensors[name].copy_(tensor)


def _constants(module: nn.Module) -> dict[str, Tensor]:
    """The constants, which are neither trained nor sent: parameters that require no gradient."""
    return {name: p for name, p in module.named_parameters() if not p.requires_grad}


def _followed(module: nn.Module) -> list[str]:
    """The layers that a forward pass is inside, outermost first: ` in its layer NAME, TYPE(...), which gets SHAPES`."""
    entered = [""]  # the network itself: its line of code says more

    def enter(name: str, layer: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        arguments = [*inputs, *options.values()]
        shapes = ", ".join(str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in arguments)
        entered.append(f" in its layer {name}, {type(layer).__name__}({layer.extra_repr()}), which gets {shapes}")

    def leave(*_: Any) -> None:
        entered.pop()

    for name, layer in module.named_modules():
        if name:
            layer.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
            layer.register_forward_hook(leave)
    return entered


def _by_name(_module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
    """Maps a batch, or a batch and an architecture, to the arguments of the user's `forward`."""
    x = inputs[0] if inputs else {}
    return ((), {**x, **options}) if isinstance(x, Mapping) else ((x,), options)


def _takes_arguments(build: Any) -> bool:
    parameters = inspect.signature(build).parameters.values()
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def from_config(config: SpaceConfig) -> ModuleSpace:
    """The space of a user's network.

    Raises ValueError if no network is named, or for a value that belongs to other spaces.
    """
    if config.build is None:
        raise ValueError("space.name=module needs space.build=my_net:build, which gives the network")
    known = ("build", "weights", "weights_names", "num_classes", "input_shape", "options")
    for name, value in vars(config).items():
        if name not in ("name", "lora", "input_shapes", *known) and value not in (None, {}):
            raise ValueError(f"space module has no {name}; it has {', '.join(known)}: leave it out, or give null")
    return ModuleSpace(config)


SPACES: Spaces = {"module": from_config}
