"""The server that processes are forked from has what they need."""

import gc
import sys

from lanewise.testing import run_distributed


def look(world):
    return "torch._dynamo" in sys.modules, gc.get_freeze_count()


def test_a_rank_imports_and_copies_little():
    """A module of the server's list that cannot be imported is left out without a word."""
    ((is_imported, num_frozen),) = run_distributed(look, 1)
    assert is_imported
    assert num_frozen > 100_000
