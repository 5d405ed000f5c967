"""Traces a step of a run that is taken again, and says why two runs part in it."""

from collections.abc import Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, final

from lanewise.commands.recording.comparison import Recording, compare, differing
from lanewise.commands.replay.lane import lane_gradients
from lanewise.commands.replay.replay import PlannedJob, Replay
from lanewise.commands.replay.report import Compared
from lanewise.commands.verify.evidence import listed
from lanewise.commands.verify.operators import Call, recording
from lanewise.config.classes import check_classes
from lanewise.data import LaneReader, digest
from lanewise.engine.buffers.pack import kept_buffers
from lanewise.engine.step.lanes import StepBatches, to_device
from lanewise.processes.world.digests import digests_of
from lanewise.processes.world.environment import Environment
from lanewise.processes.world.world import World


@final
@dataclass(frozen=True, kw_only=True)
class DiffJob(PlannedJob):
    """The result is that of a `ReplayJob`; where no step is observed, the recording of the last one.

    That has more parts: `before`, the digests of the state before it; `lane gradients`, of each lane alone by
    parameter; `of samples`, the digest of each sample by its index, of a stream none; and `operators` of the
    lane that was asked for, in their order.
    """

    observed: Collection[int]
    """Steps, from 1."""
    lane: int | None = None
    """Whose operators are recorded."""

    def check(self, environment: Environment) -> None:
        """Leave it to the worker: modules of the other run may have the same names."""

    def run(self, world: World) -> Any:
        check_classes(self.config, has_task=self.task is not None, untrusted=self.untrusted)
        return super().run(world)

    def follow(self, replay: Replay, world: World) -> Any:
        return replay.observe(self.observed) if self.observed else self._trace(replay, world)

    def _trace(self, replay: Replay, world: World) -> Recording:
        """Run each lane of the last step alone, and take the step."""
        replay.advance()
        before, run, kept = replay.digests(), replay.engine.run, StepBatches(replay.batches)
        model, reader, recorded = run.training.model, run.loader.reader, list[Call]()
        gradients, samples = dict[int, dict[str, str]](), dict[int, str]()
        for batch in to_device(kept.copies(), world.device):
            if not batch.has_samples:
                continue
            lane = batch.turn.lane
            if isinstance(reader, LaneReader):
                samples |= {index: digest(reader.read(batch.turn.epoch, (index,))) for index in batch.indices}
            records = recording(model) if lane == self.lane else nullcontext(recorded)
            with kept_buffers([model]), records as recorded:
                root = run.runner.lane(batch).run(model).root(batch.turn, 1.0)
                gradients[lane] = digests_of(lane_gradients(model, *root))
        return {
            **replay.record(iter(kept)),
            "before": before,
            "lane gradients": gradients,
            "of samples": samples,
            "operators": dict(enumerate(recorded)),
        }


@dataclass(frozen=True)
class Cause:
    """Why two runs part."""

    kind: str
    """`weights before`, `samples`, `random numbers`, `operators`, `rounding`, `options`, `update`, or
    `record`: a run wrote something else than a replay of it gives."""
    step: int
    """From 1."""
    text: str
    """What was seen."""
    lane: int | None = None
    parameter: str | None = None
    """The first one whose gradient or value differs."""
    operator: str | None = None
    """The first one that differs, with its module and line."""

    def __str__(self) -> str:
        parameter = "" if self.parameter is None else f" (first in {self.parameter})"
        return f"cause: {self.kind}, in step {self.step:,}: {self.text}{parameter}"


def causes_in(step: int, mine: Recording, theirs: Recording) -> Iterator[Cause]:
    """Yield the causes in the first step, from 1, after which two runs have another state.

    Two where a step begins with other weights and with other samples.
    """
    found = compare({step: mine}, {step: theirs}).differing
    unequal = {part: [*one.unequal] for part, one in found.items()}
    if names := unequal.get("before"):
        yield Cause("weights before", step, "the step begins with another state", parameter=names[0])
    if lanes := unequal.get("samples"):
        yield Cause("samples", step, f"lanes {listed(lanes)} read other samples", lanes[0])
    elif lanes := unequal.get("inputs"):
        changed = {*unequal.get("of samples", ())} & {*mine["samples"][lanes[0]]}
        what = f"sample {listed(sorted(changed))}" if changed else "what collate makes of its samples"
        yield Cause("samples", step, f"in lane {lanes[0]}, {what} is another one", lanes[0])
    elif names:
        return
    elif lanes := unequal.get("lane gradients"):
        yield _in_lane(step, lanes[0], mine, theirs)
    elif options := unequal.get("optimizer"):
        text = f"{options[0]} is {' and '.join(found['optimizer'].values)}"
        yield Cause("options", step, text)
    else:
        parameter = next(iter(unequal.get("weights", ())), None)
        yield Cause("update", step, "equal gradients and options give another state", parameter=parameter)


def _in_lane(step: int, lane: int, mine: Recording, theirs: Recording) -> Cause:
    """Find the first operator in which two runs of a lane differ, from equal weights and samples."""
    parameter = next(differing(*(one["lane gradients"][lane] for one in (mine, theirs))), None)
    # Lines may have moved, and an operator that draws nothing does not depend on the random state.
    pairs = zip_longest(*(each["operators"].values() for each in (mine, theirs)))
    one, other = next((pair for pair in pairs if _computed(pair[0]) != _computed(pair[1])), (None, None))
    if one is None or other is None or one.operator != other.operator:
        kind, text = "operators", f"{one or 'nothing'} in the first run is {other or 'nothing'} in the second"
    elif one.inputs != other.inputs:
        kind, text = "operators", f"{one} gets other values, which no operator before it gave"
    elif one.random_state != other.random_state:
        kind, text = "random numbers", f"{one} draws other random numbers"
    else:
        kind, text = "rounding", f"{one} gives another result for equal inputs"
    return Cause(kind, step, f"in lane {lane}, {text}", lane, parameter, str(one or other))


def _computed(call: Call | None) -> tuple[str, ...] | None:
    """Return all but the place and the random state of an operator."""
    return None if call is None else (call.operator, call.inputs, call.outputs)


def cause_of_record(step: int, run: object, compared: Compared) -> Cause:
    """Say what a run wrote of a step that its replay does not give."""
    found = compared.comparison.differing
    what = "; ".join(f"{part} of {listed(one.names)}" for part, one in found.items())
    why = "; ".join(compared.changed_sources) or (
        "a device or its memory was wrong, something is not deterministic, or data changed"
    )
    parameter = found["digests"].names[0] if "digests" in found else None
    return Cause(
        "record", step, f"{run} wrote other {what} than its replay gives: {why}", parameter=parameter
    )
