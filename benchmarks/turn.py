"""Lets a training go on only while it is its turn, without a change to its loop: its dataset waits.

Every read of a sample is counted. When the samples of a turn have been read, the read waits for the next
turn. So a library's own loop, whatever it is, is measured from the outside: a turn is so many samples of its
steady state. Only rank 0 needs to wait: the other ranks then wait for its gradients.
"""

import time
from multiprocessing.connection import Connection
from typing import Any


class Turn:
    """The turns of this process, by the order of those who measure.

    Args:
        connection: to those who measure; without one, every read goes on at once.
        num_samples: how many samples are read in a turn.
    """

    def __init__(self, connection: "Connection[Any, Any] | None", num_samples: int) -> None:
        self._connection = connection
        self._num_samples = num_samples
        self._num_left = 0
        self._start = time.perf_counter()

    def read(self, num_samples: int) -> None:
        """Count samples that are about to be read; wait where the turn has ended before them."""
        if self._connection is not None and self._num_left <= 0:
            self._connection.send(time.perf_counter() - self._start)
            self._connection.recv()
            self._num_left += self._num_samples
            self._start = time.perf_counter()
        self._num_left -= num_samples

    def end(self, result: object) -> None:
        """Say what came of the training."""
        if self._connection is not None:
            self._connection.send(result)


current = Turn(None, 0)
"""That of this process."""


def follow(file: int, num_samples: int) -> None:
    """Wait for turns from now on, by the order of those at the other end of a pipe."""
    global current  # noqa: PLW0603 - datasets find it here, whoever builds them
    current = Turn(Connection(file), num_samples)
