"""The environment variables that must be there before MKL computes."""

import os
import sys

import pytest
import torch

from lanewise.config import pin_environment
from lanewise.errors import ConfigError
from lanewise.testing import run_distributed

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


def pin_late(world, equality, computes, value):
    """Pin in a process that has torch, and has computed with it or not, under a value of MKL_CBWR."""
    if value is None:
        os.environ.pop("MKL_CBWR", None)
    else:
        os.environ["MKL_CBWR"] = value
    if computes:
        torch.ones(64, 64) @ torch.ones(64, 64)
    try:
        pin_environment(threads=1, equality=equality)
    except ConfigError as error:
        return str(error)
    return ""


TOO_LATE = "equality exact needs MKL_CBWR=AUTO to be set before MKL is first used"


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
@pytest.mark.parametrize(
    ("equality", "computes", "value", "said"),
    [
        ("exact", False, None, ""),
        ("exact", False, "COMPATIBLE", ""),
        ("exact", True, "AUTO", ""),
        ("close", True, None, ""),
        ("exact", True, None, TOO_LATE),
        ("exact", True, "COMPATIBLE", TOO_LATE),
    ],
)
def test_exact_comes_too_late_only_where_mkl_has_computed(equality, computes, value, said):
    (printed,) = run_distributed(pin_late, 1, equality, computes, value)
    assert printed.startswith(said)
    assert bool(printed) == bool(said)
