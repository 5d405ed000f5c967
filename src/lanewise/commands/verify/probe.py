"""Does the same small piece of work twice, and after other work, so that what differs shows why."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lanewise.commands.recording.recorder import tensor_digests
from lanewise.commands.verify.hidden import (
    GeneratorProbe,
    changed,
    hidden_state,
    numbers_that_matter,
    probe_generators,
)
from lanewise.commands.verify.operators import Call, Divergence, first_divergence, recording
from lanewise.commands.verify.probed_run import ProbedRun, evaluate_batch
from lanewise.commands.verify.read import Reads, look_further, probe_reads
from lanewise.commands.verify.time_limit import in_time
from lanewise.config import RunConfig
from lanewise.data import digest
from lanewise.engine.evaluation.evaluator import eval_mode
from lanewise.processes.world.world import LocalWorld

_NUM_AGAIN = 16


@dataclass(frozen=True)
class Passes:
    """What two forwards and backwards of the first lane gave, from equal weights and random state."""

    results: Sequence[str]
    """Digests of loss and gradients of each of the two."""
    calls: Sequence[Sequence[Call]]
    """The operators that each called."""
    changed: Sequence[str]
    """Values outside of parameters and buffers that a forward changed."""
    changed_parameters: Sequence[str]
    changed_buffers: Sequence[str]

    @property
    def are_unequal(self) -> bool:
        """Whether the two gave different results."""
        return self.results[0] != self.results[1]

    @property
    def collectives(self) -> list[Call]:
        """The calls by which the forward or the backward communicates with other processes."""
        return [call for call in self.calls[0] if call.is_collective]

    @property
    def divergence(self) -> Divergence | None:
        """The first operator on which the two disagree."""
        return first_divergence(*self.calls)


@dataclass(frozen=True)
class History:
    """What the first lane's micro-batch gave after other work, from an equal state of the model."""

    differed_after: str = ""
    """The work after which the result differed, as part of a sentence; empty where it never differed."""
    changed: Sequence[str] = ()
    """Values outside of parameters and buffers that the work changed."""
    num_runs: int = 0
    buffers: Sequence[str] = ()
    """Buffers that an evaluation changes so that its later micro-batches give other results."""
    averaged: Sequence[str] = ()
    """Float buffers of which lanes make different values that enter the next loss in training."""
    cut_short: Sequence[str] = ()
    """What took so long that it was looked at less often."""

    def __str__(self) -> str:
        differs = "gives a different loss or gradient from equal weights, buffers and random state"
        return f"the first lane's micro-batch, {self.differed_after}, {differs}"


@dataclass(frozen=True)
class Probe:
    """What one process found."""

    weights: Mapping[str, str]
    """Digests of parameters and buffers as they are built, and which of them are trained."""
    reads: Reads
    passes: Passes
    history: History
    """Empty where other processes look for all, or where passes are known to differ already."""
    generators: GeneratorProbe = field(default_factory=GeneratorProbe)
    """The generators of data, model and task."""
    first: Sequence[str] = ()
    """What computing another micro-batch first changed; empty where the process did not do so."""


def probe(config: RunConfig, probed: ProbedRun, *, is_reference: bool, is_repeat: bool = False) -> Probe:
    """Run the probes that each process runs. Not collective, unless the task communicates.

    Args:
        config: the run.
        probed: newly built.
        is_reference: whether to find out as well what one process finds out for all: reads in a loader's
            process if the run has any, further samples, what collate drops, and what depends on history.
        is_repeat: whether to read and to compute in another order: see `probe_reads`, and `Probe.first`.
    """
    weights = tensor_digests(probed.tensors().items())
    weights |= {
        f"{name}.requires_grad": str(weight.requires_grad) for name, weight in probed.model.named_parameters()
    }
    reads = probe_reads(probed, is_repeat=is_repeat)
    hidden = hidden_state(probed.model, task=probed.task)
    batch = probed.read()
    first: Sequence[str] = ()
    if is_repeat:
        probed.run(probed.other_turn, probed.read(probed.other_turn))
        now = hidden_state(probed.model, task=probed.task)
        first, hidden = changed(hidden, now), now
    passes = _probe_passes(probed, batch, hidden)
    history = History()
    if is_reference:
        reads = look_further(reads, probed, has_workers=config.data.num_workers > 0)
        if not (passes.are_unequal or passes.collectives or passes.changed_parameters):
            history = _probe_history(config, probed, batch, passes.results[0], hidden)
            history = replace(history, averaged=_averaged_buffers(probed, batch, passes.changed_buffers))
    known = {"task": probed.task, "dataset": probed.dataset, "eval_datasets": probed.eval_datasets}
    generators = probe_generators(lambda: _read_and_run(probed), probed.model, **known)
    return Probe(weights, reads, passes, history, generators, first)


def begin_with(probed: ProbedRun, lane: int, cache: Path) -> None:
    """Discard compiled code, and compile for the shapes of this lane first.

    So each layout compiles for its lanes in another order, and no layout reuses the kernels of another one.

    Args:
        probed: was probed.
        lane: one of the first step; nothing is computed where it is empty there.
        cache: a folder of this process for what it compiles.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    torch.compiler.reset()
    turn = probed.first_turn(lane)
    if turn.positions:
        probed.gradients(probed.lane(turn, probed.read(turn)))


def _read_and_run(probed: ProbedRun) -> str:
    """Read the first lane's micro-batch anew and compute it, and read a sample of each eval dataset."""
    batch = probed.reader_again()[probed.turn, probed.indices_of(probed.turn)].data
    readers = map(probed.reader_of, probed.eval_datasets.values())
    return digest(batch, [reader.read(0, (0,)) for reader in readers], probed.run(probed.turn, batch))


def _probe_passes(probed: ProbedRun, batch: Any, hidden: Mapping[str, str]) -> Passes:
    model = probed.model
    state = {name: value.detach().clone() for name, value in probed.tensors().items()}
    parameters = dict(model.named_parameters())
    results, calls = [], []
    changed_hidden: list[str] = []
    changed_state: set[str] = set()
    for _ in range(2):
        lane = probed.lane(probed.turn, batch)
        versions = {name: weight._version for name, weight in parameters.items()}
        with probed.kept_state():
            with recording(model) as recorded:
                loss, gradients = probed.gradients(lane)
            results.append(digest(loss.sum, loss.weight, gradients))
            calls.append(recorded)
            if not changed_hidden:
                changed_hidden = changed(hidden, hidden_state(model, task=probed.task))
            for name, value in probed.tensors().items():
                if name not in state or not torch.equal(value, state[name]):
                    changed_state.add(name)
            changed_state |= {
                name for name, weight in parameters.items() if weight._version != versions[name]
            }
    with probed.other_weights(0):  # a teacher that equals its student changes with these only
        state = {name: value.detach().clone() for name, value in parameters.items()}
        probed.gradients(probed.lane(probed.turn, batch))
        changed_state |= {name for name, weight in parameters.items() if not torch.equal(weight, state[name])}
    in_parameters = sorted(changed_state & parameters.keys())
    return Passes(results, calls, changed_hidden, in_parameters, sorted(changed_state - parameters.keys()))


