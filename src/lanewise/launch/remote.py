"""Runs the workers of a job on several hosts, each of which runs its own part."""

import base64
import json
import math
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from queue import Empty, SimpleQueue
from typing import Any, final

from lanewise.errors import ConfigError, PreemptedError
from lanewise.launch.agent import LAUNCH_VARIABLE, JobFiles, Place, Workers
from lanewise.launch.agree import Agreement, Project, interface_variables
from lanewise.launch.launcher import Launcher, count_processes, run_again
from lanewise.launch.membership import RESIZED, Members
from lanewise.launch.wire import STDERR, Event, HostError, RemoteHost, Wire
from lanewise.processes.watch.channel import STORE_LOST, failure_of
from lanewise.processes.watch.failure import LOST_HOST, SILENCE, Failure

_ERASE = "\r\033[K"
_SECONDS_BETWEEN_CHECKS = 0.2
_SECONDS_BETWEEN_TRIES = 5.0
_SECONDS_BETWEEN_QUESTIONS = 30.0
"""How often hosts that are not in use are asked whether they can join."""
_SECONDS_AFTER_A_DRAIN = 300.0
"""When a host that was told to stop is asked for the first time."""
_SECONDS_FOR_THE_TRUTH = 3.0
"""How long to wait, after a first sign that something is wrong, for what the other hosts say."""


@dataclass
class RemoteLauncher(Launcher):
    """Starts a process on each host, which runs the workers there."""

    project: Project
    """What all hosts have."""
    num_starts: int = 0
    """How often the same launch was started before, by Slurm for instance."""

    hosts_named: Sequence[tuple[str, int]] = ()
    """The name of each host, where they have names, with its number of workers."""

    @abstractmethod
    def connect(self, names: Collection[str] | None = None) -> list[tuple[str, int, Wire]]:
        """Start a process on each host, or on those with some names.

        Returns:
            The name of each, its number of workers and the wire to it.
        """

    @contextmanager
    def hosts(
        self, names: Collection[str] | None = None
    ) -> Iterator[tuple[list[RemoteHost], "SimpleQueue[Event]"]]:
        """Connect to all hosts, or to those with some names, and end what runs there in the end."""
        events: SimpleQueue[Event] = SimpleQueue()
        wires = self.connect(names)
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
        elastic = self.project.elastic
        members = Members(workers.max_restarts, None if elastic is None else elastic.min_hosts)
        has_begun = False

        def run_once(num_restarts: int) -> Failure | None:
            nonlocal has_begun
            for file in (files.begun, files.result):  # until it has begun, a signal ends this process at once
                file.unlink(missing_ok=True)
            try:
                goes_on = has_begun and elastic is not None
                with self._agreed(files, members, num_restarts, goes_on=goes_on) as (agreement, events):
                    if not num_restarts:
                        _show(agreement)
                    told = {"launch": self.project.launch_id, **_begin(members, agreement)}
                    variables = {**workers.variables, LAUNCH_VARIABLE: json.dumps(told)}
                    given = replace(workers, variables=variables), files.job.read_bytes()
                    _start(agreement, *given, self.num_starts + num_restarts)
                    run = _Run(agreement.hosts, events, files, self.project.limit_seconds)
                    over = threading.Event()
                    threading.Thread(target=self._ask_others, args=(members, run, over), daemon=True).start()
                    failure = run.wait()
                    over.set()
                has_begun = has_begun or files.begun.exists()
                return self._next(members, run, failure)
            except HostError as error:
                return _lost(error.host, error.why)

        run_again(workers.signals, STDERR, members, run_once)

    def _next(self, members: Members, run: "_Run", failure: Failure | None) -> Failure | None:
        """Note which hosts are gone after a start; return why another one follows, or None if none does."""
        for host, ended in run.ended.items():
            if ended is not None and ended.kind == LOST_HOST:
                members.leave_out(host.name, ended.text)
        for name in run.leaving:
            members.leave_out(name, "it was told to stop", _SECONDS_AFTER_A_DRAIN)
        if failure is not None or run.files.stop.exists() or not (run.leaving or run.is_resized):
            return failure
        elastic, result = self.project.elastic, run.files.result
        min_hosts = len(run.hosts) if elastic is None else elastic.min_hosts
        num_left = len(run.hosts) - len(run.leaving)
        if result.exists() and (
            elastic is None or num_left < min_hosts or not elastic.was_stopped(result.read_bytes())
        ):
            return None
        if num_left < min_hosts:
            what = f"hosts were told to stop, and {num_left} of at least {min_hosts} are left"
            raise PreemptedError(f"{what}. The run was saved. Go on with --resume.")
        return failure_of(0, None, RESIZED, "starting again, as hosts come or go")

    def _ask_others(self, members: Members, run: "_Run", over: threading.Event) -> None:
        """Ask hosts that are not in use now and then, until some can join: then the run saves and stops."""
        elastic = self.project.elastic
        while elastic is not None and not over.wait(_SECONDS_BETWEEN_QUESTIONS):
            with suppress(ConfigError):  # the file of the hosts is being written
                self.hosts_named = elastic.hosts()
            names = members.due(self.hosts_named, elastic.max_processes)
            if not names or not run.files.begun.exists():
                continue
            with self.hosts(names) as (hosts, _):
                agreement = Agreement(hosts, self.project, goes_on=True)
                agreement.check(alone=True)
                found = [host.name for host in agreement.fit]
            if found and not over.is_set():
                members.join(found)
                _write(STDERR, f"saving, to start again with {', '.join(found)}")
                run.stop_for_others()
                return

    @contextmanager
    def _agreed(
        self, files: JobFiles, members: Members, num_restarts: int, *, goes_on: bool
    ) -> "Iterator[tuple[Agreement, SimpleQueue[Event]]]":
        """Connect to hosts that can train together; a host that may be busy, or start up, is waited for.

        Args:
            files: of this process.
            members: say which hosts are asked.
            num_restarts: after the first start a host that is not there is no mistake of the user.
            goes_on: see `Agreement`.

        Raises:
            ConfigError: lists what is wrong.
            HostError: one of them is not there again in time.
            PreemptedError: where hosts may come and go, too few are there again in time.
        """
        limit = self.project.start_seconds
        deadline = time.monotonic() + (math.inf if limit is None else limit)
        is_told, is_again, is_elastic = False, num_restarts > 0, self.project.elastic is not None
        while True:
            with self.hosts(members.asked([name for name, _ in self.hosts_named])) as (hosts, events):
                agreement = Agreement(hosts, self.project, goes_on=goes_on)
                agreement.check()
                agreement.leave_out()
                if not agreement.faults:
                    yield agreement, events
                    return
            is_late = time.monotonic() > deadline or files.stop.exists()
            may_pass = agreement.may_pass(is_again=is_again) or (is_again and is_elastic)
            if not may_pass or (is_late and not is_again):
                agreement.require()
            name, _, text = agreement.faults[0]
            if is_late and is_elastic:
                raise PreemptedError(f"too few hosts can go on. Host {name}: {text} Go on with --resume.")
            if is_late:
                raise HostError(next(host for host in hosts if host.name == name), text)
            if not is_told:
                is_told = True
                _write(STDERR, f"waiting for host {name}: {text}")
            members.left_out.clear()  # those that are fit are too few
            time.sleep(_SECONDS_BETWEEN_TRIES)


