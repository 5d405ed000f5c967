"""Helpers for tests of distributed code, lanewise's own and its users'."""

from lanewise.testing.distributed import run_distributed

__all__ = ["run_distributed"]
