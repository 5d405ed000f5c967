"""Finds out, before anything trains, whether the hosts of a run can train together."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, NamedTuple, final

from lanewise.errors import ConfigError
from lanewise.launch.agent import LOCALHOST
from lanewise.launch.hello import TIMED_OUT, describe_machine, is_loopback
from lanewise.launch.host import INTERFACE_VARIABLES
from lanewise.launch.membership import Elastic, Sight
from lanewise.launch.wire import HostError, RemoteHost

_SHOWN_FILES = 3
_SECONDS_TO_SEE = 120.0
_SHARE_OF_LIMIT = 0.6
"""How much sooner a host that is cut off ends itself than the launcher takes it for lost."""
_NO_ADDRESS = (
    "it has no IPv4 address besides that of loopback, and hosts reach each other by IPv4 alone. Give it one "
    "in a network with the others; a tunnel (WireGuard, ssh -w) makes one over IPv6."
)
_LASTING = {"versions", "code"}
"""What no wait changes."""
_REMEDIES = {
    "folder": " Make it there, or set distributed.ssh.folder.",
    "run_dir": " Let train.run_dir be where all hosts can write.",
}
"""What to do where a host itself could not do something, by what was looked at."""


@dataclass(frozen=True, kw_only=True)
class Project:
    """What is the same on every host of a run; paths are those there."""

    folder: str
    """The working directory."""
    variables: Mapping[str, str]
    """Environment variables that the user set for the hosts."""
    pins: Mapping[str, str]
    """The environment variables that must be fixed before torch is imported."""
    search_path: str
    sources: Mapping[str, str]
    """The SHA-256 of the user's modules, by their paths below the search path."""
    run_dir: str | None
    """What all hosts must share; None: nothing."""
    limit_seconds: float | None
    """After how long without a word from each other a host and this process give up; None: never."""
    start_seconds: float | None
    """How long hosts may take until they can train together; None: for ever."""
    elastic: Elastic | None = None
    """What it needs of its hosts where these may come and go; None: all hosts take part in each start."""
    launch_id: str = field(default_factory=lambda: secrets.token_hex(8))

    def __str__(self) -> str:
        names = f", with {', '.join(self.variables)}" if self.variables else ""  # values may be secret
        return f"{self.folder}{names}"


class Fault(NamedTuple):
    """Something that is wrong with a host."""

    host: str
    kind: str
    """What was looked at: connection, versions, folder, code, network or run_dir."""
    text: str


class Site(NamedTuple):
    """Where the other hosts reach a host."""

    address: str
    interface: str