def _probe_history(
    config: RunConfig, probed: ProbedRun, batch: Any, result: str, hidden: Mapping[str, str]
) -> History:
    """Run the first lane's micro-batch many times, after another one, after an evaluation, in a new model.

    Args:
        config: the run.
        probed: whose first lane was run twice, alike.
        batch: its micro-batch.
        result: what it gave.
        hidden: the state before the first run.
    """
    other = probed.read(probed.other_turn)
    num_runs = 2
    cut_short: list[str] = []

    def run(who: ProbedRun) -> bool:
        nonlocal num_runs
        num_runs += 1
        return who.run(who.turn, batch) == result

    def names() -> list[str]:
        return changed(hidden, hidden_state(probed.model, task=probed.task))

    def ways() -> Iterator[str]:
        """Do something else before each run, and say what it was."""
        for number in in_time(range(_NUM_AGAIN), cut_short, "runs of the first lane's micro-batch"):
            yield f"run {number + 3} times"
        probed.run(probed.other_turn, other)
        yield "run after another micro-batch"
        if _evaluates(probed, config):
            yield "run after an evaluation"
        with probed.other_weights(0):
            probed.run(probed.turn, batch)
        yield "run after a run with other weights"

    for way in ways():
        if not run(probed):
            return History(way, names(), num_runs)
    found = names()
    far = numbers_that_matter(lambda: run(probed), probed.model, task=probed.task) if found else []
    if far:
        return History(f"run while {', '.join(far[:3])} is far off", far, num_runs)
    new = ProbedRun(config, probed.device, probed.given_task)
    new.run(new.other_turn, other)
    if not run(new):
        return History("run in a new model after another micro-batch", found, num_runs)
    buffers = _changed_by_evaluation(probed, batch, other) if probed.eval_datasets else ()
    return History("", found, num_runs, buffers, cut_short=cut_short)


def _changed_by_evaluation(probed: ProbedRun, batch: Any, other: Any) -> Sequence[str]:
    """Return the buffers that an evaluation changes, where its later results depend on them."""
    turns = (probed.turn, batch), (probed.other_turn, other), (probed.turn, batch)
    before = tensor_digests(probed.model.named_buffers())
    losses = []
    try:
        with probed.kept_state(), eval_mode(probed.model), torch.no_grad():
            for turn, data in turns:
                loss = probed.lane(turn, data).run(probed.model)
                losses.append(digest(loss.sum, loss.weight))
            after = tensor_digests(probed.model.named_buffers())
    except Exception:  # noqa: BLE001 - training data need not be what is evaluated
        return ()
    return changed(before, after) if losses[0] != losses[2] else ()


def _averaged_buffers(probed: ProbedRun, batch: Any, names: Sequence[str]) -> Sequence[str]:
    """Return the float buffers of which two lanes make different values that change the next step's loss.

    In training, so that BatchNorm's statistics, which enter evaluations alone, are not among them.

    Args:
        probed: whose first lane was run.
        batch: its micro-batch.
        names: of the buffers that it changed.
    """
    if not names:
        return ()
    made = []
    for turn, data in ((probed.turn, batch), (probed.other_turn, probed.read(probed.other_turn))):
        with probed.kept_state():
            probed.gradients(probed.lane(turn, data))
            made.append({name: value.detach().clone() for name, value in probed.model.named_buffers()})
    of_one, of_other = made
    differing = [
        name
        for name, value in probed.model.named_buffers()
        if name in names
        and (value.is_floating_point() or value.is_complex())
        and value.shape == of_one[name].shape
        and not torch.equal(of_one[name], of_other[name])
    ]

    later = probed.read(probed.next_turn)

    def result(*names: str) -> str:
        with probed.kept_state():
            for name in names:
                probed.model.get_buffer(name).detach().copy_(of_one[name])
            return probed.run(probed.next_turn, later)

    usual = result()
    if not differing or result(*differing) == usual:
        return ()
    return [name for name in differing if result(name) != usual] or differing


def _evaluates(probed: ProbedRun, config: RunConfig) -> bool:
    """Evaluate, and tell whether there was something to evaluate."""
    world, sets = LocalWorld(probed.device), probed.eval_datasets
    try:
        return bool(evaluate_batch(probed.lanes, probed.model, sets, world, config))
    except Exception:  # noqa: BLE001 - the steps that are run evaluate as well, and say what failed
        return False
