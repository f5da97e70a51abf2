"""A network passed as an object: one file holds its structure and weights, from which every process rebuilds it.

The file is safetensors: the tensors by their names in the network, and in its metadata the structure as JSON, which is
every module's class and attributes, as `pickle` would store them. But nothing in the file is executed or chooses code:
it may name torch.nn's modules and functions, and besides only what the configuration lists in `space.options.code`,
whose import paths are checked and whose sources are copied, as for all code of the user's own.

    fedloom run space.name=module space.build=fedloom.platform.spaces.as_is:stored space.options.path=net.safetensors
"""

import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedloom.platform.plugins import PluginError, imported
from fedloom.platform.settings import PATH
from fedloom.platform.words import said

BUILD = "fedloom.platform.spaces.as_is:stored"
"""The import path of `stored`, for `space.build`."""
STRUCTURE = "fedloom.structure"
_OF_TORCH = ("torch.nn.modules.", "torch.nn.functional:")
_CONTAINERS = {"list": list, "tuple": tuple, "set": set, "dict": dict, "OrderedDict": OrderedDict}


def stored(
    *,
    path: Annotated[str, PATH, "the network's file, as `packed` makes it"],
    code: Annotated[list[str] | None, "import paths of the user's own classes and functions in it"] = None,
) -> nn.Module:
    """The network in a file, with the weights that it was stored with, whatever the seed.

    Raises ValueError for a file that holds no such network, or that names code outside torch.nn and `code`.
    """
    try:
        with safe_open(Path(path).expanduser(), framework="pt") as file:
            structure = json.loads((file.metadata() or {})[STRUCTURE])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        return _Unpacked(structure, tensors, code or []).network()
    except PluginError:
        raise
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"space.options.path={path}: no network can be read from it ({said(error)})") from error


class _Unpacked:
    def __init__(self, structure: dict[str, Any], tensors: dict[str, Tensor], code: Sequence[str]) -> None:
        self._code = {*code}
        grad = structure["requires_grad"]
        self._tensors = {n: nn.Parameter(t, grad[n]) if n in grad else t for n, t in tensors.items()}
        self._states = structure["modules"]
        self._modules = {path: self._blank(cls) for path, (cls, _) in self._states.items()}

    def _blank(self, path: str) -> nn.Module:
        cls = self._named(path)
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ValueError(f"{path} is not a subclass of torch.nn.Module")
        return cls.__new__(cls)

    def _named(self, path: str) -> Any:
        if path in self._code:
            return imported("network", path)
        if not path.startswith(_OF_TORCH):
            raise ValueError(f"it names {path}, which is not in space.options.code")
        module, _, name = path.partition(":")
        code = getattr(sys.modules.get(module), name, None)
        # Names that these modules only import from elsewhere are refused.
        if import_path(code) != path:
            raise ValueError(f"it names {path}, which is no module or function of torch.nn")
        return code

    def network(self) -> nn.Module:
        for path, (_, state) in reversed(self._states.items()):  # children are complete before their parents
            self._modules[path].__setstate__(self._value(state))  # type: ignore[no-untyped-call]
        return self._modules[""]

    def _value(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind in ("dict", "OrderedDict"):
            return _CONTAINERS[kind]((self._value(k), self._value(v)) for k, v in content)
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](map(self._value, content))
        if kind == "dtype":
            return _dtype(content)
        known: dict[str, Any] = {"tensor": self._tensors, "module": self._modules}
        return self._named(content) if kind == "code" else known[kind][content]


def packed(network: nn.Module) -> tuple[bytes, list[str]]:
    """The content of a network's file, and the import paths of the code in it that is not torch.nn's.

    Raises ValueError for a network with an attribute that cannot be stored, such as a hook or an open file.
    """
    packing = _Packing(network)
    structure = {"modules": packing.modules(), "requires_grad": packing.requires_grad}
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in packing.tensors.items()}
    return save(tensors, {STRUCTURE: json.dumps(structure)}), sorted(packing.code)


class _Packing:
    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._paths = {id(module): path for path, module in network.named_modules()}
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self.requires_grad: dict[str, bool] = {}
        self.code: set[str] = set()

    def modules(self) -> dict[str, Any]:
        for prefix, module in self._network.named_modules():
            for name, tensor in {**module._parameters, **module._buffers}.items():
                if tensor is not None:
                    self._tensor(tensor, f"{prefix}.{name}".lstrip("."))
        return {
            path: (self._named(type(module), path), self._value(module.__getstate__(), path))
            for path, module in self._network.named_modules()
        }

    def _tensor(self, tensor: Tensor, where: str) -> str:
        if is_lazy(tensor):
            raise ValueError(f"its {where} has no shape yet: give sizes to its lazy layers")
        name = self._names.setdefault(id(tensor), where)
        self.tensors[name] = tensor
        if isinstance(tensor, nn.Parameter):
            self.requires_grad[name] = tensor.requires_grad
        return name

    def _value(self, value: Any, where: str) -> Any:
        inside = where or type(self._network).__name__
        if value is None or type(value) in (str, bool, int, float):
            return value
        if isinstance(value, np.generic):
            return self._value(value.item(), where)
        if isinstance(value, Tensor):
            return {"tensor": self._tensor(value, where)}
        if isinstance(value, nn.Module):
            if id(value) not in self._paths:
                raise ValueError(
                    f"its {inside} is no registered module: hold modules in an nn.ModuleList or nn.ModuleDict"
                )
            return {"module": self._paths[id(value)]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if type(value) in (dict, OrderedDict):
            items = [[self._value(k, where), self._value(v, f"{where}.{k}".lstrip("."))] for k, v in value.items()]
            return {type(value).__name__: items}
        if type(value) in (list, tuple, set, torch.Size):
            kind = next(name for name, of in _CONTAINERS.items() if isinstance(value, of))
            content = sorted(value, key=repr) if kind == "set" else value  # in the same order in every process
            return {kind: [self._value(each, f"{where}.{i}".lstrip(".")) for i, each in enumerate(content)]}
        if callable(value):
            return {"code": self._named(value, inside)}
        raise ValueError(f"its {inside} is {type(value).__name__}, which cannot be stored")

    def _named(self, code: Any, where: str) -> str:
        path = import_path(code)
        if path is None:
            what = getattr(code, "__qualname__", type(code).__name__)
            raise ValueError(f"its {where or 'class'} is {what}, which no other process can import")
        if not path.startswith(_OF_TORCH):
            self.code.add(path)
        return path


def import_path(code: Any) -> str | None:
    """`module:name` of a function or a class; None if it cannot be imported so, such as code of `__main__`."""
    name = getattr(code, "__name__", "")
    for module in ("torch.nn.functional", getattr(code, "__module__", None)):  # some of the former are built in
        if module not in (None, "__main__") and getattr(sys.modules.get(module), name, None) is code:
            return f"{module}:{name}"
    return None


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype
