"""Measures what hosts can send to each other: the job that runs on them."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist

from lanewise.commands.jobs.job import Job
from lanewise.errors import WorldError
from lanewise.processes.device.accelerator import device_name
from lanewise.processes.device.choice import accelerator_type, count_accelerators
from lanewise.processes.watch.heartbeat import heartbeat
from lanewise.processes.world.agreement import require_equal_machines
from lanewise.processes.world.world import World

_FIRST_BYTES, _MOST_BYTES = 2**16, 2**28
_GROWTH = 4
_LONG_ENOUGH_SECONDS = 0.1
"""After a message that takes longer than this, no larger one is tried."""
_LONG_SECONDS = 1.0
"""A message that takes longer is not sent again: what disturbs it for a moment matters little."""
_NUM_REPEATS = 3
_NUM_CALLS = 20


@dataclass(frozen=True)
class Link:
    """The way from one end to another, in one direction. An end is a host or, on one host, a process."""

    source: int
    target: int
    bytes_per_second: float
    """What all processes of the source send together, each to one of the target."""
    latency_seconds: float
    """Half of the shortest time for a call and its answer."""

    @property
    def gbit(self) -> float:
        """Gigabits per second."""
        return self.bytes_per_second * 8 / 1e9


@dataclass(frozen=True)
class TimedAllReduce:
    """A sum over all processes, which came out right."""

    world_size: int
    num_bytes: int
    seconds: float

    @property
    def gbit(self) -> float:
        """What each process sent in the meantime, in gigabits per second, if it went round a ring."""
        return 2 * (self.world_size - 1) / self.world_size * self.num_bytes / self.seconds * 8 / 1e9


@dataclass(frozen=True)
class Equipment:
    """What a host computes and communicates with."""

    devices: Sequence[str]
    """Their models; for CPUs how many cores the processes may use."""
    memory_bytes: int | None
    """The memory of each device; None where it is not known."""
    interface: str
    """The interface over which gloo communicates; empty where nobody named it."""
    interface_gbit: float | None
    """What the interface says of itself; None where it says nothing, as those of many virtual machines."""


@dataclass(frozen=True)
class Measurement:
    """What `MeasureJob` found."""

    equipment: Sequence[Equipment]
    """The equipment of each host."""
    shares_memory: bool
    """Whether processes that train send through shared memory, which is not measured."""
    backend: str = ""
    """The backend of torch.distributed; empty for a single process."""
    all_reduce: TimedAllReduce | None = None
    """The sum over all processes; None for a single process, to which there is nothing to measure."""
    links: Sequence[Link] = ()
    differing: str | None = None
    """Why `exact` can't hold on these machines, where it was asked for."""

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> "Measurement":
        """Read the result of `MeasureJob`."""
        all_reduce = tree["all_reduce"]
        read = {
            "equipment": [Equipment(**of_host) for of_host in tree["equipment"]],
            "links": [Link(**link) for link in tree["links"]],
            "all_reduce": None if all_reduce is None else TimedAllReduce(**all_reduce),
        }
        return cls(**{**tree, **read})


@final
@dataclass(frozen=True)
class MeasureJob(Job):
    """Sums over all processes, and then sends between each pair of hosts; or of processes, on one host.

    The pairs of a group send at the same time, first in one direction and then in the other.
    """

    sizes: tuple[int, ...] = field(default=(), kw_only=True)
    """The number of processes of each host, in the order of the ranks."""
    needs_equal_machines: bool = field(default=False, kw_only=True)
    trains: ClassVar[bool] = False

    def run(self, world: World) -> dict[str, Any]:
        hosts = [list(range(*bounds)) for bounds in pairwise(accumulate(self.sizes, initial=0))]
        equipment = world.all_gather_tree(asdict(_equipment(world.device)))
        of_hosts = [Equipment(**equipment[ranks[0]]) for ranks in hosts]
        found = Measurement(of_hosts, shares_memory=world.shared_memory is not None)
        if world.world_size == 1:
            return asdict(found)
        differing = None
        if self.needs_equal_machines:
            try:
                require_equal_machines(world)
            except WorldError as error:
                differing = str(error)
        backend = dist.get_backend()
        device = torch.device("cpu") if backend == "gloo" else world.device
        ends = hosts if len(hosts) > 1 else [[rank] for rank in hosts[0]]
        all_reduce = _time_all_reduce(world, device)
        links = list(_links(world, device, ends))
        return asdict(
            replace(found, backend=backend, all_reduce=all_reduce, links=links, differing=differing)
        )


