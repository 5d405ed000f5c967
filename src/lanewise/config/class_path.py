"""From a `class_path` to the class, or to a mistake that says why it cannot be imported."""

import importlib
import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from lanewise.config.check import nearest, show, suggest
from lanewise.config.class_config import ClassConfig
from lanewise.config.run import RunConfig
from lanewise.errors import ConfigError, text_of


def add_search_path(config: RunConfig) -> None:
    """Let modules be imported from the folder of the configuration, before any other place.

    Every process calls it before it resolves a class. It is not undone: a task may import modules later.
    """
    if config.search_path is not None and sys.path[:1] != [config.search_path]:
        sys.path.insert(0, config.search_path)


@contextmanager
def refusing_imports_from(folders: Sequence[str]) -> Iterator[None]:
    """Let no module be imported that lies in one of the folders, wherever Python would find it.

    Modules that are nowhere else are looked for in the folders, so that the error names what lies there.

    Raises:
        ConfigError: such a module would have been imported.
    """
    guard, before = _Guard(folders), list(sys.path)
    sys.meta_path.insert(0, guard)
    sys.path += folders
    try:
        yield
    finally:
        sys.path[:] = before
        sys.meta_path.remove(guard)


def lies_in(path: str, folder: str) -> bool:
    """Tell whether a path leads into a folder, by its name or where links lead."""
    return any(one.is_relative_to(other) for one in _places(path) for other in _places(folder))


def _places(path: str) -> tuple[Path, Path]:
    return Path(os.path.normpath(Path.cwd() / path)), Path(os.path.realpath(path))


# Of the Python that runs; it may be an environment inside of a project, and is the user's own.
_ENVIRONMENT = ("stdlib", "platstdlib", "purelib", "platlib")


class _Guard(MetaPathFinder):
    """Is asked for each module before those that find it."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = folders

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> None:
        """Raise where a module would be loaded from one of the folders; never find one."""
        spec = PathFinder.find_spec(fullname, path, target)
        origin = None if spec is None else spec.origin  # a folder without an __init__.py has none, nor code
        if origin is None or any(lies_in(origin, sysconfig.get_path(name)) for name in _ENVIRONMENT):
            return
        if any(lies_in(origin, folder) for folder in self._folders):
            raise ConfigError(
                f"{fullname} would be imported from {origin}, which came with the run and may be somebody "
                "else's. If you trust that code, add --trust (from Python: trust=True)."
            )


def resolve_class(key: str, config: ClassConfig) -> type:
    """Import the class of a section.

    Args:
        key: the dotted key of the section, for the mistake.
        config: names the class.

    Raises:
        ConfigError: there is no such module or class, or the module fails while it is imported.
    """
    class_path = config.class_path
    module_name, _, class_name = class_path.rpartition(".")
    if not all(part.isidentifier() for part in class_path.split(".")) or not module_name:
        raise ConfigError(f"{key}.class_path must name a class as module.Class: got {show(class_path)}.")
    module = _import_module(f"{key}.class_path", module_name)
    found = getattr(module, class_name, None)
    if found is None:
        classes = {
            name: one for name, one in vars(module).items() if isinstance(one, type) and name[0] != "_"
        }
        own = [name for name, one in classes.items() if one.__module__.startswith(module_name)]
        hint = suggest(class_name, own or classes, prefix=f"{module_name}.")
        raise ConfigError(f"{key}.class_path: module {module_name} has no {class_name}. {hint}")
    if not isinstance(found, type):
        kind = type(found).__name__
        raise ConfigError(
            f"{key}.class_path must name a class: got {class_path}, which is a {kind}. Name a class."
        )
    return found


def _import_module(key: str, name: str) -> ModuleType:
    """Import a module of the user; whatever goes wrong in it is a mistake with its file and line."""
    try:
        return importlib.import_module(name)
    except ConfigError as error:  # of the guard
        raise ConfigError(f"{key}: {error}") from error
    # A script without a main guard may also exit.
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{key}: there is no module {error.name}. {_suggest_module(error.name)}"
            ) from error
        text = " ".join(f"{type(error).__name__}: {text_of(error)}".split())
        mistake = f"{key}: importing {name} failed with {text}, at {_place(error)}. Correct that line."
        raise ConfigError(mistake) from error


def _suggest_module(name: str | None) -> str:
    """Name the module that was probably meant, among those beside the missing one."""
    parent, _, last = (name or "").rpartition(".")
    folders = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    near = nearest(last, [module.name for module in pkgutil.iter_modules(folders)], cutoff=0.75)
    if near:
        return f"Did you mean {parent}{'.' if parent else ''}{near}?"
    return f"Put its file into {sys.path[0] or 'the working directory'}, or install its package."


def _place(error: BaseException) -> str:
    """Say in which file and line an error arose; of the user's own, if it arose in a package they call."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(tuple(sys.path[:1]))]
    last = (own or frames)[-1]
    return f"{last.filename}, line {last.lineno}"