@final
class Agreement:
    """The hosts of a run, and what is wrong with them.

    Args:
        hosts: all of them.
        project: what they shall have.
        goes_on: whether the `run_dir` must have a start of this launch, so that hosts which share another
            folder, as after a mount that was lost, do not begin anew in it.
    """

    def __init__(self, hosts: Sequence[RemoteHost], project: Project, *, goes_on: bool = False) -> None:
        self.faults: list[Fault] = []
        self._num_busy = 0
        """How many of the faults may mean no more than that a host is busy."""
        self._answering = list(hosts)
        """The hosts of which the rest can be seen."""
        self.sites: dict[RemoteHost, Site] = {}
        """Where each host is reached, if all others reach it."""
        self.hosts = hosts
        self.project = project
        self.sights: dict[RemoteHost, Sight] = {}
        """What each host sees of the run, where hosts may come and go."""
        self.left_out: dict[str, str] = {}
        """The hosts with which it does not go on, and why."""
        self._goes_on = goes_on

    def check(self, *, alone: bool = False) -> None:
        """Look at everything that must hold before the workers start.

        Args:
            alone: whether to leave out what needs other hosts.
        """
        for checks in (
            (self._hear_hellos,),
            (self._enter,),
            (self._compare_code, self._see, *(() if alone else (self._find_sites, self._share))),
        ):
            for check in checks:
                check()
            if self.faults and self.project.elastic is None:
                return

    @property
    def fit(self) -> list[RemoteHost]:
        """The hosts of which the rest can be seen; where hosts may come and go, those without a fault."""
        unfit = {fault.host for fault in self.faults} if self.project.elastic else ()
        return [host for host in self._answering if host.name not in unfit]

    def leave_out(self) -> None:
        """Go on with the fit hosts alone, as many as have lanes, if they are enough; the others end."""
        elastic = self.project.elastic
        if elastic is None:
            return
        fit: list[RemoteHost] = []
        for host in self.fit:
            host.first_rank = sum(one.num_processes for one in fit)
            if host.first_rank + host.num_processes > elastic.max_processes:
                self._find(host, "lanes", f"the run has no more than {elastic.max_processes} lanes.")
            else:
                fit.append(host)
        if len(fit) < elastic.min_hosts:
            return
        for host in self.hosts:
            if host not in fit:
                Thread(target=host.close, daemon=True).start()
        self.left_out = {fault.host: fault.text for fault in self.faults}
        self.faults, self.hosts = [], fit

    def require(self) -> None:
        """Raise what was found, if anything was.

        Raises:
            ConfigError: lists all of it.
        """
        if self.faults:
            raise ConfigError(*(f"host {host}: {text}" for host, _, text in self.faults))

    def may_pass(self, *, is_again: bool) -> bool:
        """Tell whether all that was found may be right in a while.

        Args:
            is_again: whether the hosts could train together before: then one may be starting up.
        """
        if is_again:
            return not any(fault.kind in _LASTING for fault in self.faults)
        return len(self.faults) == self._num_busy

    def _hear_hellos(self) -> None:
        """Wait until every host has said who it is, with the versions of this machine."""
        here = describe_machine().versions
        for host in self._ask("connection", RemoteHost.wait_for_hello):
            versions = host.hello.versions
            for name, there in versions.items():
                if there != here[name]:
                    what = (
                        f"{host.hello.executable} there has {name} {there}, and this machine has {here[name]}"
                    )
                    self._find(host, "versions", f"{what}. Install the same version on all.")
            if versions["lanewise"] != here["lanewise"]:  # it may know other messages
                self._answering.remove(host)

    def _enter(self) -> None:
        """Let every host take the folder and the variables."""
        given: dict[str, Any] = {"folder": self.project.folder}
        given["variables"] = {**self.project.variables, **self.project.pins}
        limit = self.project.limit_seconds
        if limit is not None and self.project.elastic is not None:
            limit *= _SHARE_OF_LIMIT
        answers = self._ask("folder", lambda host: host.call("enter", **given, limit_seconds=limit))
        for host, interfaces in answers.items():
            host.interfaces = interfaces

    def _compare_code(self) -> None:
        """Find the hosts whose user code differs from that of this machine."""
        path, sources = self.project.search_path, dict(self.project.sources)
        answers = self._ask("code", lambda host: host.call("compare", search_path=path, sources=sources))
        for host, differing in answers.items():
            if differing:
                more = f" and {len(differing) - _SHOWN_FILES} more" if len(differing) > _SHOWN_FILES else ""
                what = f"the code in {path} there is not that of this machine"
                files = f"{', '.join(differing[:_SHOWN_FILES])}{more}"
                self._find(host, "code", f"{what}: {files}. Copy it there.")

    def _find_sites(self, *, is_again: bool = False) -> None:
        """Find for every host an address where all others reach it, by trying."""
        self.sites = {}
        if len(self.hosts) == 1:
            self.sites = {self.hosts[0]: Site(LOCALHOST, "")}
            return
        hosts = tuple(self.fit)
        peers = [
            (host.hello.token, [address for address, _ in host.hello.addresses], host.hello.port)
            for host in hosts
        ]
        answers = self._ask("network", lambda host: _reach(host, peers), hosts)
        lonely = {host for host in hosts if all(map(is_loopback, host.hello.addresses))}
        unreached: dict[RemoteHost, Mapping[RemoteHost, Mapping[Site, str]]] = {}
        for index, host in enumerate(hosts):
            sites = [Site(*place) for place in host.hello.addresses]
            whys: Mapping[RemoteHost, Mapping[Site, str]] = {
                peer: dict(zip(sites, answer[index], strict=True))
                for peer, answer in answers.items()
                if peer is not host and (peer not in lonely or host in lonely)
            }
            reached = [site for site in sites if not any(why[site] for why in whys.values())]
            if host not in answers:
                continue
            if reached:
                self.sites[host] = min(reached, key=lambda site: site.interface not in host.interfaces)
            else:
                unreached[host] = whys
        checks_again = self.project.elastic is not None and bool(unreached)
        if checks_again:  # without the one that the most do not reach, unless it may have been busy
            worst = max(
                reversed(unreached), key=lambda host: sum(all(w.values()) for w in unreached[host].values())
            )
            unreached = {worst: unreached[worst]} if is_again else {}
        for host, whys in unreached.items():
            if host in lonely:
                self._find(host, "network", _NO_ADDRESS)
            else:
                self._find_unreached(host, whys)
        if checks_again:
            self._find_sites(is_again=True)

    def _find_unreached(self, host: RemoteHost, whys: Mapping[RemoteHost, Mapping[Site, str]]) -> None:
        """Note that others do not reach a host, and why not each of its addresses."""
        lost = [peer for peer, why in whys.items() if all(why.values())] or list(whys)
        tried = ", ".join(f"{site.address} ({why})" for site, why in whys[lost[0]].items())
        self._find(
            host,
            "network",
            f"{', '.join(peer.name for peer in lost)} can't connect to a port of it: tried {tried}. "
            "Open the ports of each host for the others, or put all of them into one network.",
        )
        self._num_busy += all(TIMED_OUT in whys[peer].values() for peer in lost)

    def _share(self) -> None:
        """Find the hosts that do not share the run directory of the first one."""
        if self.project.run_dir is None or self._goes_on or not self.fit:
            return
        first, *others = self.fit
        run_dir = self.project.run_dir
        path = f"{run_dir}/.shared-{secrets.token_hex(4)}"
        made = self._ask("run_dir", lambda host: host.call("leave", path=path), [first])
        if not made:
            if self.project.elastic is not None:  # it is not fit any more, and the next one may be
                self._share()
            return
        for host, found in self._ask("run_dir", lambda host: host.call("find", path=path), others).items():
            if not found:
                what = f"run_dir {run_dir} there is not that of {first.name}"
                why = "as every process writes its part of a checkpoint"
                self._find(host, "run_dir", f"{what}. Put it where all hosts share it, {why}.")
        self._ask("run_dir", lambda host: host.call("remove", path=path, folders=made[first]), [first])

    def _see(self) -> None:
        """Find the hosts whose folder is not that of the run, or on which `exact` would not go on with it."""
        if self.project.elastic is None:
            return
        program = [*self.project.elastic.see, self.project.launch_id]
        self.sights = self._ask(
            "machines", lambda host: host.call("see", within=_SECONDS_TO_SEE, program=program)
        )
        pins: Mapping[str, str] = {}
        for host in (host for host in self.fit if host in self.sights):
            sight = self.sights[host]
            if self._goes_on and not sight.holds_launch:
                what = f"run_dir {self.project.run_dir} there does not have this run"
                self._find(host, "run_dir", f"{what}. Mount its file system there.")
                continue
            pins = pins or sight.pins_of_run or sight.pins
            if names := [name for name in pins if sight.pins.get(name) != pins[name]]:
                theirs, ours = (
                    ", ".join(f"{name}={of.get(name, 'none')}" for name in names) for of in (sight.pins, pins)
                )
                self._find(host, "machines", f"it has {theirs}, and `exact` needs {ours}.")

    def _ask(
        self, kind: str, call: Callable[[RemoteHost], Any], hosts: Sequence[RemoteHost] | None = None
    ) -> dict[RemoteHost, Any]:
        """Ask hosts at once; return the answers, and note the hosts that could not give one."""

        def attempt(host: RemoteHost) -> Any:
            try:
                return call(host)
            except HostError as error:
                return error

        asked = tuple(self._answering if hosts is None else hosts)
        with ThreadPoolExecutor(max(1, len(asked))) as pool:
            answers = dict(zip(asked, pool.map(attempt, asked), strict=True))
        for host, answer in answers.items():
            if isinstance(answer, HostError):
                self._find(host, kind, f"{answer.why.rstrip('.')}.{_REMEDIES.get(kind, '')}")
                if host.is_lost or kind == "folder":
                    self._answering.remove(host)
        return {host: answer for host, answer in answers.items() if not isinstance(answer, HostError)}

    def _find(self, host: RemoteHost, kind: str, text: str) -> None:
        self.faults.append(Fault(host.name, kind, text))


def _reach(host: RemoteHost, peers: Sequence[tuple[str, Sequence[str], int]]) -> list[list[str]]:
    """Let a host call others; return for each of their addresses why it can't be reached from there."""
    whys: list[list[str]] = host.call("reach", peers=peers)
    if list(map(len, whys)) != [len(addresses) for _, addresses, _ in peers]:
        raise HostError(host, "its answer is not about the addresses that it was given")
    return whys


def interface_variables(host: RemoteHost, site: Site) -> dict[str, str]:
    """Name the interface of a host to torch's libraries, unless the user names one there."""
    names = zip(INTERFACE_VARIABLES, host.interfaces, strict=True)
    return {name: site.interface for name, interface in names if site.interface and not interface}