def _equipment(device: torch.device) -> Equipment:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    gbit, memory = None, None
    with suppress(OSError, ValueError):
        megabits = int(Path("/sys/class/net", interface, "speed").read_text())
        gbit = megabits / 1e3 if megabits > 0 else None
    if device.type == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Equipment([f"cpu, {len(os.sched_getaffinity(0))} cores"], memory, interface, gbit)
    with suppress(AttributeError):  # as on mps
        memory = int(torch.get_device_module(device).get_device_properties(device).total_memory)
    there = (torch.device(f"{accelerator_type()}:{index}") for index in range(count_accelerators()))
    return Equipment(list(map(device_name, there)), memory, interface, gbit)


def _time_all_reduce(world: World, device: torch.device) -> TimedAllReduce:
    """Sum tensors of growing size. Collective: every rank must call this."""
    num_bytes = _FIRST_BYTES
    while True:
        tensor = torch.ones(num_bytes // 4, device=device)
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        is_right = bool((tensor == world.world_size).all())
        seconds, are_right = zip(*world.all_gather_tree([time.perf_counter() - begin, is_right]), strict=True)
        if not all(are_right):
            wrong = are_right.index(False)
            raise WorldError(f"an all-reduce of ones came out wrong on rank {wrong}: its device is at fault.")
        if max(seconds) > _LONG_ENOUGH_SECONDS or num_bytes >= _MOST_BYTES:
            return TimedAllReduce(world.world_size, num_bytes, max(seconds))
        num_bytes *= _GROWTH


def _links(world: World, device: torch.device, ends: Sequence[Sequence[int]]) -> Iterator[Link]:
    """Measure each pair in both directions. Collective: every rank must call this."""
    # Not zeros: a page that was never written is read from the cache, faster than any other.
    buffer = torch.ones(_MOST_BYTES, dtype=torch.uint8, device=device)
    for pairs in groups_of_pairs(len(ends)):
        for ways in (pairs, [(target, source) for source, target in pairs]):
            mine = None
            for source, target in ways:
                for sender, receiver in zip(ends[source], ends[target], strict=False):
                    if world.rank == sender:
                        rate, seconds = _send(receiver, buffer)
                        mine = [source, target, rate, seconds]
                    elif world.rank == receiver:
                        _receive(sender, buffer)
            heartbeat.num_pieces += 1
            told = [sent for sent in world.all_gather_tree(mine) if sent is not None]
            for way in ways:
                rates, latencies = zip(*(sent[2:] for sent in told if tuple(sent[:2]) == way), strict=True)
                yield Link(*way, sum(rates), min(latencies))


def groups_of_pairs(count: int) -> Iterator[Sequence[tuple[int, int]]]:
    """Yield groups of pairs, as in a tournament: every pair comes once, and nobody twice in a group.

    There are count - 1 groups for an even number, and count for an odd one, of which each leaves one out.
    """
    places = list(range(count + count % 2))
    for _ in places[1:]:
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < count]
        places[1:] = [places[-1], *places[1:-1]]  # the first one stays, the others go round


def _send(receiver: int, buffer: torch.Tensor) -> tuple[float, float]:
    """Send what `_receive` waits for; return bytes per second, and half of the time of a call."""
    _offer(1, receiver, buffer)  # which connects
    call = min(_offer(1, receiver, buffer) for _ in range(_NUM_CALLS))
    num_bytes = _FIRST_BYTES
    while (seconds := _offer(num_bytes, receiver, buffer)) < _LONG_ENOUGH_SECONDS and num_bytes < _MOST_BYTES:
        num_bytes *= _GROWTH
    if seconds < _LONG_SECONDS:
        seconds = min(seconds, *(_offer(num_bytes, receiver, buffer) for _ in range(_NUM_REPEATS)))
    dist.send(torch.zeros(1, dtype=torch.int64, device=buffer.device), receiver)
    return num_bytes / seconds, call / 2


def _offer(num_bytes: int, receiver: int, buffer: torch.Tensor) -> float:
    """Send a message, after its length, and wait until the receiver has it; return the seconds."""
    length = torch.tensor([num_bytes], device=buffer.device)
    begin = time.perf_counter()
    dist.send(length, receiver)
    dist.send(buffer[:num_bytes], receiver)
    dist.recv(length, receiver)
    assert int(length) == num_bytes  # reading it waits for it
    return time.perf_counter() - begin


def _receive(sender: int, buffer: torch.Tensor) -> None:
    """Take messages and confirm each, until one has no length."""
    length = torch.zeros(1, dtype=torch.int64, device=buffer.device)
    while True:
        dist.recv(length, sender)
        if not (num_bytes := int(length)):
            return
        dist.recv(buffer[:num_bytes], sender)
        dist.send(length, sender)
