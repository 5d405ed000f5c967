"""Says why no rank makes progress: who waits, for whom, where, and since when."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, final

from lanewise.processes.watch.channel import Beat, Channel, failure_of, named_ranks
from lanewise.processes.watch.collectives import differing, last_collectives
from lanewise.processes.watch.failure import Failure, described
from lanewise.processes.watch.heartbeat import COMMUNICATION
from lanewise.processes.watch.process import innermost_module, main_stack, state_of
from lanewise.processes.watch.store import StoreLostError

_WAITING = ("torch.distributed", "torch.nn.parallel", "lanewise.processes.world", "lanewise.reduce")
"""The modules in which a rank waits for the others."""


def gather_evidence(beats: Mapping[int, Beat]) -> dict[str, Any]:
    """Return what this process can say of itself, and of the processes on its host."""
    return {
        "waits": innermost_module().startswith(_WAITING),
        "stack": main_stack(),
        "states": {str(rank): state_of(beat.pid, beat.table) for rank, beat in beats.items()},
        "collectives": last_collectives(),
    }


def describe_stall(
    beats: Mapping[int, Beat],
    silent: Mapping[int, Beat],
    evidence: Mapping[int, Any],
    limit: str,
    absent: Sequence[int] = (),
) -> Failure:
    """Name the rank for which the others wait.

    It is one that is silent; else one that is not in a collective; else one of the earliest step.

    Args:
        beats: what each rank said last.
        silent: those of them that say nothing any more.
        evidence: what the others answered.
        limit: the key of the configuration that ends the run here, with its value.
        absent: the ranks that have not come yet.
    """
    if absent:
        text = f"no progress within {limit}: {named_ranks(absent)} did not come."
        return failure_of(absent[0], None, "stall", text)
    states: dict[int, str] = {}
    for answer in evidence.values():
        states |= {int(rank): state for rank, state in answer["states"].items() if state}
    waiting = {
        rank
        for rank, beat in beats.items()
        if rank not in silent
        and (beat.note[0] == COMMUNICATION or (rank in evidence and evidence[rank]["waits"]))
    }
    awaited = sorted(silent) or sorted(beats.keys() - waiting)
    if not awaited:
        first_step = min(beat.note[1] or 0 for beat in beats.values())
        awaited = [rank for rank, beat in sorted(beats.items()) if (beat.note[1] or 0) == first_step]
    others = [rank for rank in sorted(beats) if rank not in awaited]
    lines = [f"no progress within {limit}."]
    for rank in awaited:
        state = ", which has fallen silent" if rank in silent else ""
        state = f", {states[rank]}" if rank in states else state
        beat = beats[rank]
        where = f"last heard from in {described(beat.note)}" if rank in silent else _where(beat)
        lines.append(f"{beat.describe(rank)}{state}: {where}")
    if others:
        lines.append(f"{named_ranks(others)} wait{'s' * (len(others) == 1)} for {named_ranks(awaited)}:")
        lines += [f"  {beats[rank].describe(rank)}: {_where(beats[rank])}" for rank in others]
    elif len(awaited) > 1:
        lines.append("Each of them waits in a collective, and they are not in the same one.")
    lines += differing({rank: answer["collectives"] for rank, answer in evidence.items()})
    stacks: defaultdict[str, list[int]] = defaultdict(list)
    for rank, answer in sorted(evidence.items()):
        stacks[answer["stack"]].append(rank)
    stacks.pop("", None)
    for stack, ranks in sorted(stacks.items(), key=lambda item: item[1][0] not in awaited):
        lines.append(f"stack of {named_ranks(ranks)}:\n{stack.rstrip()}")
    key = limit.partition("=")[0]
    lines.append(f"If this is as it should be, raise {key}; in a debugger, set it to null.")
    return failure_of(awaited[0], beats[awaited[0]], "stall", "\n".join(lines))


@final
class Silence:
    """Notices that all ranks have fallen silent, as where each is stopped: then none of them can tell.

    Args:
        channel: of the launcher.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers: dict[int, int] = {}
        self._seconds = 0.0

    def check(self, seconds: float) -> Failure | None:
        """Return the failure if no rank has said anything for longer than it may make no progress.

        Args:
            seconds: since the last call.
        """
        try:
            beats = self._channel.beats()
        except StoreLostError:  # of this process: the machine is very busy
            return None
        numbers = {rank: beat.number for rank, beat in beats.items()}
        self._seconds = self._seconds + seconds if numbers == self._numbers else 0.0
        self._numbers = numbers
        limits = [math.inf if beat.limit_seconds is None else beat.limit_seconds for beat in beats.values()]
        if self._seconds < max(limits, default=math.inf):
            return None
        states = {str(rank): state_of(beat.pid, beat.table) for rank, beat in beats.items()}
        evidence = {-1: {"waits": False, "stack": "", "states": states, "collectives": []}}
        return describe_stall(beats, beats, evidence, f"distributed.stall_seconds={max(limits):g}")


def _where(beat: Beat) -> str:
    return f"in {described(beat.note)} for {beat.age_seconds:.0f} s"
