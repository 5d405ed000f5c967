"""Runs the workers of a job on several hosts, each of which runs its own part."""

import base64
import math
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from queue import Empty, SimpleQueue
from typing import final

from lanewise.launch.agent import JobFiles, Place, Workers
from lanewise.launch.agree import Agreement, Project, interface_variables
from lanewise.launch.launcher import Launcher, count_processes, run_again
from lanewise.launch.wire import STDERR, Event, HostError, RemoteHost, Wire
from lanewise.processes.watch.channel import SILENCE, STORE_LOST, failure_of
from lanewise.processes.watch.failure import LOST_HOST, Failure

_ERASE = "\r\033[K"
_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_BETWEEN_TRIES = 5.0
_SECONDS_FOR_THE_TRUTH = 3.0
"""How long to wait, after a first sign that something is wrong, for what the other hosts say."""


@dataclass
class RemoteLauncher(Launcher):
    """Starts a process on each host, which runs the workers there."""

    project: Project
    """What all hosts have."""
    num_starts: int = 0
    """How often the same launch was started before, by Slurm for instance."""

    @abstractmethod
    def connect(self) -> list[tuple[str, int, Wire]]:
        """Start a process on each host; return the host's name, its number of workers and the wire to it."""

    @contextmanager
    def hosts(self) -> Iterator[tuple[list[RemoteHost], "SimpleQueue[Event]"]]:
        """Connect to all hosts, and end what runs there in the end."""
        events: SimpleQueue[Event] = SimpleQueue()
        wires = self.connect()
        first_ranks = accumulate((number for _, number, _ in wires), initial=0)
        hosts = [
            RemoteHost(name, number, first_rank, wire, events)
            for (name, number, wire), first_rank in zip(wires, first_ranks, strict=False)
        ]
        try:
            yield hosts, events
        finally:
            closing = [threading.Thread(target=host.close) for host in hosts]
            for thread in closing:
                thread.start()
            for thread in closing:
                thread.join()

    def run(self, workers: Workers, files: JobFiles) -> None:

        def run_once(num_restarts: int) -> Failure | None:
            files.begun.unlink(missing_ok=True)  # until it is there again, a signal ends this process at once
            try:
                with self._agreed(files, is_again=num_restarts > 0) as (agreement, events):
                    if not num_restarts:
                        _show(agreement)
                    _start(agreement, workers, files.job.read_bytes(), self.num_starts + num_restarts)
                    return _Run(agreement.hosts, events, files, self.project.limit_seconds).wait()
            except HostError as error:
                return _lost(error.host, error.why)

        run_again(workers, STDERR, run_once)

    @contextmanager
    def _agreed(self, files: JobFiles, *, is_again: bool) -> "Iterator[tuple[Agreement, SimpleQueue[Event]]]":
        """Connect to hosts that can train together; a host that may be busy, or start up, is waited for.

        Args:
            files: of this process.
            is_again: whether they could before, so that a host which is not there is no mistake of the user.

        Raises:
            ConfigError: lists what is wrong.
            HostError: one of them is not there again in time.
        """
        limit = self.project.start_seconds
        deadline = time.monotonic() + (math.inf if limit is None else limit)
        is_told = False
        while True:
            with self.hosts() as (hosts, events):
                agreement = Agreement(hosts, self.project)
                agreement.look()
                if not agreement.faults:
                    yield agreement, events
                    return
            is_late = time.monotonic() > deadline or files.stop.exists()
            if not agreement.may_pass(is_again=is_again) or (is_late and not is_again):
                agreement.require()
            name, _, text = agreement.faults[0]
            if is_late:
                raise HostError(next(host for host in hosts if host.name == name), text)
            if not is_told:
                is_told = True
                _write(STDERR, f"waiting for host {name}: {text}")
            time.sleep(_SECONDS_BETWEEN_TRIES)


def _show(agreement: Agreement) -> None:
    """Say what is used on each host."""
    for host in agreement.hosts:
        site = agreement.sites[host]
        interface = host.interfaces[0] or site.interface
        program = f"{count_processes(host.num_processes)} of {host.hello.executable}"
        where = f"{site.address}{f' ({interface})' if interface else ''}"
        _write(STDERR, f"{host.name}: {program} in {agreement.project}, at {where}")


