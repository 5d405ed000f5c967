"""Helpers for tests of distributed code, lanewise's own and its users'."""

from lanewise.testing.distributed import run_distributed
from lanewise.testing.verified import require_verified

__all__ = ["require_verified", "run_distributed"]
