"""The environment variables that must be there before torch is imported."""

import os
import sys

import pytest

from lanewise.config import pin_environment
from lanewise.errors import ConfigError

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


@pytest.mark.parametrize(("value", "shown"), [(None, "it unset"), ("AVX2", "AVX2")])
def test_exact_comes_too_late_after_torch(monkeypatch, value, shown):
    monkeypatch.setitem(sys.modules, "torch", None)
    if value:
        monkeypatch.setenv("MKL_CBWR", value)
    with pytest.raises(ConfigError, match=f"before torch is imported: got {shown}") as caught:
        pin_environment(threads=1, equality="exact")
    assert "Start the program with MKL_CBWR=AUTO" in str(caught.value)
    assert os.environ.get("MKL_CBWR") == value


def test_exact_after_torch_is_fine_if_it_was_set_in_time(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("MKL_CBWR", "AUTO")
    pin_environment(threads=1, equality="exact")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_close_does_not_mind_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    pin_environment(threads=3, equality="close")
    assert os.environ["OMP_NUM_THREADS"] == "3"
