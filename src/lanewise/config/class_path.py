"""An object that a configuration names by its class, and how the class is imported."""

import importlib
import pkgutil
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from lanewise.config.check import Section, nearest, show, suggest
from lanewise.errors import ConfigError, text_of


class ClassConfig(Section):
    """An object to build: its class and its constructor's arguments, or the class alone."""

    TEXT_KEY: ClassVar = "class_path"

    class_path: str
    """The class, as `module.Class`."""
    init_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the constructor by name, without those that only the running program knows."""


_importing: list[str] = []
"""The modules of the user that are just being imported."""


def add_search_path(search_path: str | None) -> None:
    """Let modules be imported from the search_path of a configuration, before any other place.

    Every process calls it before it resolves a class. It is not undone: a task may import modules later.
    """
    if search_path is not None and sys.path[:1] != [search_path]:
        sys.path.insert(0, search_path)


def resolve_class(key: str, config: ClassConfig) -> type:
    """Import the class of a section.

    Args:
        key: the dotted key of the section, for the mistake.
        config: names the class.

    Raises:
        ConfigError: there is no such module or class, or the module fails while it is imported.
    """
    found = resolve(key, config)
    if not isinstance(found, type):
        raise ConfigError(
            f"{key}.class_path must name a class: got {config.class_path}, which is a "
            f"{type(found).__name__}. Name a class."
        )
    return found


def resolve(key: str, config: ClassConfig) -> Any:
    """Import what a section names, as `resolve_class` does, whatever it is."""
    class_path = config.class_path
    module_name, _, class_name = class_path.rpartition(".")
    if not all(part.isidentifier() for part in class_path.split(".")) or not module_name:
        raise ConfigError(f"{key}.class_path must name a class as module.Class: got {show(class_path)}.")
    if module_name.endswith(".__main__"):  # it would run its program
        raise ConfigError(
            f"{key}.class_path: {module_name} is a program. Name a class of a module that only defines it."
        )
    script = sys.modules["__main__"] if is_of_script(config) else None
    module = script or _import_module(f"{key}.class_path", module_name)
    found = getattr(module, class_name, None)
    if found is None:
        classes = {
            name: cls for name, cls in vars(module).items() if isinstance(cls, type) and name[0] != "_"
        }
        own = [name for name, cls in classes.items() if cls.__module__.startswith(module_name)]
        hint = suggest(class_name, own or classes, prefix=f"{module_name}.")
        raise ConfigError(f"{key}.class_path: module {module_name} has no {class_name}. {hint}")
    return found


def refuse_in_import(call: str) -> None:
    """Raise ConfigError if a module that a configuration names calls this while it is imported."""
    if _importing:
        raise ConfigError(
            f"{_importing[-1]} calls {call} when it is imported. Put that call below "
            'if __name__ == "__main__":, so that only the script itself makes it.'
        )


def is_of_script(config: ClassConfig) -> bool:
    """Tell whether a class is of the script that is running, which is not imported again by its own name."""
    script, module_name = (
        getattr(sys.modules["__main__"], "__file__", None),
        config.class_path.rpartition(".")[0],
    )
    if script is None or module_name != Path(script).stem:
        return False
    spec = find_spec(module_name)
    return (
        spec is not None and spec.origin is not None and Path(spec.origin).resolve() == Path(script).resolve()
    )


def _import_module(key: str, name: str) -> ModuleType:
    """Import a module of the user; an error in it becomes a mistake with its file and line."""
    _importing.append(name)
    try:
        return importlib.import_module(name)
    except ConfigError as error:  # of `refusing_imports_from`
        raise ConfigError(f"{key}: {error}") from error
    # A script without a main guard may also exit.
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{key}: there is no module {error.name}. {_suggest_module(error.name)}"
            ) from error
        text = " ".join(f"{type(error).__name__}: {text_of(error)}".split())
        remedy = "Correct that line."
        if isinstance(error, ModuleNotFoundError) and error.name is not None and "." not in error.name:
            near = _nearest_module(error.name, sys.path[:1])
            remedy = f"Did you mean {near}?" if near else f"Install it: pip install {error.name}"
        mistake = f"{key}: importing {name} failed with {text}, at {_place(error)}. {remedy}"
        raise ConfigError(mistake) from error
    finally:
        _importing.pop()


def _suggest_module(name: str | None) -> str:
    """Name the module that was probably meant, among those beside the missing one."""
    parent, _, last = (name or "").rpartition(".")
    folders = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if near := _nearest_module(last, folders):
        return f"Did you mean {parent}{'.' if parent else ''}{near}?"
    return f"Put its file into {sys.path[0] or 'the working directory'}, or install its package."


def _nearest_module(name: str, folders: Iterable[str] | None) -> str | None:
    """Return the module that was probably meant; none of Python's own has a task."""
    found = {module.name for module in pkgutil.iter_modules(folders)} - sys.stdlib_module_names
    return nearest(name, sorted(found), cutoff=0.75)


def _place(error: BaseException) -> str:
    """Say in which file and line an error arose, if possible of the user's own code."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(tuple(sys.path[:1]))]
    last = (own or frames)[-1]
    return f"{last.filename}, line {last.lineno}"
