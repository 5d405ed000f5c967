"""What doctor found, as it is shown: a row for each host, the links, what is wrong and what to do."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from lanewise.commands.doctor.judge import Clock
from lanewise.commands.doctor.measure import Equipment, Link, Measurement
from lanewise.launch.agree import Fault
from lanewise.launch.hello import Hello

_VERSIONS = ("python", "lanewise", "torch")
_MOST_LINKS = 12
"""So many links are shown; of more, the slowest. The file of --json has all."""


@dataclass(frozen=True, kw_only=True)
class HostRow:
    """What is known of a host; None where it could not be seen."""

    name: str
    hello: Hello | None
    address: str | None
    """The address at which the other hosts reach it."""
    clock: Clock | None
    equipment: Equipment | None


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """What `doctor` found."""

    hosts: Sequence[HostRow]
    faults: Sequence[Fault]
    """What is wrong, and with which host."""
    notes: Sequence[str]
    """What need not be wrong."""
    measured: Measurement | None
    """What was measured between the hosts; None where nothing could be."""
    ends: Sequence[str]
    """The names of what the links connect."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def table(self) -> Table:
        """Draw a row for each host."""
        table = Table(box=None, pad_edge=False)
        rows = [self._cells(host) for host in self.hosts]
        for name in rows[0]:
            table.add_column(name, no_wrap=True, justify="right" if name.endswith("Gbit/s") else "left")
        for row in rows:
            table.add_row(*row.values())
        return table

    def lines(self) -> Iterator[str]:
        """Say what the table does not show; the last line is the verdict."""
        yield from (f"note: {note}" for note in self.notes)
        if self.measured is not None:
            yield from self._lines_of_links(self.measured)
        yield from (f"{host}: {text}" for host, _, text in self.faults)
        if self.is_sound:
            yield "no fault was found"
        else:
            yield f"at fault: {', '.join(f'{host} ({kinds})' for host, kinds in self._kinds().items())}"

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON takes it."""
        return {
            "is_sound": self.is_sound,
            "hosts": [self._host_to_json(host) for host in self.hosts],
            "faults": [fault._asdict() for fault in self.faults],
            "notes": list(self.notes),
            "backend": self.measured and self.measured.backend,
            "all_reduce": self.measured and self.measured.all_reduce and asdict(self.measured.all_reduce),
            "links": [
                {**asdict(link), "source": self.ends[link.source], "target": self.ends[link.target]}
                for link in self._links
            ],
        }

    @property
    def _links(self) -> Sequence[Link]:
        return [] if self.measured is None else self.measured.links

    def _kinds(self) -> Mapping[str, str]:
        kinds: dict[str, list[str]] = {}
        for host, kind, _ in self.faults:
            kinds.setdefault(host, []).append(kind)
        return {host: ", ".join(dict.fromkeys(found)) for host, found in kinds.items()}

    def _cells(self, host: HostRow) -> dict[str, str]:
        hello, equipment, clock = host.hello, host.equipment, host.clock
        cells = {
            "host": host.name,
            **{name: getattr(hello, name, "") for name in _VERSIONS},
            "devices": _describe(equipment) if equipment else "",
        }
        if len(self.hosts) > 1:
            cells["address"] = host.address or ""
            cells["clock"] = f"{clock.offset_seconds:+.3f} s" if clock else ""
            cells["sends, Gbit/s"] = self._median(host.name, "source")
            cells["receives, Gbit/s"] = self._median(host.name, "target")
        return {**cells, "": self._kinds().get(host.name, "ok")}

    def _median(self, name: str, side: str) -> str:
        rates = [link.gbit for link in self._links if self.ends[getattr(link, side)] == name]
        return f"{statistics.median(rates):.3g}" if rates else ""

    def _lines_of_links(self, measured: Measurement) -> Iterator[str]:
        reduced = measured.all_reduce
        if reduced is None:
            yield "one process: there is nothing to measure between processes"
            return
        slowest = sorted(measured.links, key=lambda link: link.gbit)
        if len(slowest) > _MOST_LINKS:
            yield f"the {_MOST_LINKS} slowest of {len(slowest)} links:"
        for link in slowest[:_MOST_LINKS]:
            yield (
                f"{self.ends[link.source]} -> {self.ends[link.target]}: {link.gbit:.3g} Gbit/s, "
                f"latency {link.latency_seconds * 1e3:.3g} ms"
            )
        yield (
            f"all-reduce of {reduced.num_bytes / 2**20:g} MiB over {reduced.world_size} processes "
            f"({measured.backend}): {reduced.seconds:.3g} s, in which each sends {reduced.gbit:.3g} Gbit/s"
        )
        if measured.shares_memory:
            yield "note: processes that train on CPUs of one machine share memory, which is faster than this"

    def _host_to_json(self, host: HostRow) -> dict[str, Any]:
        hello, clock = host.hello, host.clock
        return {
            "name": host.name,
            **{name: getattr(hello, name) for name in _VERSIONS if hello},
            "address": host.address,
            "clock": clock and clock._asdict(),
            "equipment": host.equipment and asdict(host.equipment),
        }


def _describe(equipment: Equipment) -> str:
    counted = Counter(equipment.devices).items()
    memory = equipment.memory_bytes
    size = "" if memory is None else f", {memory / 2**30:.3g} GiB"
    return " + ".join(f"{number} x {name}" if number > 1 else name for name, number in counted) + size
