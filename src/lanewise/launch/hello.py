"""Who a host is, and whether other hosts reach it."""

import fcntl
import os
import platform
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated

Port = Annotated[int, range(1, 2**16)]

_SIOCGIFADDR = 0x8915  # of linux/sockios.h
_TOKEN_BYTES = 16
_SECONDS_TO_REACH = 3.0
TIMED_OUT = "timed out"
"""Why a host can't be reached that may be busy."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a host says of itself first."""

    lanewise: str
    torch: str
    python: str
    """The version of python."""
    executable: str
    addresses: Sequence[tuple[str, str]]
    """The addresses where others may reach it, the likeliest first, and the interface of each."""
    port: Port
    """Who connects there is sent the token, which proves that it is this host."""
    token: str

    @property
    def versions(self) -> dict[str, str]:
        """The versions that all hosts must have; of python's, the last number does not matter."""
        return {"lanewise": self.lanewise, "torch": self.torch, "python": self.python.rpartition(".")[0]}


def say_hello(listener: socket.socket) -> Hello:
    """Describe this machine, and tell who calls the listener which machine it is, until that is shut down."""
    token = secrets.token_hex(_TOKEN_BYTES)
    threading.Thread(target=_answer, args=(listener, token), daemon=True).start()
    return describe_machine(listener.getsockname()[1], token)


def describe_machine(port: int = 0, token: str = "") -> Hello:
    """Describe this machine, where nobody calls it."""
    return Hello(
        lanewise=version("lanewise"),
        torch=version("torch"),
        python=platform.python_version(),
        executable=sys.executable,
        addresses=list(_addresses()),
        port=port,
        token=token,
    )


def _addresses() -> Iterator[tuple[str, str]]:
    """Yield this machine's IPv4 addresses: first that by which the launcher came, last that of loopback."""
    called = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, interface in socket.if_nameindex():
            with suppress(OSError):  # it has none
                request = struct.pack("256s", interface.encode()[:15])
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
                found[socket.inet_ntoa(answer[20:24])] = interface
    yield from sorted(found.items(), key=lambda item: (item[0] not in called, is_loopback(item)))


def is_loopback(place: tuple[str, str]) -> bool:
    """Tell whether nobody but the host itself reaches one of its addresses."""
    return place[0].startswith("127.")


def _answer(listener: socket.socket, token: str) -> None:
    with suppress(OSError):  # it was shut down
        while True:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.sendall(token.encode())


def call(token: str, address: str, port: int) -> str:
    """Call a host; return why it can't be reached at an address, or nothing."""
    try:
        with socket.create_connection((address, port), timeout=_SECONDS_TO_REACH) as connection:
            received = connection.recv(2 * _TOKEN_BYTES, socket.MSG_WAITALL).decode(errors="replace")
    except TimeoutError:
        return TIMED_OUT
    except (OSError, ValueError) as error:  # an address may be any text
        return getattr(error, "strerror", None) or str(error)
    return "" if received == token else "another machine answers"
