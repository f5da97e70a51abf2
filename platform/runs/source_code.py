"""The code that a run depends on: its plug-ins' sources, where they lie, and the hash of fedloom's own.

A plug-in's sources are the module that the configuration names, and all modules that it imports, anywhere in its code,
from outside the installed packages. The files that its options name are inputs of the run (see `run_files`); other
files and environment variables that it reads are not tracked.

Results may come from elsewhere: copied, downloaded, shared. Their configuration chooses code by its import path, and
because modules are also looked for in the working directory, it could choose a file that came with the results. So the
place of the code is determined without executing any of it.
"""

import ast
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedloom.platform.plugins import is_fedlooms, is_installed, is_own
from fedloom.platform.results.files import read_file, write_atomically

PLUGINS = "plugins"
"""The folder of the copies in a run's artefacts."""

IMPORT_PATH = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")


class UnknownSourceError(ValueError):
    """Code that the configuration names has no source file."""


@dataclass(frozen=True)
class PluginSources:
    """The files of a configuration's plug-ins, sorted by module name."""

    files: Mapping[str, Path]

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of the names and contents; empty if there are no plug-ins."""
        if not self.files:
            return ""
        digest = sha256()
        for module, file in self.files.items():
            digest.update(module.encode() + b"\0" + sha256(file.read_bytes()).digest())
        return digest.hexdigest()

    def copy_to(self, folder: Path) -> None:
        """Copies every file to the folder, with its module's name as path."""
        for module, file in self.files.items():
            target = folder / place_of(module, file)
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, file.read_bytes())

    def changed_since(self, folder: Path) -> list[str]:
        """The modules that differ from the copies of `copy_to`, or exist only in one of the two."""
        now = {place_of(module, file).as_posix(): (module, file.read_bytes()) for module, file in self.files.items()}
        then = {f.relative_to(folder).as_posix(): read_file(f) for f in folder.rglob("*.py")}
        names = {path: module for path, (module, _) in now.items()}
        unlike = [p for p in sorted({*now, *then}) if p not in now or p not in then or now[p][1] != then[p]]
        return [names.get(path, path) for path in unlike]


def place_of(module: str, file: Path) -> Path:
    """The relative path of a module's copy: its dotted name as a path."""
    parts = module.split(".")
    return Path(*parts, file.name) if file.name == "__init__.py" else Path(*parts).with_suffix(".py")


def plugin_sources(config: Any) -> PluginSources:
    """The sources of all code that a configuration (nested mappings and lists) names by import paths.

    Raises UnknownSourceError for code of a module without a file, such as `__main__`.
    """
    return sources_of(named_modules(config))


def named_modules(config: Any) -> list[str]:
    """The existing modules that a configuration names by import paths; unknown ones are rejected elsewhere."""
    modules = {match[1] for match in filter(None, map(IMPORT_PATH.fullmatch, texts_of(config)))}
    return sorted(module for module in modules if _origin(module) is not None)


def sources_of(modules: Iterable[str]) -> PluginSources:
    """The sources of these modules, and of the modules that they import from outside the installed packages."""
    files: dict[str, Path] = {}
    # A named module is included even if it is installed, because its version is not recorded.
    waiting = [(module, _origin(module)) for module in modules]
    while waiting:
        module, file = waiting.pop()
        if module in files or file is None or is_fedlooms(file):
            continue
        files[module] = file
        if not is_installed(file):
            waiting += [(name, path) for name in _imports(module, file) if (path := _own_file(name)) is not None]
    return PluginSources({module: files[module] for module in sorted(files)})


def texts_of(values: Any) -> Iterator[str]:
    """All texts among nested mappings and lists, without the mappings' keys."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from texts_of(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from texts_of(value)


def _origin(module: str) -> Path | None:
    """The file of a module; None if the module does not exist."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, AttributeError):
        return None
    except ValueError as error:  # the file of __main__ may differ in another process
        raise UnknownSourceError(f"{module} is no module of a file") from error
    if spec is None:
        return None
    if spec.origin is None or not Path(spec.origin).is_file():
        raise UnknownSourceError(f"{module} is no module of a file")
    return Path(spec.origin).resolve()


def _own_file(module: str) -> Path | None:
    """The source of an imported module if it is the user's own: not Python's, fedloom's or an installed package's."""
    try:
        file = _origin(module)
    except UnknownSourceError:  # built in, or a namespace package
        return None
    return file if file is not None and file.suffix == ".py" and is_own(file) else None


def _imports(module: str, file: Path) -> Iterator[str]:
    """The modules that a source imports anywhere, with their packages; dynamic imports only by constant names."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_bytes(), str(file))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_packages(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, package)
            yield from _with_packages(base)
            # A name imported from a package may be a module.
            yield from (f"{base}.{alias.name}" for alias in node.names if base)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield from _with_packages(node.args[0].value)
    if package:
        yield from _with_packages(package)


def _base(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    above = parts[: len(parts) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def _with_packages(module: str) -> Iterator[str]:
    parts = [part for part in module.split(".") if part]
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def check_code_places(configs: Iterable[Mapping[str, Any]], root: Path) -> None:
    """Raises ValueError, in one line, if a configuration names code in the results folder or in Python's own library.

    Modules of Python's library may act when they are imported, and none of them is a plug-in. Installed packages are
    allowed, even if the results folder contains their environment. Every text in the form of an import path is
    checked, because a plug-in may be named anywhere in the options of another.
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
    if module.partition(".")[0] == "fedloom":  # it is running, and an import finds no other one
        return None
    for file in _files_of(module):
        if _is_below(file, root) and not _is_below(file, Path(sys.prefix)):
            return file
    return None


def _files_of(module: str) -> Iterator[Path]:
    """The files that an import of a module executes: those of its packages, outermost first, and its own.

    Nothing is imported, unlike by `importlib.util.find_spec`, which imports the packages that a module lies in.
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
    """A module's file in the first of these folders that has it, and the folders of the module's own submodules.

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
    """Whether a file lies below a folder, by its path as given or where its links lead."""
    named = file.absolute().is_relative_to(root.absolute())
    return named or any(at.is_relative_to(root.resolve()) for at in (file.absolute(), file.resolve()))


DIGITS = 16


def source_hash(plugins: PluginSources | None = None) -> str:
    """The hash of the source of platform and tiers, and of the plug-ins if there are any.

    Workers and driver must run the same source. Fedloom's files are read once per process, because later edits do not
    change the code that this process runs.
    """
    if plugins is None or not plugins.files:
        return _own_hash()
    return sha256(f"{_own_hash()} {plugins.hash}".encode()).hexdigest()[:DIGITS]


@cache
def _own_hash() -> str:
    here = Path(__file__).resolve().parent.parent
    digest = sha256()
    for folder in (here, here.parent / "tiers"):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:DIGITS]
