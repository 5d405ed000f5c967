"""Finds where processes wait for calls, and where one may."""

import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_LISTEN, _IS_LISTENING = "0A", 0x10000


def reserve_port() -> int:
    """Return a port of this machine that a program may listen at, and which nobody gets who asks for any.

    A socket is bound to it as long as this process lives, and does not listen. A port that was only seen to
    be free could be another test's by the time that the program starts.
    """
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", 0))
    port = int(bound.getsockname()[1])
    bound.detach()
    return port


def addresses(pids: Iterable[int]) -> set[str]:
    """Return where anybody may call some processes: addresses of TCP, and names that are no file's."""
    own = _sockets_of(pids)
    found = {address for address, _ in _endpoints(own)}
    for _, _, _, flags, _, _, inode, *name in _rows("unix"):
        if int(flags, 16) & _IS_LISTENING and f"socket:[{inode}]" in own and "".join(name).startswith("@"):
            found.add(name[0])
    return found


def ports(pids: Iterable[int]) -> set[int]:
    """Return the ports of TCP at which some processes wait for calls."""
    return {port for _, port in _endpoints(_sockets_of(pids))}


def _sockets_of(pids: Iterable[int]) -> set[str]:
    own = set()
    for pid in pids:
        with suppress(OSError):  # it ended meanwhile
            for number in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    own.add(str(number.readlink()))
    return own


def _endpoints(own: set[str]) -> Iterator[tuple[str, int]]:
    """Yield address and port of each of these sockets that listens for TCP."""
    for table in ("tcp", "tcp6"):
        for _, address, _, state, *fields in _rows(table):
            if state == _LISTEN and f"socket:[{fields[5]}]" in own:
                host, _, port = address.partition(":")
                words = bytes.fromhex(host)
                count = len(words) // 4  # each in the order of this machine
                packed = struct.pack(f"!{count}I", *struct.unpack(f"={count}I", words))
                yield str(ipaddress.ip_address(packed)), int(port, 16)


def _rows(table: str) -> list[list[str]]:
    return [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
