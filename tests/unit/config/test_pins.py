"""The environment variables that must be there before MKL computes."""

import os
import subprocess
import sys

import pytest
import torch

from lanewise.config import pin_environment

VARIABLES = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR", "CUBLAS_WORKSPACE_CONFIG"]


@pytest.fixture(autouse=True)
def _no_pins_and_no_torch(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # remembers the value, which pin_environment changes, for the end
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def pins() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in VARIABLES}


def test_close_fixes_the_threads_alone():
    pin_environment(threads=2, equality="close")
    assert pins() == {
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "MKL_CBWR": None,
        "CUBLAS_WORKSPACE_CONFIG": None,
    }


def test_exact_fixes_the_code_paths_too(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    pin_environment(threads=1, equality="exact")
    assert pins() == {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "MKL_CBWR": "AUTO",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


AFTER_TORCH = """
import sys, torch
from lanewise.config import pin_environment
from lanewise.errors import ConfigError
if "compute" in sys.argv:
    torch.ones(64, 64) @ torch.ones(64, 64)
try:
    pin_environment(threads=1, equality=sys.argv[1])
except ConfigError as error:
    print(error)
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
@pytest.mark.parametrize(
    ("arguments", "value", "said"),
    [
        (["exact"], None, ""),
        (["exact"], "COMPATIBLE", ""),
        (["exact", "compute"], "AUTO", ""),
        (["close", "compute"], None, ""),
        (["exact", "compute"], None, "equality exact needs MKL_CBWR=AUTO from before MKL computes"),
        (["exact", "compute"], "COMPATIBLE", "equality exact needs MKL_CBWR=AUTO from before MKL computes"),
    ],
)
def test_exact_comes_too_late_only_where_mkl_has_computed(arguments, value, said):
    environment = dict(os.environ) if value is None else {**os.environ, "MKL_CBWR": value}
    printed = subprocess.check_output([sys.executable, "-c", AFTER_TORCH, *arguments], env=environment)
    assert printed.decode().startswith(said)
    assert bool(printed) == bool(said)
