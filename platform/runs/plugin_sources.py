"""The sources of a user's plug-ins: the files that a run depends on, and copies of them with the run.

A plug-in's sources are the module that the configuration names, and all modules that it imports, anywhere in its code,
from outside the installed packages. The files that its options name are inputs of the run (see `inputs`); other files
and environment variables that it reads are not tracked.
"""

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedloom.platform.plugins import is_fedlooms, is_installed, is_own
from fedloom.platform.results.files import read_file, write_atomically

FOLDER = "plugins"
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
        names = {place: module for place, (module, _) in now.items()}
        unlike = [p for p in sorted({*now, *then}) if p not in now or p not in then or now[p][1] != then[p]]
        return [names.get(place, place) for place in unlike]


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
    found = {match[1] for match in filter(None, map(IMPORT_PATH.fullmatch, texts_of(config)))}
    return sorted(module for module in found if _origin(module) is not None)


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
    """The modules that a source imports anywhere in it, with their packages; also dynamically by constant names."""
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
