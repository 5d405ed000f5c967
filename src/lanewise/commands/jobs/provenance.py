"""Tells what a start of a run is made of: versions, sources, machines, configuration."""

import hashlib
import json
import os
import platform
import site
import socket
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lanewise.engine.run.run import Run
    from lanewise.task import Task

_GIT_SECONDS = 2.0
NOT_FINITE = "not_finite"
"""The key of a mapping that stands for a number which JSON lacks, and has its name."""
INSTALLED = tuple(
    {
        *site.getsitepackages(),
        site.getusersitepackages(),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(__file__).parents[2]),
    }
)
"""What comes from there has a version."""


def describe_start(run: "Run", first_step: int) -> dict[str, Any]:
    """Return what run.jsonl says of a start. Collective: every rank must call this.

    Args:
        run: built, on every rank.
        first_step: the index of the first step of this start.
    """
    from lanewise.processes.device.accelerator import device_name

    world = run.world
    replicas = run.reducer.replicas
    devices = (
        [world.device] if len(replicas) == 1 else [next(model.parameters()).device for model in replicas]
    )
    names = [device_name(device) for device in devices]
    places = world.all_gather_tree([socket.gethostname(), names])
    config = json.dumps(asdict(run.config), default=str)
    return {
        "first_step": first_step + 1,
        "last_step": run.last_step,
        "world_size": world.world_size,
        "hosts": Counter(host for host, _ in places),
        "devices": Counter(name for _, of_rank in places for name in of_rank),
        "versions": versions(run),
        "sources": sources(run.runner.task, run.config.search_path),
        "dataset": run.loader.identity,
        "config": json.loads(config, parse_constant=lambda name: {NOT_FINITE: name}),
    }


def versions(run: "Run") -> dict[str, str]:
    """Return what the numbers of a run depend on besides its configuration and the task."""
    from lanewise.processes.device.determinism import exact_pins

    packages = {name: version(name) for name in ("lanewise", "numpy", "torch")}
    return {**packages, "python": platform.python_version(), **exact_pins(run.world.device)}


def sources(task: "Task", search_path: str | None) -> dict[str, str]:
    """Return the SHA-256 of the user's modules that were imported so far, by their names.

    These are the modules of the task's package and those below the search path, without what is installed.
    A class that no module of this process has, as that of a script which started the run, was sent without
    its module: the file in which its methods were written counts. One without a file, as in a notebook, is
    left out.
    """
    files = _files(task, search_path).items()
    return {name: hashlib.sha256(Path(file).read_bytes()).hexdigest() for name, file in files}


def commit_of(task: "Task", search_path: str | None) -> dict[str, Any] | None:
    """Return the commit of the repository that has the user's modules, and whether they are as it has them.

    None where git does not tell: a module is in no repository, or git is not there, or takes too long. It is
    not asked where the folder is another user's, since a repository can name programs that git runs.
    """
    folder, files = search_path or str(Path.cwd()), _files(task, search_path).values()
    options = ("-c", "core.fsmonitor=false", "--no-optional-locks", "--literal-pathspecs")
    what = ("--porcelain=v2", "--branch", "--untracked-files=all", "--ignored")
    command = ["git", "-C", folder, *options, "status", *what, "--", *files]
    pipes: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
    try:
        if not files or Path(folder).stat().st_uid != os.getuid():
            return None
        head, *lines = subprocess.run(command, check=True, timeout=_GIT_SECONDS, **pipes).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    is_clean = all(line.startswith("# ") for line in lines)
    return {"commit": head.removeprefix("# branch.oid "), "is_clean": is_clean}


def _files(task: "Task", search_path: str | None) -> dict[str, str]:
    found = [*own_modules(type(task), search_path), *_file_of_script(type(task))]
    return {name: file for name, file in sorted(found) if Path(file).is_file()}


def own_modules(task: type, search_path: str | None) -> Iterator[tuple[str, str]]:
    """Yield the names and files of the modules that were imported from a task's package or a search path."""
    packages = {cls.__module__.partition(".")[0] for cls in task.__mro__} - {"__main__"}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name == "__main__" or not isinstance(file, str) or file.startswith(INSTALLED):
            continue
        is_below = search_path is not None and Path(file).is_relative_to(search_path)
        if is_below or name.partition(".")[0] in packages:
            yield name, file


def _file_of_script(task: type) -> Iterator[tuple[str, str]]:
    for cls in task.__mro__:
        for member in vars(cls).values() if cls.__module__ == "__main__" else ():
            if hasattr(member, "__code__"):
                yield "__main__", member.__code__.co_filename
