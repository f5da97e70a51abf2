"""Lookup of code by its configured name: built-in code, or a user's own by its import path.

A registry is a place where code is chosen by name, such as the weighting rule of a training stage. Built-in code and a
user's own (`module:name`, from the working directory or an installed package) are looked up, configured and called in
the same way. A user's code that fails gives a one-line error that names it.
"""

import importlib
import inspect
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from fedloom.platform.words import said

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Declared = TypeVar("Declared")


class PluginError(ValueError):
    """Code that a configuration names cannot be used; the message names the code and the problem."""


class Shipped(Mapping[str, Any]):
    """Built-in objects by name, given themselves or as import paths, whose modules are imported on demand.

    An import path leads to the object, or to a mapping that contains it by name.
    """

    def __init__(self, paths: Mapping[str, Any]) -> None:
        self._paths = dict(paths)

    def add(self, paths: Mapping[str, str]) -> None:
        """Adds import paths by name."""
        self._paths |= paths

    def __getitem__(self, name: str) -> Any:
        path = self._paths[name]
        if not isinstance(path, str):
            return path
        module_name, _, attribute = path.partition(":")
        code = getattr(importlib.import_module(module_name), attribute)
        return code[name] if isinstance(code, Mapping) else code

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


@dataclass(frozen=True)
class ComponentSpec:
    """The name of code with the values of its options, as sent to workers."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __hash__(self) -> int:
        # Without the values, because lists and dictionaries have no hash.
        return hash((self.name, tuple(name for name, _ in self.options)))


@dataclass(frozen=True, eq=False)
class Registry(Generic[T]):
    """A place where code is chosen by name.

    Attributes:
        kind: the kind of code, as in messages, such as `server rule`.
        known: the built-in code by name.
        arguments: the positional arguments of a call; keyword-only parameters are options.
        made: whether classes are also allowed: a class is called with its options, and the instance is used. If there
            are no arguments, a function is also called with its options, and its result is used.
    """

    kind: str
    known: Mapping[str, Any]
    arguments: tuple[str, ...]
    made: bool = False

    def register(self, paths: Mapping[str, str]) -> None:
        """Adds built-in code of a higher layer: import paths by name."""
        assert isinstance(self.known, Shipped), "other slots are closed"
        self.known.add(paths)

    def traits_of(self, name: str, default: Declared) -> Declared:
        """What the code of that name has declared (`declares`); `default` if it has declared nothing of that type."""
        declared = getattr(self.find(name), TRAITS, default)
        return declared if isinstance(declared, type(default)) else default

    def find(self, name: str) -> Any:
        """The code of that name; PluginError if it does not exist or cannot be called with the registry's arguments."""
        code = resolve(self.kind, name, self.known)
        if is_import_path(name):
            self.check_callable(name, code)
        return code

    def make(self, chosen: ComponentSpec) -> T:
        """The code with its options bound; errors in a user's code name it."""
        # Cached by the object, not only by its name, because a notebook may reload a module.
        made: T = _made(self, chosen, resolve(self.kind, chosen.name, self.known))
        return made

    def options_of(self, name: str) -> dict[str, inspect.Parameter]:
        """The options of the code of that name: its keyword-only parameters."""
        return keyword_options(self.find(name))

    def check_callable(self, name: str, code: Any) -> None:
        """Raises PluginError for a user's code that cannot be called with the registry's arguments."""
        if not callable(code):
            raise PluginError(f"{self.kind} {name!r} is {an(type(code).__name__)}, not {self.form}")
        try:
            signature = inspect.signature(code)
        except ValueError:  # a builtin without a signature
            return
        arguments = () if self.made and inspect.isclass(code) else self.arguments
        # A required option without a value is reported later, by its configuration key.
        options = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
        try:
            signature.bind(*arguments, **dict.fromkeys(options))
        except TypeError as error:
            called_as = f"{getattr(code, '__name__', name)}{signature}"
            raise PluginError(
                f"{self.kind} {name!r} has the wrong parameters ({called_as}): {error}; give {self.form}"
            ) from error

    @property
    def form(self) -> str:
        """The required form of a user's code, for messages."""
        if not self.arguments:
            return "a class of options by keyword, or a function of them that makes one of its kind"
        form = f"a function of ({', '.join(self.arguments)}) and of options by keyword"
        return f"{form}, or a class of such options" if self.made else form


TRAITS = "traits"


def declares(traits: object) -> Callable[[F], F]:
    """Declares a rule's traits: what it needs and guarantees, such as `SelectionTraits` of a selection rule."""

    def declared(rule: F) -> F:
        setattr(rule, TRAITS, traits)
        return rule

    return declared


