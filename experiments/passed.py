"""Python objects passed in place of names: code, objects, networks and data sets become plain configuration values.

- A function or class becomes `module:name`, which other processes import from the same place as this one.
- An object that is a variable of a module becomes `module:name`, too; any other object, or a `functools.partial`,
  becomes its class or function with its options.
- A network becomes a file of its structure and weights (see `as_is`), a data set a file of its arrays (see `npz`). The
  files lie in the folder `passed` of the results and are named by the hash of their content, so that other data make
  another configuration.

Code that no other process can import (a lambda, or what a notebook cell or a script defines) is refused.
"""

import functools
import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fedloom.platform.data.arrays import Arrays, named
from fedloom.platform.data.artefact import AnyArray
from fedloom.platform.plugins import keyword_options
from fedloom.platform.results.files import publish, temporary_path
from fedloom.platform.results.store import local_root
from fedloom.platform.runs.source_code import PluginSources
from fedloom.platform.spaces.as_is import BUILD, import_path, packed
from fedloom.platform.words import said, shown

FOLDER = "passed"
"""The folder in the results that holds the files."""
INTO_A_FILE = "into a file (in a notebook by a cell that begins with %%writefile my_code.py) and import it"
_SPACE = ("space", "space.name", "space.build")
_DATA = ("data", "data.dataset")
_DIGITS = 16


@contextmanager
def names_in(changes: Mapping[str, Any]) -> Iterator["Names"]:
    """Names for the values passed in these configuration changes.

    Files are written when a name is requested, and removed again if the block raises ValueError, which refuses the run.
    """
    flat = dict(_flat(changes))
    names = Names(flat, local_root(str(flat.get("results", "results"))) / FOLDER)
    try:
        yield names
    except ValueError:
        names.remove()
        raise


def check_current(sources: PluginSources) -> None:
    """Raises ValueError for one of the user's own modules whose file has changed since this process imported it.

    Workers would import, and the run would store, the new version.
    """
    for name, file in sources.files.items():
        module = sys.modules.get(name)
        # Other loaders, such as pytest's, compile something else than the file.
        if type(getattr(getattr(module, "__spec__", None), "loader", None)) is not SourceFileLoader:
            continue
        compiled = {*_code_in(compile(file.read_bytes(), str(file), "exec", dont_inherit=True))}
        functions = [f for v in vars(module).values() for f in (vars(v).values() if inspect.isclass(v) else [v])]
        for function in filter(inspect.isfunction, functions):
            of_file = function.__module__ == name and Path(function.__code__.co_filename).resolve() == file
            if of_file and function.__code__ not in compiled:
                raise ValueError(
                    f"{file} has changed since it was imported here: importlib.reload({name}), import it again, "
                    "or restart Python"
                )


def _code_in(code: Any) -> Iterator[Any]:
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _code_in(constant)


