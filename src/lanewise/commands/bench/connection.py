"""Connects a process that is measured with the one that measures, through a socket of this machine."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def connect(address: Path) -> "Connection[Any, Any]":
    """Connect to whoever listens at an address."""
    connection = socket.socket(socket.AF_UNIX)
    with _short(address) as path:
        connection.connect(path)
    return Connection(connection.detach())


def listen(address: Path, backlog: int) -> socket.socket:
    """Return a socket that listens at an address."""
    listener = socket.socket(socket.AF_UNIX)
    with _short(address) as path:
        listener.bind(path)
    listener.listen(backlog)
    return listener


def accept(listener: socket.socket) -> "Connection[Any, Any]":
    """Wait until somebody connects."""
    connection, _ = listener.accept()
    return Connection(connection.detach())


def send(connection: "Connection[Any, Any]", message: Any) -> None:
    """Send what JSON can express: nothing that another process sent is unpickled."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: "Connection[Any, Any]") -> Any:
    """Wait for the next message, and return it."""
    return json.loads(connection.recv_bytes())


@contextmanager
def _short(address: Path) -> Iterator[str]:
    """Give a short path to a file; that of a socket has at most 107 characters, and TMPDIR may have more."""
    folder = os.open(address.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{address.name}"
    finally:
        os.close(folder)
