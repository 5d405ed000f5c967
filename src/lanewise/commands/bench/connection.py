"""How a process that is measured and the one that measures talk: JSON, a line for each message."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any, final


@final
class JsonConnection:
    """One end of a connection between two processes of this machine.

    Args:
        connection: to the other end.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("r", encoding="utf-8")

    @classmethod
    def to(cls, address: Path) -> "JsonConnection":
        """Connect to whoever listens at an address."""
        connection = socket.socket(socket.AF_UNIX)
        with _short(address) as path:
            connection.connect(path)
        return cls(connection)

    def send(self, message: Any) -> None:
        """Send what JSON can express.

        Raises:
            OSError: the other end has gone.
        """
        self._connection.sendall(f"{json.dumps(message)}\n".encode())

    def has_come(self, timeout_seconds: float) -> bool:
        """Wait for a message, or for the end of the connection; tell whether there is one."""
        return bool(select([self._connection], [], [], timeout_seconds)[0])

    def receive(self) -> Any:
        """Wait for the next message, and return it.

        Raises:
            EOFError: the other end has gone.
        """
        if not (line := self._lines.readline()):
            raise EOFError
        return json.loads(line)

    def close(self) -> None:
        """Let the other end know that this one has gone."""
        self._lines.close()
        self._connection.close()


def listen(address: Path, backlog: int) -> socket.socket:
    """Return a socket that listens at an address."""
    listener = socket.socket(socket.AF_UNIX)
    with _short(address) as path:
        listener.bind(path)
    listener.listen(backlog)
    return listener


@contextmanager
def _short(address: Path) -> Iterator[str]:
    """Give a short path to a file; that of a socket has at most 107 characters, and TMPDIR may have more."""
    folder = os.open(address.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{address.name}"
    finally:
        os.close(folder)
