"""The same small piece of work on every process, twice: what differs tells what it depends on."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lanewise.config import RunConfig
from lanewise.data import digest
from lanewise.verify.hidden import changed, hidden_state
from lanewise.verify.history import History, probe_history
from lanewise.verify.operators import Call, Divergence, first_divergence, recording
from lanewise.verify.probed_run import ProbedRun
from lanewise.verify.read import Reads, look_further, probe_reads


@dataclass(frozen=True)
class Passes:
    """What two forwards and backwards of the first lane gave, from equal weights and random state."""

    results: Sequence[str]
    """Digests of loss and gradients of each of the two."""
    calls: Sequence[Sequence[Call]]
    """What each called."""
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
        """Where the forward or the backward communicates with other processes."""
        return [call for call in self.calls[0] if call.is_collective]

    @property
    def divergence(self) -> Divergence | None:
        """The first operator on which the two disagree."""
        return first_divergence(*self.calls)


@dataclass(frozen=True)
class Probe:
    """What one process found."""

    weights: Mapping[str, str]
    """Digests of parameters and buffers as they are built, and which of them are trained."""
    reads: Reads
    passes: Passes
    history: History | None
    """None where one process need not look, or where it is known already that passes differ."""
    first: Sequence[str] = ()
    """Where another micro-batch was the first one that the process computed: what that changed."""


def probe(config: RunConfig, probed: ProbedRun, *, is_reference: bool, is_repeat: bool = False) -> Probe:
    """Do the work. No collective, unless the task makes one.

    Args:
        config: the run.
        probed: newly built.
        is_reference: whether to look at what one process finds out for all: reads in a loader's process, if
            the run has such, further samples, what collate leaves out, and what passes leave behind.
        is_repeat: whether to read and to compute in another order: see `probe_reads`, and `Probe.first`.
    """
    weights = {name: digest(value) for name, value in probed.tensors().items()}
    weights |= {
        f"{name}.requires_grad": str(one.requires_grad) for name, one in probed.model.named_parameters()
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
    history = None
    if is_reference:
        reads = look_further(reads, probed, has_workers=config.data.num_workers > 0)
        if not (passes.are_unequal or passes.collectives or passes.changed_parameters):
            history = probe_history(config, probed, batch, passes.results[0], hidden)
    return Probe(weights, reads, passes, history, first)


def begin_with(probed: ProbedRun, lane: int, cache: Path) -> None:
    """Forget what was compiled, and let a lane's shapes be the first ones that are compiled.

    So every layout meets its lanes in another order than the others, and finds no kernel that they made.

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


def _probe_passes(probed: ProbedRun, batch: Any, hidden: Mapping[str, str]) -> Passes:
    model = probed.model
    state = {name: value.detach().clone() for name, value in probed.tensors().items()}
    parameters = dict(model.named_parameters())
    results, calls = [], []
    changed_hidden: list[str] = []
    changed_state: set[str] = set()
    for _ in range(2):
        lane = probed.lane(probed.turn, batch)
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
    in_parameters = sorted(changed_state & parameters.keys())
    return Passes(results, calls, changed_hidden, in_parameters, sorted(changed_state - parameters.keys()))
