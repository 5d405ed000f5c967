"""Which hosts take part in the next start of a run, and which starts count. It contacts nothing."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, final

from lanewise.errors import LaunchError
from lanewise.processes.watch.failure import LOST_HOST, Failure

RESIZED = "resized"
"""The kind of a failure that is none: the run was saved and stopped, as hosts come or go."""
_MORE_STARTS = 3
"""How many more starts than `max_restarts` count: of those that follow from a lost host, or a bad one."""
_SECONDS_BETWEEN_JOINS = 600.0
_SECONDS_AFTER_A_JOIN = 3600.0
"""When a host is asked again that seemed fit by itself, and was not in the start that was made for it."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What a host sees of the run in its `run_dir`, and of itself."""

    holds_launch: bool
    """Whether the run there has a start of this launch."""
    saved_step: int
    """The number of steps of the newest checkpoint; 0 without one."""
    steps_lost: int | None
    """How many steps later the last line of metrics is; None without one."""
    idle_seconds: float | None
    """How long ago that was written."""
    pins: Mapping[str, str]
    """What equal bytes depend on, here; empty in `close`."""
    pins_of_run: Mapping[str, str]
    """The same of the newest checkpoint; empty without one."""


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """What a run needs of its hosts where these may come and go."""

    min_hosts: int
    max_processes: int
    """The number of lanes."""
    see: Sequence[str]
    """A module that prints a `Sight` as `python -m MODULE ARGUMENTS`, and its arguments but for the id of the
    launch, which is the last one."""
    was_stopped: Callable[[bytes], bool]
    """Tells whether a result is that of a run that was saved and stopped."""
    hosts: Callable[[], Sequence[tuple[str, int]]]
    """Reads the names of all hosts, with their numbers of processes. May raise ConfigError."""


@final
@dataclass
class Members:
    """The hosts that starts leave out, and the starts that count against `max_restarts`.

    Where hosts may come and go, a lost one counts nothing if the newest checkpoint is later than at any start
    before. A host that ends two starts running that count is left out. The same error at the same step is the
    user's; then it must come on another host.
    """

    max_restarts: int
    min_hosts: int | None = None
    """The fewest hosts with which the run goes on; None: all of them."""
    clock: Callable[[], float] = time.monotonic
    left_out: dict[str, tuple[float, str]] = field(default_factory=dict)
    """When each host that is left out may be asked whether it can join, and why it is left out."""
    used: Sequence[tuple[str, int]] = ()
    """The hosts of the last start, with their numbers of processes."""
    _num_counted: int = 0
    _newest_step: int = -1
    _lost: Failure | None = None
    """That of the last start, until the next one shows whether it counts."""
    _before: tuple[str, Failure] | None = None
    """The host and the failure of the last start that counted."""
    _joined: float = -math.inf
    _is_join: bool = False
    """Whether the next start is for hosts that can join."""

    def leave_out(self, host: str, why: str, seconds: float = 0.0) -> None:
        """Leave a host out of the next starts, and do not ask it for so long whether it can join."""
        why = why.partition("\n")[0].removeprefix(f"host {host}: ").rstrip(".")
        self.left_out[host] = self.clock() + seconds, why

    def asked(self, hosts: Sequence[str]) -> list[str]:
        """Return which of all hosts the next start asks: those that are not left out, if they are enough."""
        present = [host for host in hosts if host not in self.left_out]
        return present if self.min_hosts is not None and len(present) >= self.min_hosts else list(hosts)

    def due(self, hosts: Iterable[tuple[str, int]], max_processes: int) -> list[str]:
        """Return which of all hosts, with their numbers of processes, may be asked whether they can join."""
        now, used = self.clock(), dict(self.used)
        if now - self._joined < _SECONDS_BETWEEN_JOINS:
            return []
        room = max_processes - sum(used.values())
        free = [host for host, number in hosts if host not in used and number <= room]
        return [host for host in free if now >= self.left_out.get(host, (now, ""))[0]]

    def join(self, hosts: Iterable[str]) -> None:
        """Let the next start ask hosts that can join."""
        self._joined, self._is_join = self.clock(), True
        for host in hosts:
            self.left_out.pop(host, None)

    def begin(self, hosts: Sequence[tuple[str, int]], step: int, faults: Mapping[str, str]) -> None:
        """Note a start that is about to be made.

        Args:
            hosts: that take part, with their numbers of processes.
            step: of the newest checkpoint.
            faults: the other hosts that were asked, and why they do not.

        Raises:
            LaunchError: too many starts counted.
        """
        if self._lost is not None:
            if step > self._newest_step:
                self._before = None
            else:
                self._count(self._lost)
        seconds = _SECONDS_AFTER_A_JOIN if self._is_join else 0.0
        self._lost, self._is_join, self.used = None, False, hosts
        self._newest_step = max(step, self._newest_step)
        for host, _ in hosts:
            self.left_out.pop(host, None)
        for host, why in faults.items():
            self.leave_out(host, why, seconds)

    def fail(self, failure: Failure) -> str:
        """Note how a start ended, and return a line that says what follows.

        Raises:
            LaunchError: no start may follow.
        """
        if failure.kind == RESIZED:
            return failure.text
        if failure.kind == LOST_HOST and self.min_hosts is not None:
            self.leave_out(failure.host, failure.text)
            self._lost = failure
            return f"starting again with the hosts that are there: {failure.summary}"
        before = None if self._before is None or self._is_again_of(failure) else self._before[1]
        if failure.is_final(before):
            _give_up(failure)
        return self._count(failure)

    def _count(self, failure: Failure) -> str:
        most = self.max_restarts + (0 if self.min_hosts is None else _MORE_STARTS)
        host = self._host_of(failure)
        if self._is_again_of(failure):
            self.leave_out(host, "it ended two starts running", math.inf)
        self._before = host, failure
        if self._num_counted == most:
            why = (
                f"\n{most + 1} starts failed, or saved nothing before a host was lost; "
                f"distributed.max_restarts + {_MORE_STARTS} may. Save more often "
                "(checkpoint.every), or raise distributed.max_restarts; --resume goes on."
            )
            _give_up(failure, "" if self.min_hosts is None else why)
        self._num_counted += 1
        return f"starting again, {self._num_counted} of {most} times: {failure.summary}"

    def _is_again_of(self, failure: Failure) -> bool:
        """Tell whether the host of a failure ended the start before as well, and can be left out."""
        if self._before is None or self.min_hosts is None:
            return False
        return self._before[0] == self._host_of(failure) and len(self.used) > self.min_hosts

    def _host_of(self, failure: Failure) -> str:
        """Return the name of the host of a failure, as the user calls it."""
        if failure.kind == LOST_HOST:
            return failure.host
        first_rank = 0
        for host, number in self.used:
            first_rank += number
            if failure.rank < first_rank:
                return host
        return failure.host


def _give_up(failure: Failure, why: str = "") -> NoReturn:
    """Raise the failure that ends a launch, and say why it does."""
    kind = failure.kind if failure.is_ours else ""
    raise LaunchError(f"{failure}{why}", failure.exit_code, failure.rank, kind)