def _flat(changes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in changes.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def is_plain(value: Any) -> bool:
    """Whether a configuration can hold the value as it is: None, text, a number, an array, a path, or nested ones."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, Mapping):
        return all(map(is_plain, value.values()))
    return value is None or isinstance(value, str | bool | int | float | np.generic | np.ndarray | os.PathLike)


class Names:
    """Plain values for passed ones, by dotted key: code gets names; networks and data sets, files in `folder`."""

    def __init__(self, flat: Mapping[str, Any], folder: Path) -> None:
        self._flat, self._folder = flat, folder
        self._has_space = isinstance(flat.get("space.name"), str)
        self._written: list[Path] = []

    @property
    def values(self) -> dict[str, Any]:
        """The plain configuration values by dotted key; ValueError, with advice, for an object without a name."""
        return _together(self.of(key, value) for key, value in self._flat.items())

    def of(self, key: str, value: Any) -> dict[str, Any]:
        """The keys and plain values that replace the value of a key, or of a group of keys."""
        if isinstance(value, Mapping) and value:
            return _together(self.of(inner, each) for inner, each in _flat(value, f"{key}." if key else ""))
        if key == "method.name":  # as in a run's configuration
            key = "method"
        if key in _DATA and (arrays := _arrays(key, value)) is not None:
            return {"data.dataset": "npz", "data.options.path": self._stored_arrays(arrays, _kind(value))}
        if is_plain(value):
            return {key: value}
        if isinstance(value, nn.Module):
            return self._network(key, value)
        if isinstance(value, list | tuple):  # such as processors
            parts = [("", {}) if is_plain(each) else _code(key, each) for each in value]
            names = [name or each for (name, _), each in zip(parts, value, strict=True)]
            options_of_parts = ({f"{_options(key)}.{n}": v for n, v in options.items()} for _, options in parts)
            return _together([{key: names}, *options_of_parts])
        if key == "data":
            key = "data.dataset"
        name, options = _code(key, value)
        code = value.func if isinstance(value, functools.partial) else value
        if key in _SPACE and (key == "space.build" or (inspect.isclass(code) and issubclass(code, nn.Module))):
            return {**self._of_module_space(name), **{f"space.options.{n}": v for n, v in options.items()}}
        if key == "space":
            raise ValueError(f"space={name}: give space={{'build': ...}} for a network, or {{'name': ...}} for a space")
        return {key: name, **{f"{_options(key)}.{n}": v for n, v in options.items()}}

    def keep(self) -> None:
        """Keeps the files even if the block fails, because something that needs them has begun."""
        self._written.clear()

    def remove(self) -> None:
        """Removes the files that this object wrote, and folders that are then empty."""
        for file in self._written:
            file.unlink(missing_ok=True)
        for folder in (self._folder, self._folder.parent) if self._written else ():
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _of_module_space(self, build: str) -> dict[str, Any]:
        return {**({} if self._has_space else {"space.name": "module"}), "space.build": build}

    def _network(self, key: str, network: nn.Module) -> dict[str, Any]:
        if key not in _SPACE:
            raise ValueError(f"{key} takes no network: give the function that builds it")
        try:
            content, code = packed(network)
        except ValueError as error:
            raise ValueError(
                f"{key}: this {_kind(network)} cannot be passed as it is: {said(error, 300)}; pass its class, or a "
                "function that builds it, from a file that can be imported"
            ) from error
        file = self._file(f"{_kind(network)}-{sha256(content).hexdigest()[:_DIGITS]}.safetensors")
        if not file.exists():
            with self._new(file) as temporary:
                temporary.write_bytes(content)
        options: dict[str, Any] = {"space.options.path": str(file)}
        return {**self._of_module_space(BUILD), **options, **({"space.options.code": code} if code else {})}

    def _stored_arrays(self, arrays: Mapping[str, AnyArray], kind: str) -> str:
        digest = sha256()
        for name, array in arrays.items():
            digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).data)
        file = self._file(f"{kind}-{digest.hexdigest()[:_DIGITS]}.npz")
        if not file.exists():
            with self._new(file) as temporary, temporary.open("wb") as stream:
                np.savez(stream, **arrays)  # type: ignore[arg-type]  # its keywords are arrays
        return str(file)

    def _file(self, name: str) -> Path:
        return self._folder.absolute() / name

    @contextmanager
    def _new(self, file: Path) -> Iterator[Path]:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._written.append(file)
        temporary = temporary_path(file)
        try:
            yield temporary
            publish(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)


def _together(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """All keys with their values; ValueError for an option to which two passed objects give different values."""
    values: dict[str, Any] = {}
    for key, value in (item for part in parts for item in part.items()):
        if repr(values.setdefault(key, value)) != repr(value):
            raise ValueError(
                f"{key}: {shown(values[key], repr)} and {shown(value, repr)} are given for it: all that takes options "
                "there shares them by name; give one value, or rename an option of your own"
            )
    return values


def _kind(value: Any) -> str:
    return type(value[0] if isinstance(value, list | tuple) else value).__name__.lower()


# -- code and objects --------------------------------------------------------------------------------------------------


def _options(key: str) -> str:
    """The key of the options for the component that `key` chooses."""
    section = key.rpartition(".")[0].removesuffix(".distribution").removesuffix(".shares")
    return f"{section}.options" if section else f"{key}.options"


def _code(key: str, value: Any) -> tuple[str, dict[str, Any]]:
    """The import path of a passed function, class or object, and the options that it was made with."""
    if isinstance(value, functools.partial):
        name, _ = _code(key, value.func)
        if value.args or not all(map(is_plain, value.keywords.values())):
            raise ValueError(f"{key}: give partial({called(value.func)}, ...) its options by keyword, as plain values")
        return name, dict(value.keywords)
    if inspect.isclass(value) or inspect.isroutine(value):
        return _importable(key, value), {}
    for module in (sys.modules.get(type(value).__module__), *list(sys.modules.values())):
        if isinstance(module, ModuleType) and module.__name__ != "__main__":
            for name, each in list(vars(module).items()):
                if each is value and not name.startswith("_"):
                    return f"{module.__name__}:{name}", {}
    return _remade(key, value)


def called(code: Any) -> str:
    """The name of a function or class, of a partial one with the options that it sets."""
    if isinstance(code, functools.partial):
        return " ".join([called(code.func), *(f"{name}={value}" for name, value in code.keywords.items())])
    return str(getattr(code, "__qualname__", type(code).__name__))


def _importable(key: str, code: Any) -> str:
    path, name = import_path(code), called(code)
    if path is not None:
        return path
    module = str(getattr(code, "__module__", None))
    if "<lambda>" in name:
        problem = f"{key} is a lambda, which no other process can import: write a function {INTO_A_FILE}"
    elif "<locals>" in name:
        problem = (
            f"{key}: {name} is defined in a function, where no other process can import it: write it {INTO_A_FILE}"
        )
    elif module == "__main__":
        where = "a notebook's cell" if "IPython" in sys.modules else "the program itself"
        problem = f"{key}: {name} is defined in {where}, where no other process can import it: write it {INTO_A_FILE}"
    else:
        problem = f"{key}: {module}:{name} is no longer this {name}, as after importlib.reload: import it again"
    raise ValueError(problem)


def _remade(key: str, value: Any) -> tuple[str, dict[str, Any]]:
    """The import path of an object's class, and its attributes as options; ValueError if they do not rebuild it."""
    cls = type(value)
    if cls.__module__ == "builtins" or isinstance(value, Tensor | list | tuple | dict | set):
        raise ValueError(
            f"{key}={shown(value, repr)}: give a number, text, True, False or None, a list or dictionary of these, or, "
            "for keys that take a name, code, a network or a data set of one's own"
        )
    path, names = _importable(key, cls), keyword_options(cls)
    attributes = getattr(value, "__dict__", {})
    options = {name: attributes[name] for name in names if name in attributes}
    try:
        is_whole = all(map(is_plain, options.values())) and vars(cls(**options)) == attributes
    except (TypeError, ValueError, RuntimeError):  # it takes other arguments, or holds arrays or tensors
        is_whole = False
    if not is_whole:
        raise ValueError(
            f"{key}={shown(value, repr)}: {cls.__name__} and its options cannot rebuild this object: pass the class, "
            f"and the options by {_options(key)}"
        )
    return path, options


# -- data sets ---------------------------------------------------------------------------------------------------------


def _arrays(key: str, value: Any) -> dict[str, AnyArray] | None:
    """The arrays of a data set, or of a pair for training and testing, by name in the file; None for other values."""
    if isinstance(value, Arrays):
        if (value.scale, value.mean, value.std) != (None, None, None):
            raise ValueError(f"{key}: Arrays with scale, mean or std cannot be passed: pass a function that makes them")
        parts = {"train": value.train, **({} if value.test is None else {"test": value.test})}
        names = value.class_names
    else:
        pair = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(part, Tensor | np.ndarray) for part in pair):
            raise ValueError(
                f"{key}: tensors and arrays are no data set: give TensorDataset(x, y) of torch, or a pair of these for "
                "training and testing, or Arrays((x, y)) of fedloom.platform.data.arrays"
            )
        if not 1 <= len(pair) <= 2 or not all(isinstance(part, Dataset) for part in pair):
            return None
        parts = {name: _stacked(key, part) for name, part in zip(("train", "test"), pair, strict=False)}
        classes = getattr(pair[0], "classes", None)  # as torchvision's data sets have it
        names = classes if isinstance(classes, list | tuple) and all(isinstance(c, str) for c in classes) else None
    arrays = {} if names is None else {"class_names": np.array([str(name) for name in names])}
    for part, content in parts.items():
        for kind, tree in zip(("x", "y", "clients"), content, strict=False):
            array_of = {n: np.asarray(a) for n, a in tree.items()} if isinstance(tree, Mapping) else np.asarray(tree)
            arrays |= {f"{part}_{name}": array for name, array in named(kind, array_of).items()}
    return arrays


