"""Marks the cases of a parametrized test that only `make test-all` runs."""

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """Mark cases; a tuple is one value for each of several parameters."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
