"""Where the code lies that a configuration names, found out without executing any of it.

Results come from elsewhere, too: copied, downloaded, shared. The configuration in them chooses code by its import path,
and with the working directory among the places of modules it could choose a file that came with the results.
"""

import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.platform.runs.plugin_sources import IMPORT_PATH


def check_code_places(configs: Iterable[Mapping[str, Any]], root: Path) -> None:
    """Raises ValueError, in one line, if a text of a configuration names code in the results folder, or Python's own.

    Modules of Python's library may do things when they are imported, and none of them is a plug-in. What is installed
    is none of the results, also where they are a folder above it. Every text of the form of an import path counts,
    because a plug-in may be named anywhere in the options of another.
    """
    for path in sorted({text for config in configs for text in _texts(config) if ":" in text}):
        if IMPORT_PATH.fullmatch(path) and re.split("[.:]", path)[0] in sys.stdlib_module_names:
            raise ValueError(f"the configuration names {path!r}, which is Python's own: give code made for fedloom")
        if (file := _below(path.partition(":")[0], root)) is not None:
            raise ValueError(
                f"the configuration names {path!r}, whose code {file} lies in the results: nothing in results "
                "is executed; if it is code of your own, move it out of the results folder"
            )


def _texts(values: Any) -> Iterator[str]:
    """All texts of nested mappings and lists, also the keys."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for name, value in values.items():
            yield from _texts(name)
            yield from _texts(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _texts(value)


def _below(module: str, root: Path) -> Path | None:
    """The first file below the folder that an import of the module would execute; None if there is none."""
    if module.partition(".")[0] == "fedloom":  # it is running, and no other one could be imported
        return None
    installed = Path(sys.prefix)
    return next((f for f in _files_of(module) if _is_below(f, root) and not _is_below(f, installed)), None)


def _files_of(module: str) -> Iterator[Path]:
    """The files that an import of a module executes: those of its packages, outermost first, and its own.

    Nothing is imported, as `importlib.util.find_spec` does with the packages that a module lies in.
    """
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):  # a module that was made in memory, such as __main__
        return
    if spec is None:
        return
    if spec.origin is not None and spec.has_location:
        yield Path(spec.origin)
    folders, name = list(spec.submodule_search_locations or ()), top
    for part in rest:
        name = f"{name}.{part}"
        file, folders = _found(name, folders)
        if file is not None:
            yield file


def _found(name: str, folders: Sequence[str]) -> tuple[Path | None, list[str]]:
    """A module's file in the first of these folders that has it, and the folders in which its own modules lie.

    A namespace package has no file, and lies in all of the folders that have it.
    """
    portions: list[str] = []
    for folder in folders:
        finder = pkgutil.get_importer(folder)
        spec = finder.find_spec(name, None) if finder is not None else None
        if spec is not None and spec.loader is not None:
            return Path(spec.origin) if spec.origin else None, list(spec.submodule_search_locations or ())
        if spec is not None:
            portions += spec.submodule_search_locations or ()
    return None, portions


def _is_below(file: Path, root: Path) -> bool:
    """Whether a file lies below a folder, as it is named or where links lead to."""
    named = file.absolute().is_relative_to(root.absolute())
    return named or any(at.is_relative_to(root.resolve()) for at in (file.absolute(), file.resolve()))