def an(name: str) -> str:
    """A noun with its indefinite article."""
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


@lru_cache(maxsize=256)
def _made(registry: "Registry[Any]", chosen: ComponentSpec, code: Any) -> Any:
    options = dict(chosen.options)
    is_own = is_import_path(chosen.name)
    if is_own:
        registry.check_callable(chosen.name, code)
    if registry.made and (inspect.isclass(code) or not registry.arguments):
        with blaming(registry.kind, chosen.name):
            return code(**options)
    bound = partial(code, **options) if options else code
    return Blamed(registry.kind, chosen.name, bound) if is_own else bound


class Blamed:
    """Wraps a user's function so that its errors name it."""

    def __init__(self, kind: str, name: str, function: Callable[..., Any]) -> None:
        self.kind, self.name, self.function = kind, name, function

    def __call__(self, *arguments: Any) -> Any:
        with blaming(self.kind, self.name):
            return self.function(*arguments)


@contextmanager
def blaming(kind: str, name: str, spare: type[Exception] = PluginError) -> Iterator[None]:
    """Turns exceptions of a user's code in the block into a PluginError that names it, except for `spare`.

    Errors of built-in code are raised as they are: they are bugs of fedloom.
    """
    if not is_import_path(name):
        yield
        return
    try:
        yield
    except (spare, PluginError, *NOT_CAUGHT):
        raise
    except BaseException as error:
        raise PluginError(f"{kind} {name!r} fails: {in_one_line(error)}") from error


NOT_CAUGHT = (KeyboardInterrupt, GeneratorExit)
"""Exceptions that are not failures: somebody interrupts the run, or a generator is closed."""


def ends_process(error: BaseException) -> bool:
    """Whether an exception is not a failure of what was tried: one of `NOT_CAUGHT`, or sys.exit that Ray calls."""
    return isinstance(error, NOT_CAUGHT) or not (isinstance(error, Exception) or place_in_own(error))


@contextmanager
def blaming_own(*spare: type[Exception]) -> Iterator[None]:
    """Turns exceptions that the user's own code raises in the block, wherever fedloom calls it, into a PluginError.

    This includes `sys.exit`, and errors that would otherwise look like those of a disk or a network. Exceptions of
    other code, ValueError and `spare` are raised as they are.
    """
    passed_on: tuple[type[BaseException], ...] = (ValueError, *spare, *NOT_CAUGHT)
    try:
        yield
    except passed_on:
        raise
    except BaseException as error:
        if not place_in_own(error):
            raise
        raise PluginError(f"code of your own fails: {in_one_line(error)}") from error


def answered(what: str, answer: T, kind: type[T]) -> T:
    """The value that a function, called `what` in messages, returned; PluginError if it is of another type."""
    if not isinstance(answer, kind):
        raise PluginError(f"{what} gives {answer!r:.60}: give {an(kind.__name__)}")
    return answer


def check_keys(values: Any, where: str) -> None:
    """Raises ValueError for a key of nested mappings that is no text: JSON would give it back as one.

    `where` names the values. Mappings within lists are not checked.
    """
    if not isinstance(values, Mapping):
        return
    for key, value in values.items():
        if not isinstance(key, str):
            raise ValueError(f"{where} has the key {key!r:.60}: give a text, such as {str(key)!r:.60}")
        check_keys(value, f"{where}[{key!r:.60}]")


def in_one_line(error: BaseException) -> str:
    """An error's type, message and line of the user's code, in one line."""
    text = said(error)
    return f"{type(error).__name__}{': ' if text else ''}{text}{place_in_own(error)}"


def is_import_path(name: str) -> bool:
    """Whether a name is of the form `module:name`."""
    return ":" in name


def called(name: str) -> str:
    """A readable name: a user's method goes by its module (`fedper` for `fedper:METHOD`), other own code by its own."""
    if not re.fullmatch(r"[\w.]+:[A-Za-z_]\w*", name):
        return name
    module, attribute = name.split(":")
    return module.rpartition(".")[2] if attribute == "METHOD" else attribute


def nearest(name: str, known: list[str], cutoff: float = 0.5) -> str:
    """`; did you mean X?` for the most similar known name, or an empty string."""
    match = get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {match[0]!r}?" if match else ""