def _begin(members: Members, agreement: Agreement) -> dict[str, Any]:
    """Note a start; where hosts may come and go, say which it has and what it costs, and return that."""
    hosts = [(host.name, host.num_processes) for host in agreement.hosts]
    sight = agreement.sights.get(agreement.hosts[0])
    members.begin(hosts, 0 if sight is None else sight.saved_step, agreement.left_out)
    if sight is None:
        return {}
    left_out, lost = {name: why for name, (_, why) in members.left_out.items()}, sight.steps_lost
    costs = "" if lost is None else f" ({lost} steps lost, the last {sight.idle_seconds:.1f} s ago)"
    others = "".join(f"; without {name}: {why}" for name, why in left_out.items())
    names = ", ".join(name for name, _ in hosts)
    _write(STDERR, f"start with {names} after step {sight.saved_step}{costs}{others}")
    return {"left_out": left_out, "steps_lost": lost, "idle_seconds": sight.idle_seconds}


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
    is_resized: bool = False
    """Whether it shall save and stop, as hosts come."""
    leaving: set[str] = field(default_factory=set)
    """The names of the hosts that a signal told to stop."""
    gone: set[RemoteHost] = field(default_factory=set)
    """Those of them whose connection has ended, perhaps before their workers."""

    def wait(self) -> Failure | None:
        """Return when all hosts have done their part, or with the failure of one."""
        deadline = math.inf
        while len(self.ended.keys() | self.gone) < len(self.hosts) and time.monotonic() < deadline:
            with suppress(Empty):
                self._take(self.events.get(timeout=_SECONDS_BETWEEN_CHECKS))
            self._pass_wish_on()
            self._look_for_silence()
            if deadline == math.inf and any(self.ended.values()):
                deadline = time.monotonic() + _SECONDS_FOR_THE_TRUTH
        failures = [failure for failure in self.ended.values() if failure is not None]
        # What says only that somebody is lost comes last.
        vague = {LOST_HOST: 1, STORE_LOST: 2, SILENCE: 3}
        failure = min(failures, key=lambda failure: vague.get(failure.kind, 0), default=None)
        if failure is not None and failure.kind in vague and self.gone:
            return _lost(next(iter(self.gone)), "it was told to stop, and ended before the run was saved")
        return failure

    def stop_for_others(self) -> None:
        """Let the run save and stop, as other hosts can join."""
        self.is_resized = True

    def _take(self, event: Event) -> None:
        """Do what an event asks for."""
        host, kind, values = event
        if host not in self.hosts:  # it is left out
            return
        if kind == "out":
            rank, number, text = values
            _write(number, f"{host.name} rank {rank}: {text}")
        elif kind == "begun":
            self.files.begun.touch()
        elif kind == "leaves":
            self.leaving.add(host.name)
        elif kind == "ended":
            self.ended[host], result = values
            if result is not None:
                self.files.result.write_bytes(result)
        elif host.name in self.leaving:
            self.gone.add(host)
        elif host not in self.ended:
            self.ended[host] = _lost(host, values[0])

    def _pass_wish_on(self) -> None:
        """Tell all hosts once that the run shall stop, if it shall."""
        if not self.is_told_to_stop and (self.is_resized or self.files.stop.exists()):
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
