"""Hosts that ssh reaches: network namespaces, each with an sshd, a name and processes of its own."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration import hosts
from tests.integration.command import LANEWISE, Cold, wait_for
from tests.integration.hosts import Host, running_hosts

WHY_NOT = hosts.WHY_NOT or (
    "not installed: sshd (Debian: openssh-server)" if shutil.which("sshd", path="/usr/sbin") is None else None
)
"""What this machine lacks for such hosts, or None."""

NAMES = ("node0", "node1", "node2")
BOOTED = ("sh -ec", "unshare", "sshd: ", "/usr/sbin/sshd")
"""How the command lines of those begin that are there without a run."""
SSHD = """
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
"""
CLIENT = """
Host {name}
    HostName {address}
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking no
    LogLevel ERROR
"""


@dataclass(frozen=True)
class Cluster:
    """Hosts with an sshd each, called as `NAMES` says.

    The launcher is in the network of the first of two hosts, and of more in that of their bridge.
    """

    folder: Path
    hosts: Sequence[Host]
    launcher: Host
    daemons: list[Cold]

    def start(
        self,
        *arguments: object,
        program: Sequence[str] = LANEWISE,
        variables: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Cold:
        """Start `lanewise`, or another program, on no host, with an ssh that knows them all; see `Cold`."""
        path = os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]])
        command = self.launcher.enter(*program, *arguments)
        return Cold(*command, variables={"PATH": path, **(variables or {})}, **options)

    def pids(self, *numbers: int) -> dict[int, str]:
        """Return the command lines of what runs on some or all hosts, but for what boots them and listens."""
        return {pid: line for pid, line in self._all(*numbers).items() if not line.startswith(BOOTED)}

    def _all(self, *numbers: int) -> dict[int, str]:
        daemons = [self.daemons[number] for number in numbers] or self.daemons
        inside = {self._namespace(daemon.pid) for daemon in daemons if daemon.poll() is None}
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                line = (folder / "cmdline").read_text().replace("\0", " ")
                is_ours = (folder / "ns" / "pid").readlink() in inside
                if is_ours and line:
                    found[int(folder.name)] = line
        return found

    def listening(self) -> list[str]:
        """Return the addresses where anybody on the hosts listens."""
        return [f"{host.namespace} {one}" for host in self.hosts for one in host.listening()]

    def boot(self, number: int) -> None:
        """Boot a host, and wait until its sshd listens."""
        host, name = self.hosts[number], NAMES[number]
        shared_memory = self.folder / f"shm_{name}"
        shared_memory.mkdir(exist_ok=True)
        daemon = ("/usr/sbin/sshd", "-D", "-e", "-f", self.folder / f"sshd_{name}")
        with (self.folder / f"{name}.log").open("a") as log:
            booted = host.boot(name, self.folder / "hosts", shared_memory, *daemon)
            self.daemons[number:] = [Cold(*booted, stdout=log, stderr=log), *self.daemons[number + 1 :]]
        wait_for(lambda: any(one.endswith(":0016") for one in host.listening()))

    def crash(self, number: int) -> None:
        """Kill all that runs on a host at once."""
        self.daemons[number].__exit__()

    def hang_up(self, number: int) -> None:
        """End all connections to a host, as a shutdown does, which ends sshd first."""
        for pid, line in self._all(number).items():
            if line.startswith("sshd: ") and "listener" not in line:
                with suppress(ProcessLookupError):  # it ended with another one
                    os.kill(pid, signal.SIGKILL)

    @staticmethod
    def _namespace(pid: int) -> Path:
        """Return the process namespace of what a process unshared."""
        return Path(f"/proc/{pid}/ns/pid_for_children").readlink()


@contextmanager
def running_ssh(folder: Path, count: int = 2) -> Iterator[Cluster]:
    """Boot the hosts, and shut them down in the end with all that runs there."""
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("key", "host_key"):
        command = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name)
        subprocess.run(command, check=True)
    (folder / "bin").mkdir()
    wrapper = folder / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    wrapper.chmod(0o755)
    with ExitStack() as stack:
        running = stack.enter_context(running_hosts(count))
        places = list(zip(running, NAMES[:count], strict=False))
        lines = [f"{host.address} {name}\n" for host, name in places]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        with (folder / "ssh_config").open("w") as config:
            for host, name in places:
                config.write(CLIENT.format(name=name, address=host.address, folder=folder))
                (folder / f"sshd_{name}").write_text(SSHD.format(address=host.address, folder=folder))
        cluster = Cluster(folder, running[:count], running[0 if count == 2 else -1], [])
        stack.callback(lambda: [cluster.crash(number) for number in range(len(cluster.daemons))])
        for number in range(count):
            cluster.boot(number)
        yield cluster
