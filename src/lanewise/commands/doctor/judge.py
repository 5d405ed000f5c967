"""Judges clocks and links: which host is at fault."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lanewise.commands.doctor.measure import Equipment, Link
from lanewise.launch.agree import Fault

_MOST_SECONDS = 1.0
"""The run does not depend on clocks, but what people read after it does: logs of several hosts are read side
by side, and files on a shared disk are compared by time, in seconds. Certificates allow for more."""
_LEAST_OF_FASTEST = 1 / 3
"""A link must reach this part of what the fastest one reaches. A disturbed measurement may reach half, a
faulty link usually a tenth."""
_LEAST_OF_INTERFACE = 0.1
"""A link must reach this part of what the interface is made for: one connection does not fill a fast one."""

_REMEDY = (
    "Look there at the speed of the interface (`ethtool`), limits (`tc qdisc`) and errors (`ip -s link`), "
    "and at the cable and the port of the switch."
)


class Clock(NamedTuple):
    """What a host's clock shows, compared with that of this machine."""

    offset_seconds: float
    """Positive where it is ahead."""
    uncertainty_seconds: float


def judge_clocks(clocks: Mapping[str, Clock], here: str) -> Iterator[Fault]:
    """Yield the hosts whose clocks are wrong: those that differ from most.

    Args:
        clocks: of each host, by name.
        here: how to call this machine, whose own clock may be the wrong one.
    """
    if not clocks:
        return
    all_clocks = {here: Clock(0.0, 0.0), **clocks}
    # Of two clocks that of this machine counts as right.
    right = (
        statistics.median(clock.offset_seconds for clock in all_clocks.values()) if len(clocks) > 1 else 0.0
    )
    for name, clock in all_clocks.items():
        off = clock.offset_seconds - right
        if abs(off) - clock.uncertainty_seconds > _MOST_SECONDS:
            yield Fault(
                name,
                "clock",
                f"its clock is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} the others. Let it "
                "follow NTP (`timedatectl`): logs are read side by side, files and certificates are compared "
                "by time.",
            )


def judge_links(
    links: Sequence[Link],
    names: Sequence[str],
    equipment: Sequence[Equipment] = (),
    expected_gbit: float | None = None,
) -> Iterator[Fault]:
    """Yield the ends of slow links that are at fault: first the one that is at most of them.

    A link is slow if it does not reach what was expected; without that, a third of the fastest link or a
    tenth of what the interfaces at both ends are made for.

    Args:
        links: in both directions.
        names: of the ends.
        equipment: of the ends, where interfaces tell something.
        expected_gbit: what each link must reach.
    """
    fastest = max((link.gbit for link in links), default=0.0)

    def least(link: Link) -> tuple[float, str]:
        if expected_gbit is not None:
            return expected_gbit, f"{expected_gbit:.3g} Gbit/s were expected"
        speeds = [equipment[end].interface_gbit for end in (link.source, link.target) if equipment]
        made_for = min((speed for speed in speeds if speed is not None), default=0.0)
        return max(
            (_LEAST_OF_FASTEST * fastest, f"the fastest link has {fastest:.3g} Gbit/s"),
            (_LEAST_OF_INTERFACE * made_for, f"the interfaces are made for {made_for:.3g} Gbit/s"),
        )

    slow = [link for link in links if link.gbit < least(link)[0]]
    while slow:
        ends = Counter([("sends", link.source) for link in slow])
        ends.update(("receives", link.target) for link in slow)
        (does, end), _ = ends.most_common(1)[0]  # of equals the sender: what is sent is limited more often
        of_end = [link for link in slow if end == (link.source if does == "sends" else link.target)]
        slow = [link for link in slow if link not in of_end]
        others = ", ".join(names[link.target if does == "sends" else link.source] for link in of_end)
        slowest = min(of_end, key=lambda link: link.gbit)
        text = (
            f"it {does} only {slowest.gbit:.3g} Gbit/s {'to' if does == 'sends' else 'from'} {others}, and "
            f"{least(slowest)[1]}. {_REMEDY}{_where_else(does, others, len(of_end), len(names))}"
        )
        yield Fault(names[end], "link", text)


def _where_else(does: str, others: str, num_slow: int, num_ends: int) -> str:
    """Return where to look besides."""
    if num_slow < num_ends - 1:
        return f" Its other links are not slow: look at the way between it and {others}."
    if num_ends == 2:
        return f" If nothing is found, look at what {others} {'receives' if does == 'sends' else 'sends'}."
    return ""
