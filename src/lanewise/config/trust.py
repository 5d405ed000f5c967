"""Limits what a configuration that may be somebody else's can make this process import and build.

Code that came with the run is not imported, nor what only the run names. An object is built where the
signature that it goes into says what it is; elsewhere only if its class is of the project, or of a few
packages whose classes start no program and write no file of somebody's choice.
"""

import os
import shlex
import stat
import sys
import sysconfig
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, final

from lanewise.config.load import Override
from lanewise.config.run import RunConfig
from lanewise.errors import ConfigError

_OF_RUN = ("run.jsonl", "metrics.jsonl")  # which each run has
_REMEDY = "If you trust it, add --trust (from Python: trust=True)."

# Others in torch start programs or write files.
_KNOWN = (
    *("torch.nn", "torch.optim", "torch.utils.data", "torch.distributions"),
    *("lanewise.data", "lanewise.lanes", "lanewise.metrics", "lanewise.nn"),
)
_WRITES = "lanewise.data.audit"  # files, in the folder that it is given
# Of the Python that runs; it may be an environment inside of a project, and is the user's own.
_ENVIRONMENT = ("stdlib", "platstdlib", "purelib", "platlib")


def distrust(
    run_dir: Path, config: RunConfig, overrides: Sequence[Override]
) -> tuple[RunConfig, tuple[str, ...]]:
    """Take the search_path away from the configuration of a run, unless the user has chosen what is there.

    It is chosen if the user names it, or if it is the working directory or on Python's path, only the user
    can write there, and it lies in no run.

    Args:
        run_dir: of the run.
        config: what was read from it.
        overrides: with which it was read.

    Returns:
        The configuration, and the folders that no code may come from: the last is that of the search_path.
    """
    assert config.search_path is not None  # load_config makes it absolute
    search_path, here = config.search_path, run_around(Path.cwd())
    is_named = any(override.key == "search_path" for override in overrides)
    refuses_here = here is not None and not (is_named and lies_in(search_path, str(here)))
    runs = (str(run_dir), *[str(here)] * refuses_here)
    is_here = search_path in map(os.path.realpath, (os.curdir, *sys.path))
    is_chosen = is_named or (is_here and run_around(Path(search_path)) is None and _is_own(Path(search_path)))
    if not is_chosen or lies_in(search_path, str(run_dir)):
        return replace(config, search_path=None), (*runs, search_path)
    return config, runs


def run_around(path: Path) -> Path | None:
    """Return the folder of the run that a path lies in, by its name or where links lead; None if in none."""
    folders = (folder for place in _places(str(path)) for folder in (place, *place.parents))
    return next((one for one in folders if any(map(os.path.lexists, map(one.joinpath, _OF_RUN)))), None)


def refuse_unknown(search_path: str | None, cls: type) -> str:
    """Refuse a class that no type asks for, where the configuration may be somebody else's."""
    if _is_known(cls, search_path):
        return ""
    return f"No type in the signature asks for it, and it is not of the project. {_REMEDY}"


def _is_known(found: object, search_path: str | None) -> bool:
    """Tell whether a class or function may be named where no type says what is meant."""
    name = getattr(found, "__module__", None) or ""
    if name != _WRITES and any(f"{name}.".startswith(f"{package}.") for package in _KNOWN):
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or search_path is None:
        return False
    return lies_in(file, search_path) and not _is_installed(file)


@final
class _Anything:
    """An object that only a type which accepts anything accepts."""

    def __call__(self) -> None:
        """Do nothing; a type of functions accepts what can be called."""


def named_in(value: object) -> Iterator[tuple[object, object]]:
    """Yield each class path and function in a value, and the value with `_Anything` in its place."""
    items: Iterable[tuple[Any, object]] = ()
    if isinstance(value, Namespace):  # what jsonargparse makes of a mapping
        value = dict(vars(value))
    if isinstance(value, Mapping):
        items = value.items()
        if isinstance(value.get("class_path"), str):
            yield value["class_path"], _Anything()
    elif isinstance(value, list | tuple | set):
        value = list(value)
        items = enumerate(value)
    elif callable(value):
        yield value, _Anything()
    for key, item in items:
        for found, other in named_in(item):
            changed: Any = copy(value)
            changed[key] = other
            yield found, changed


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
    return any(place.is_relative_to(other) for place in _places(path) for other in _places(folder))


def _places(path: str) -> tuple[Path, Path]:
    return Path(os.path.normpath(Path.cwd() / path)), Path(os.path.realpath(path))


def _is_installed(file: str) -> bool:
    places = _environment()
    if ".." not in file and file.startswith(
        places
    ):  # nearly all of the thousands of modules that are imported
        return True
    return any(lies_in(file, place) for place in places)


@cache
def _environment() -> tuple[str, ...]:
    return tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in _ENVIRONMENT)


def _is_own(folder: Path) -> bool:
    """Tell whether only this user can write into a folder."""
    try:
        status = folder.stat()
    except OSError:  # it is not there
        return False
    others = stat.S_IWOTH | stat.S_IWGRP
    with suppress(KeyError):  # a user without a name
        if folder.group() == folder.owner():  # a group of each user alone
            others = stat.S_IWOTH
    return status.st_uid == os.getuid() and not status.st_mode & others


@final
class _Guard(MetaPathFinder):
    """Refuses modules: python asks it for each one before the finders that would load it."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = folders

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> None:
        """Raise where a module would be loaded from one of the folders, or is a program; never find one."""
        if fullname.endswith(".__main__"):
            raise ConfigError(f"{fullname} is a program. Name a class of a module that only defines it.")
        spec = PathFinder.find_spec(fullname, path, target)
        origin = None if spec is None else spec.origin  # a folder without an __init__.py has none, nor code
        if origin is None or _is_installed(origin):
            return
        if found := [folder for folder in self._folders if lies_in(origin, folder)]:
            yours = "" if found[0] == self._folders[0] else _own(found[0])
            raise ConfigError(
                f"{fullname} would be imported from {origin}, which came with the run, or which only the run "
                f"names, and may be somebody else's. {yours}{_REMEDY}"
            )


def _own(search_path: str) -> str:
    """Write the command that this process runs, with a search_path that the user names."""
    program, *given = sys.argv
    is_ours = program.endswith((f"{os.sep}lanewise", "lanewise/__main__.py"))
    command = shlex.join(["lanewise", *(given if is_ours else ["..."]), "--search_path", search_path])
    return f"If it is yours: {command}. "
