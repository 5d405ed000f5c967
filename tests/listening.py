"""Finds where processes wait for calls."""

import ipaddress
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_LISTEN, _IS_LISTENING = "0A", 0x10000


def addresses(pids: Iterable[int]) -> set[str]:
    """Return where anybody may call some processes: addresses of TCP, and names that are no file's."""
    own = set()
    for pid in pids:
        with suppress(OSError):  # it ended meanwhile
            for number in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    own.add(str(number.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for _, address, _, state, *fields in _rows(table):
            if state == _LISTEN and f"socket:[{fields[5]}]" in own:
                words = bytes.fromhex(address.partition(":")[0])
                count = len(words) // 4  # each in the order of this machine
                packed = struct.pack(f"!{count}I", *struct.unpack(f"={count}I", words))
                found.add(str(ipaddress.ip_address(packed)))
    for _, _, _, flags, _, _, inode, *name in _rows("unix"):
        if int(flags, 16) & _IS_LISTENING and f"socket:[{inode}]" in own and "".join(name).startswith("@"):
            found.add(name[0])
    return found


def _rows(table: str) -> list[list[str]]:
    return [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
