"""Traces a step of a run that is taken again, and says why two runs part in it."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, final

from lanewise.commands.diff.recorded import listed
from lanewise.commands.jobs.job import Job
from lanewise.commands.replay.comparison import differing
from lanewise.commands.replay.replay import Replay, ReplayJob
from lanewise.commands.verify.operators import Call, recording
from lanewise.commands.verify.trace import StepTrace, Trace, compare, run_steps
from lanewise.config.classes import check_classes
from lanewise.data import LaneReader, digest
from lanewise.engine.buffers.pack import kept_buffers
from lanewise.engine.step.lanes import StepBatches, to_device
from lanewise.processes.device.tensor_bytes import changed_element
from lanewise.processes.world.digests import named_tensors
from lanewise.processes.world.environment import Environment
from lanewise.processes.world.world import World


@dataclass(frozen=True)
class TracedStep:
    """What a step computed when it was taken again."""

    before: Mapping[str, str]
    """The digests of the state before it."""
    gradients: Mapping[int, Mapping[str, str]]
    """Digest of the gradient of each lane alone, by parameter."""
    samples: Mapping[int, str]
    """Digest of each sample by its index; of a stream none."""
    calls: Sequence[Call]
    """The operators of the lane that was asked for."""
    step: StepTrace
    changed: Mapping[str, tuple[int, int] | None]
    """Tensors of which the run wrote another digest; if one element explains it, its place and its bits that
    differ."""


@final
@dataclass(frozen=True, kw_only=True)
class DiffJob(Job):
    """The result is a `ReplayedStep` for each observed one; where none is, the `TracedStep` of the last."""

    replay: ReplayJob
    lane: int | None = None
    """Whose operators are recorded."""

    def check(self, environment: Environment) -> None:
        """Leave it to the worker: modules of the other run may have the same names."""

    def run(self, world: World) -> Any:
        check_classes(self.config, has_task=self.task is not None, untrusted=self.untrusted)
        if self.replay.observed:
            return self.replay.run(world)
        logging.getLogger().setLevel(logging.ERROR)
        plan = self.replay.plan
        with closing(Replay(plan, world, self.replay.folder)) as replay:
            while replay.num_taken < plan.step - 1:
                replay.take()
            replay.enter()
            return self._trace(replay, world)

    def _trace(self, replay: Replay, world: World) -> TracedStep:
        """Run each lane of the next step alone, and take the step."""
        before, run, kept = replay.digests(), replay.engine.run, StepBatches(replay.batches)
        model, reader, recorded = run.training.model, run.loader.reader, list[Call]()
        gradients, samples = dict[int, dict[str, str]](), dict[int, str]()
        for batch in to_device(kept.copies(), world.device):
            if not batch.has_samples:
                continue
            lane = batch.turn.lane
            if isinstance(reader, LaneReader):
                samples |= {index: digest(reader.read(batch.turn.epoch, (index,))) for index in batch.indices}
            model.zero_grad()
            records = recording(model) if lane == self.lane else nullcontext(recorded)
            with kept_buffers([model]), records as recorded:
                root, factor = run.runner.lane(batch).run(model).root(batch.turn, 1.0)
                if root is not None:
                    root.backward(factor)
            gradients[lane] = {name: digest(weight.grad) for name, weight in model.named_parameters()}
        (step,) = run_steps(replay.engine, world, [replay.num_taken], batches=iter(kept))
        now, written = replay.digests(), replay.plan.written.digests.get(replay.plan.step, {})
        changed = {
            name: changed_element(tensor, int(written[name], 16) ^ int(now[name], 16))
            for name, tensor in named_tensors(run.state.take())
            if written.get(name, now[name]) != now[name]
        }
        return TracedStep(before, gradients, samples, recorded, step, changed)


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


def causes_in(step: int, mine: TracedStep, theirs: TracedStep) -> Iterator[Cause]:
    """Yield the causes in the first step, from 1, after which two runs have another state.

    Two where a step begins with other weights and with other samples.
    """
    a, b = mine.step, theirs.step
    if names := list(differing(mine.before, theirs.before)):
        yield Cause("weights before", step, "the step begins with another state", parameter=names[0])
    options = compare(Trace([a]), Trace([b])).get("optimizer")
    if lanes := list(differing(a.samples, b.samples)):
        yield Cause("samples", step, f"lanes {listed(lanes)} read other samples", lanes[0])
    elif lanes := list(differing(a.inputs, b.inputs)):
        changed = {*differing(mine.samples, theirs.samples)} & {*a.samples[lanes[0]]}
        what = f"sample {listed(sorted(changed))}" if changed else "what collate makes of its samples"
        yield Cause("samples", step, f"in lane {lanes[0]}, {what} is another one", lanes[0])
    elif names:
        return
    elif lanes := list(differing(mine.gradients, theirs.gradients)):
        yield _in_lane(step, lanes[0], mine, theirs)
    elif options is not None:
        text = f"{options.place.partition(', ')[2]} is {' and '.join(map(str, options.values))}"
        yield Cause("options", step, text)
    else:
        parameter = next(differing(a.weights, b.weights), None)
        yield Cause("update", step, "equal gradients and options give another state", parameter=parameter)


def _in_lane(step: int, lane: int, mine: TracedStep, theirs: TracedStep) -> Cause:
    """Find the first operator in which two runs of a lane differ, from equal weights and samples."""
    parameter = next(differing(mine.gradients[lane], theirs.gradients[lane]), None)
    # Lines may have moved, and an operator that draws nothing does not depend on the random state.
    found = (
        pair for pair in zip_longest(mine.calls, theirs.calls) if _computed(pair[0]) != _computed(pair[1])
    )
    one, other = next(found, (None, None))
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


def cause_of_record(step: int, run: object, traced: TracedStep, changed_sources: Sequence[str]) -> Cause:
    """Say what a run wrote of a step that its replay does not give."""
    name, element = next(iter(traced.changed.items()), (None, None))
    what = "metrics" if name is None else f"digests of {listed([*traced.changed])}"
    text = f"{run} wrote other {what} than its replay gives"
    if len(traced.changed) == 1 and element is not None:
        place, bits = element
        which = [bit for bit in range(bits.bit_length()) if bits >> bit & 1]
        text += f", where element {place} alone differs, in bit {listed(which)}"
    why = "; ".join(changed_sources) or (
        "a device or its memory was wrong, something is not deterministic, or data changed"
    )
    return Cause("record", step, f"{text}: {why}", parameter=name)
