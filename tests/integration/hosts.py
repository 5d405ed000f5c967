"""Hosts on one machine: network namespaces with nothing in common but a cable."""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

WHY_NOT = (
    "making network namespaces needs root, iproute2 and util-linux"
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter", "unshare")))
    else None
)
"""What this machine lacks for hosts, or None."""

ISOLATED = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")

# The first process of a host takes all others with it when it ends, so it waits for them.
BOOT = """
hostname "$0"
mount --bind "$1" /dev/shm
mount --bind "$2" /etc/hosts
shift 2
"$@" &
wait $! && code=0 || code=$?
while set -- /proc/[0-9]* && [ $# -gt 1 ]; do sleep 0.05; done
exit $code
"""


@dataclass(frozen=True)
class Host:
    """A network of its own; booted, it has a name, processes and shared memory of its own as well."""

    namespace: str
    address: str
    interface: str

    def enter(self, *arguments: object) -> list[str]:
        """Return the command line that runs a program in the network of this host."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}", *map(str, arguments)]

    def boot(self, name: str, names: Path, shared_memory: Path, *arguments: object) -> list[str]:
        """Return the command line that boots this host for a program, and ends when no process is left.

        Its exit code is that of the program, or 128 and the signal.

        Args:
            name: of the host.
            names: its /etc/hosts.
            shared_memory: the folder that is its /dev/shm.
            arguments: program and arguments.
        """
        return self.enter(*ISOLATED, "sh", "-ec", BOOT, name, shared_memory, names, *arguments)

    def cut(self) -> None:
        """Pull its cable out."""
        ip("-n", self.namespace, "link", "set", self.interface, "down")

    def join(self) -> None:
        """Put it back."""
        ip("-n", self.namespace, "link", "set", self.interface, "up")

    def listening(self) -> list[str]:
        """Return the addresses where anybody on this host listens."""
        tables = subprocess.run(
            self.enter("cat", "/proc/net/tcp", "/proc/net/tcp6"), check=True, capture_output=True, text=True
        ).stdout
        rows = [line.split() for line in tables.splitlines()]
        return [row[1] for row in rows if row[3] == "0A"]


def ip(*arguments: str) -> None:
    """Run iproute2's command."""
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def running_hosts(count: int = 2) -> Iterator[Sequence[Host]]:
    """Make one host, or two that a veth pair joins; or more and a bridge, which is the last one."""
    name = uuid.uuid4().hex[:6]
    hosts = [Host(f"lane-{name}-{end}", f"10.77.0.{end}", f"lw{name}{end}") for end in range(1, count + 1)]
    with ExitStack() as stack:
        for host in hosts:
            ip("netns", "add", host.namespace)
            stack.callback(ip, "netns", "delete", host.namespace)
            ip("-n", host.namespace, "link", "set", "lo", "up")
        if count == 2:
            first, second = hosts
            ip("link", "add", first.interface, "type", "veth", "peer", "name", second.interface)
            for host in hosts:
                ip("link", "set", host.interface, "netns", host.namespace)
                ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
                ip("-n", host.namespace, "link", "set", host.interface, "up")
        if count > 2:
            bridge = Host(f"lane-{name}-bridge", "10.77.0.100", "bridge")
            ip("netns", "add", bridge.namespace)
            stack.callback(ip, "netns", "delete", bridge.namespace)
            ip("-n", bridge.namespace, "link", "add", bridge.interface, "type", "bridge")
            for host in hosts:
                port = f"{host.interface}b"
                ip("link", "add", host.interface, "type", "veth", "peer", "name", port)
                ip("link", "set", host.interface, "netns", host.namespace)
                ip("link", "set", port, "netns", bridge.namespace)
                ip("-n", bridge.namespace, "link", "set", port, "master", bridge.interface, "up")
            hosts.append(bridge)
            for host in hosts:
                ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
                ip("-n", host.namespace, "link", "set", host.interface, "up")
        yield hosts
