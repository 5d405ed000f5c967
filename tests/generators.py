"""The default generators of python, numpy and torch, which belong to the user's script."""

from collections.abc import Iterator
from contextlib import contextmanager

from lanewise.processes.device.random_state import generator_states


@contextmanager
def unmoved_generators() -> Iterator[None]:
    """Require that none of them gave a number, or was seeded, in the block."""
    before = generator_states()
    yield
    assert [name for name, state in generator_states().items() if state != before[name]] == []
