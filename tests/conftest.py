"""Prepares the environment before any test imports torch, as the command line does."""

import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from lanewise.config import pin_environment
from tests import server, worlds
from tests.patience import patient
from tests.timing import Timing

ROOT = Path(__file__).parents[1]
_CACHE = pytest.StashKey[str]()

pin_environment(threads=1, equality="exact")
# Warnings are errors in the processes that tests start as well; pytest's own setting ends at this process.
# Torch's, of a machine with fewer cores than workers, is of the machine.
os.environ["PYTHONWARNINGS"] = (
    "error::FutureWarning,error::UserWarning,ignore:This DataLoader will create:UserWarning"
)
# The server imports libraries that ask for GPUs while they are imported. Without this, torch would answer by
# the driver, which a process that forks must not open.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

# The server imports a module of the tests. In a worker of xdist the path is there already: with a second one,
# forks of the server would find its environment to be another than theirs, and start servers of their own.
paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))

# A shell lets what it starts in the background ignore Ctrl-C, and the commands under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says nothing where other programs run beside the tests.
settings.register_profile("all", deadline=None)
settings.register_profile("fast", deadline=None, max_examples=30)


@pytest.fixture(autouse=True)
def forget_modules_of_the_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget what a test imported from its temporary folder: the next may write a module of that name."""
    before = set(sys.modules)
    yield
    temporary = str(tmp_path_factory.getbasetemp())
    found = []
    for name in sys.modules.keys() - before:
        module = sys.modules[name]
        places = (getattr(module, "__file__", None), *getattr(module, "__path__", ()))
        if any(str(place).startswith(temporary) for place in places):
            found.append(name)
    for name in found:  # afterwards: the path of a package without a file is asked of its parent
        del sys.modules[name]


@pytest.fixture(autouse=True, scope="module")
def end_worlds() -> Iterator[None]:
    """End the worlds that the tests of a file share."""
    yield
    worlds.end_worlds()


@pytest.fixture(autouse=True)
def keep_log_level() -> Iterator[None]:
    """Put back the level of the log, which jobs raise in what is usually a process of their own."""
    level = logging.root.level
    yield
    logging.root.setLevel(level)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if not shutil.which("mount") or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a file system of one MiB cannot be mounted: that needs root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a whole run be recorded."""
    parser.addoption("--record-seconds", action="store_true", help="write what each file of tests took")


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples are tried; start the server that tests fork from, or join it in a worker."""
    config.pluginmanager.register(
        Timing(config.option.markexpr, is_recorded=config.getoption("record_seconds"))
    )
    settings.load_profile("fast" if "not slow" in config.option.markexpr else "all")
    if not hasattr(config, "workerinput"):  # else it is set already, before the server started
        config.stash[_CACHE] = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="lanewise-cache-")
    if hasattr(config, "workerinput"):
        server.join(config.workerinput["server"])
    else:
        server.start()
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        gc.disable()  # what is imported stays
        import_module("tests.light")  # in each process that collects tests


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what examples and data sets kept: no run of the tests finds what another one left."""
    if _CACHE in config.stash:
        shutil.rmtree(config.stash[_CACHE], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let a test take longer on a slow machine before it counts as one that hangs."""
    usual = float(config.getini("timeout"))
    for item in items:
        limit = item.get_closest_marker("timeout")
        item.add_marker(pytest.mark.timeout(patient(limit.args[0] if limit else usual)), append=False)


def pytest_collection_finish() -> None:
    """Keep collections of garbage from what was imported, which each fork of this process would copy."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let a worker of xdist join the server of this process."""
    address = node.config._tmp_path_factory.getbasetemp() / f"server-{node.gateway.id}"
    server.share(address)
    node.workerinput["server"] = str(address)
