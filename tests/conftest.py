"""Prepares the environment before any test imports torch, as the command line does."""

import os
import signal

import pytest
from hypothesis import settings

from lanewise.config import pin_environment
from tests.server import warm_up

pin_environment(threads=1, equality="exact")
# Warnings are errors in the processes that tests start as well; pytest's own setting ends at this process.
os.environ["PYTHONWARNINGS"] = "error::FutureWarning,error::UserWarning"

# A shell lets what it starts in the background ignore Ctrl-C, and the commands under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says nothing where other programs run beside the tests.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """Start the server, unless this process only hands the tests to others."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        warm_up({})
