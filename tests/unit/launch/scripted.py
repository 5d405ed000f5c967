"""Hosts that say what a test lets them say."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from queue import SimpleQueue
from threading import Event as Flag
from typing import Any

from lanewise.launch.agree import Project
from lanewise.launch.hello import Hello, describe_machine
from lanewise.launch.host import MARK
from lanewise.launch.wire import Event, RemoteHost, Wire

PROJECT = Project(
    folder="/home/me",
    variables={},
    pins={},
    search_path="/home/me",
    sources={},
    run_dir=None,
    limit_seconds=None,
    start_seconds=None,
)
HELLO = replace(describe_machine(port=1024), addresses=[("10.0.0.1", "eth0"), ("127.0.0.1", "lo")])


class Scripted(Wire):
    """Says some lines, and answers to each call with one."""

    remedy = "It must start."

    def __init__(self, *lines: bytes, answer: Callable[[str], bytes] = lambda _: b"") -> None:
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        for line in lines:
            self.say(line)
        self.answer = answer
        self.closed = Flag()

    def say(self, line: bytes) -> None:
        """Let it say a line; an empty one is its end."""
        self._lines.put(line)

    def send(self, line: bytes) -> None:
        kind, *rest = json.loads(line)
        if kind == "call":
            self.say(self.answer(rest[0]))

    def read(self) -> bytes:
        line = self._lines.get()
        return line and line + b"\n"

    def read_error(self) -> bytes:
        return b""

    def close(self) -> None:
        self.closed.set()

    def why_ended(self) -> str:
        return ""


def say_hello(hello: Hello = HELLO, **changes: object) -> bytes:
    """Return the first line of a host."""
    return MARK.encode() + json.dumps({**asdict(hello), **changes}).encode()


def make_host(wire: Wire, first_rank: int = 0, name: str = "gpu1") -> "tuple[RemoteHost, SimpleQueue[Event]]":
    """Return a host with two workers, and what it says by itself."""
    events: SimpleQueue[Event] = SimpleQueue()
    return RemoteHost(name, 2, first_rank, wire, events), events


def answering(answers: Mapping[str, Any]) -> Callable[[str], bytes]:
    """Answer to each call by its name."""
    return lambda name: json.dumps(["reply", answers.get(name)]).encode()