def _start(agreement: Agreement, workers: Workers, job: bytes, num_restarts: int) -> None:
    """Start the workers of all hosts."""
    first = agreement.hosts[0]
    address = agreement.sites[first].address
    port = first.call("open_store", address=address)
    world_size = sum(host.num_processes for host in agreement.hosts)
    for node, host in enumerate(agreement.hosts):
        place = Place(
            num_processes=host.num_processes,
            world_size=world_size,
            first_rank=host.first_rank,
            node=node,
            address=address,
            num_restarts=num_restarts,
        )
        variables = {**workers.variables, **interface_variables(host, agreement.sites[host])}
        given = asdict(replace(workers, variables=variables))
        host.call("run", workers=given, place=asdict(place), job=base64.b64encode(job).decode(), port=port)


@final
@dataclass
class _Run:
    """Waits for the workers of all hosts, and passes on what is said."""

    hosts: Sequence[RemoteHost]
    """All of them, with their workers started."""
    events: "SimpleQueue[Event]"
    """What they say."""
    files: JobFiles
    """The files of this process."""
    limit_seconds: float | None
    heard: dict[RemoteHost, tuple[int, float]] = field(default_factory=dict)
    """How often each had said something when that was last seen to change, and when that was."""
    ended: dict[RemoteHost, Failure | None] = field(default_factory=dict)
    is_told_to_stop: bool = False

    def wait(self) -> Failure | None:
        """Return when all hosts have done their part, or with the failure of one."""
        deadline = math.inf
        while len(self.ended) < len(self.hosts) and time.monotonic() < deadline:
            with suppress(Empty):
                self._take(self.events.get(timeout=_SECONDS_BETWEEN_LOOKS))
            self._pass_wish_on()
            self._look_for_silence()
            if deadline == math.inf and any(self.ended.values()):
                deadline = time.monotonic() + _SECONDS_FOR_THE_TRUTH
        failures = [failure for failure in self.ended.values() if failure is not None]
        # What says only that somebody is lost comes last.
        vague = {LOST_HOST: 1, STORE_LOST: 2, SILENCE: 3}
        return min(failures, key=lambda failure: vague.get(failure.kind, 0), default=None)

    def _take(self, event: Event) -> None:
        """Do what an event asks for."""
        host, kind, values = event
        if kind == "out":
            rank, number, text = values
            _write(number, f"{host.name} rank {rank}: {text}")
        elif kind == "begun":
            self.files.begun.touch()
        elif kind == "ended":
            self.ended[host], result = values
            if result is not None:
                self.files.result.write_bytes(result)
        elif host not in self.ended:
            self.ended[host] = _lost(host, values[0])

    def _pass_wish_on(self) -> None:
        """Tell all hosts once that the run shall stop, if it shall."""
        if not self.is_told_to_stop and self.files.stop.exists():
            self.is_told_to_stop = True
            for host in self.hosts:
                host.send("stop")

    def _look_for_silence(self) -> None:
        """Give up the hosts that said nothing for too long."""
        now = time.monotonic()
        for host in self.hosts:
            number, since = self.heard.get(host, (-1, now))
            if host.num_heard != number:
                self.heard[host] = host.num_heard, now
            elif self.limit_seconds is not None and now - since > self.limit_seconds:
                what = f"it said nothing for {self.limit_seconds:g} s"
                self.ended.setdefault(host, _lost(host, f"{what}: it is stopped, or the way to it is cut"))


def _lost(host: RemoteHost, why: str) -> Failure:
    """Describe a host that is lost."""
    text = f"host {host.name}: {why.rstrip('.')}."
    return replace(failure_of(host.first_rank, None, LOST_HOST, text), host=host.name)


def _write(number: int, line: str) -> None:
    # On a terminal something that turns may be on the line, which is erased.
    is_smart = os.isatty(number) and os.environ.get("TERM") != "dumb"
    with suppress(OSError):  # nobody listens
        text = f"{_ERASE if is_smart else ''}{line}\n"
        os.write(number, text.encode(errors="backslashreplace"))
