"""A data set in one `.npz` file of NumPy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.platform.data.arrays import Arrays
from fedloom.platform.plugins import PluginError

NAMES: Mapping[str, tuple[str, ...]] = {
    "x": ("{part}_x", "x_{part}", "{part}_images"),
    "y": ("{part}_y", "y_{part}", "{part}_labels"),
    "clients": ("{part}_clients", "clients_{part}"),
}
"""The accepted names of the arrays."""
WHOLE = {"x": ("x", "images"), "y": ("y", "labels"), "clients": ("clients",)}
"""The accepted names in a file without parts."""


def read_npz(path: Path) -> Arrays:
    """Reads train_x, train_y, test_x, test_y (or x_train, ..., or x and y, of which a fifth is held out for testing).

    Optional are train_clients, test_clients and class_names. Nothing in the file is executed.
    Raises PluginError naming what is missing.
    """
    blame = f"data set 'npz': {path}"
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise PluginError(f"{blame} not found; set data.options.path") from None
    except (OSError, ValueError, AttributeError) as error:
        raise PluginError(f"{blame} is not a file of arrays ({error}); write it with numpy.savez") from error
    train, test = _part(arrays, "train"), _part(arrays, "test")
    if train is None and test is None:
        train = _taken(arrays, WHOLE)
    if train is None:
        raise PluginError(f"{blame} has {', '.join(arrays)[:100]}: expected train_x and train_y, or x and y")
    names = arrays.get("class_names")
    return Arrays(train, test, class_names=None if names is None else [str(n) for n in names.tolist()])


def _part(arrays: Mapping[str, Any], part: str) -> tuple[Any, ...] | None:
    return _taken(arrays, {what: tuple(n.format(part=part) for n in names) for what, names in NAMES.items()})


def _taken(arrays: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> tuple[Any, ...] | None:
    found = {what: next((arrays[n] for n in own if n in arrays), None) for what, own in names.items()}
    x, y, clients = found["x"], found["y"], found["clients"]
    if x is None or y is None:
        return None
    # Some data sets publish labels as a column (n, 1).
    labels = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    return (x, labels) if clients is None else (x, labels, clients)