def _stacked(key: str, dataset: "Dataset[Any]") -> Sequence[Any]:
    """The inputs, labels and, if there are any, clients of all samples."""
    if isinstance(dataset, TensorDataset):
        return [tensor.numpy(force=True) for tensor in dataset.tensors]
    sized: Any = dataset
    samples = [sized[i] for i in range(len(sized))] if hasattr(sized, "__len__") else list(sized)
    what = f"{key}: {type(dataset).__name__}"
    for number, sample in enumerate(samples):
        if not isinstance(sample, list | tuple) or len(sample) not in (2, 3):
            raise ValueError(f"{what}[{number}] is {type(sample).__name__}: give (x, y), or (x, y, client)")
    if not samples:
        raise ValueError(f"{what} has no samples")
    columns = zip(("inputs", "labels", "clients"), zip(*samples, strict=True), strict=False)
    return [_column(f"{what}: the {name}", column) for name, column in columns]


def _column(what: str, values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return {name: _column(f"{what} {name}", [value[name] for value in values]) for name in values[0]}
    arrays = [value.numpy(force=True) if isinstance(value, Tensor) else np.asarray(value) for value in values]
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1 or arrays[0].dtype == object:
        kinds = f"of {len(shapes)} shapes, such as {' and '.join(map(str, sorted(shapes)[:2]))}"
        raise ValueError(f"{what} are {kinds if len(shapes) > 1 else 'no arrays'}: give numbers of one shape")
    return np.stack(arrays)