def resolve(kind: str, name: str, known: Mapping[str, T]) -> T:
    """The built-in object of that name, or the object at the import path `package.module:attribute`.

    Raises PluginError for an unknown name (listing the known ones), and for a path that cannot be imported.
    """
    if name in known:
        return known[name]
    if not is_import_path(name):
        allowed = f"known are {', '.join(sorted(known))}, or" if known else "give"
        raise PluginError(f"unknown {kind} {name!r}: {allowed} module:name{nearest(name, [*known])}")
    code: T = imported(kind, name)
    return code


def imported(kind: str, path: str) -> Any:
    """The object at `module:name`; PluginError with what is missing or what the module raised."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except NOT_CAUGHT:
        raise
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            here = sys.path[-1] if sys.path else "."
            cause = f"there is no module {module_name!r} in {here}, nor among the installed packages; give module:name"
        elif isinstance(error, TypeError | ValueError) and (not module_name or module_name.startswith(".")):
            cause = "give module:name"
        elif isinstance(error, SyntaxError):
            cause = f"SyntaxError: {error.msg} (line {error.lineno} of {error.filename})"
        else:
            cause = in_one_line(error)
        raise PluginError(f"{kind} {path!r} cannot be imported: {cause}") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        names = [name for name in vars(module) if not name.startswith("_")]
        file = getattr(module, "__file__", None) or module_name  # built-in modules have no file
        raise PluginError(
            f"{kind} {path!r} cannot be imported: {file} has no {attribute!r}{nearest(attribute, names)}"
        ) from error


def keyword_options(function: Any) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a function, or of a class' constructor, with their annotations evaluated."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature
        return {}
    names = getattr(function.__init__ if inspect.isclass(function) else inspect.unwrap(function), "__globals__", {})
    options: dict[str, inspect.Parameter] = {}
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY:
            annotation = parameter.annotation
            if isinstance(annotation, str):
                with suppress(NameError):  # of a type that is imported for type checking alone
                    annotation = eval(annotation, names)
            options[parameter.name] = parameter.replace(annotation=annotation)
    return options


def positional_defaults(function: Any) -> set[str]:
    """The parameters that look like options, as they have a default, but are not keyword-only."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature
        return set()
    return {p.name for p in parameters if p.kind is not p.KEYWORD_ONLY and p.default is not p.empty}


# -- whose code it is --------------------------------------------------------------------------------------------------

OF_PACKAGES = frozenset({"site-packages", "dist-packages"})
"""The names of the folders of installed packages, in any environment."""
_FEDLOOM = tuple(Path(__file__).resolve().parents[1] / part for part in ("platform", "actors", "experiments", "tiers"))


def is_own(file: Path) -> bool:
    """Whether a source is the user's own."""
    return not is_fedlooms(file) and not is_installed(file)


def is_fedlooms(file: Path) -> bool:
    """Whether a source is a module of fedloom."""
    return any(file.is_relative_to(folder) for folder in _FEDLOOM)


def is_installed(file: Path) -> bool:
    """Whether a source belongs to Python or to an installed package."""
    # Environments may be layered (a .pth file, PYTHONPATH): packages of another one are not the user's own code.
    return not OF_PACKAGES.isdisjoint(file.parts) or any(file.is_relative_to(f) for f in _installed_folders())


def place_in_own(error: BaseException) -> str:
    """` (line N of FILE)` for the innermost line of the user's own code that an error came through; empty if none."""
    return next(
        (f" (line {line} of {file.name})" for is_own_line, file, line in reversed(_places(error)) if is_own_line), ""
    )


def place_of(code: Any) -> str:
    """` (line N of FILE)` for a function or a class; empty if its source is not there."""
    try:
        return f" (line {inspect.getsourcelines(code)[1]} of {Path(inspect.getfile(code)).name})"
    except (OSError, TypeError):
        return ""


def raised_by_own(error: BaseException) -> bool:
    """Whether an error was raised by the user's own code or a package that it calls, not by fedloom called from it."""
    places = _places(error)
    return bool(places) and places[-1][0]


def _places(error: BaseException) -> list[tuple[bool, Path, int]]:
    """The lines of the user's own code and of fedloom that an error came through, innermost last: own, file, line."""
    places, frame = list[tuple[bool, Path, int]](), error.__traceback__
    while frame is not None:
        file = Path(frame.tb_frame.f_code.co_filename)
        if file.is_absolute() and not is_installed(file.resolve()):
            places.append((not is_fedlooms(file.resolve()), file, frame.tb_lineno))
        frame = frame.tb_next
    return places


@cache
def _installed_folders() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [*map(sysconfig.get_path, names), *site.getsitepackages(), site.getusersitepackages()]
    return tuple({Path(folder).resolve() for folder in folders})
