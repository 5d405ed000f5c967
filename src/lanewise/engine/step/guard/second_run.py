"""Refuses a lane whose result depends on what code of the user keeps besides parameters and buffers.

[Note: second run]
Whatever can be reached may change, and most of it does so without harm: caches, counters for a log, what each
forward sets anew. So nothing is refused because it changed. Instead the first lane of a pass runs twice more,
from equal weights, buffers and random numbers, after all other lanes of this process but the last one. Three
results are compared: the loss of the pass, and the losses and gradients of both further runs.

Before the last lane the gradients take no more memory than during it. Those of a further run are dropped one
by one as autograd makes them, so such a run needs no more than any lane does, but for a copy of its batch.

The first two passes of a start are looked at; a step after them pays nothing. What acts rarely, or only where
a run resumes, is found by `lanewise verify`. See decision 26.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, final

import torch

from lanewise.config import Equality
from lanewise.data import LaneBatch, digest
from lanewise.engine.buffers.buffers import LaneBuffers
from lanewise.engine.reachable import elements_of, walk
from lanewise.engine.step.guard.look import Look
from lanewise.engine.step.lanes import TaskLane
from lanewise.engine.step.terms import LaneLoss
from lanewise.engine.step.totals import StepTotals
from lanewise.errors import MOST_SHOWN, TaskError
from lanewise.lanes import LaneTurn
from lanewise.processes.device.accelerator import start_copy_to_host
from lanewise.processes.device.nested import copied, map_leaves
from lanewise.processes.device.random_state import kept_random_state
from lanewise.reduce import Reducer

NUM_PASSES = 2
"""In how many passes a lane runs again."""
NUM_RUNS = 2
"""How often it does: of two runs the gradients are compared too."""


@final
class SecondRun(Look):
    """Runs the first lane of each of two passes twice more. See [Note: second run].

    Args:
        reducer: holds the model.
        buffers: gives the model the buffers of the start of the step.
        equality: in `exact` results must be equal; in `close` operators may add in any order.
        others: whatever else may hold state, by name, for the error.
    """

    verify_does_more = True

    def __init__(
        self, reducer: Reducer, buffers: LaneBuffers, equality: Equality, others: Mapping[str, object]
    ) -> None:
        self._reducer, self._buffers, self._others = reducer, buffers, others
        self._tolerance = 0.0 if equality == "exact" else 1e-4
        self._num_left = NUM_PASSES
        self._lane: Any = None
        """The first lane that has samples, with a copy of its data until it has run again."""
        self._results: list[list[float]] = []
        """What it gave so far."""
        self._before: dict[str, str] = {}

    def begin(self, turn: LaneTurn) -> None:
        self._lane, self._results, self._before = None, [], self._digests()

    def before_forward(self, turn: LaneTurn, lane: Any) -> None:
        is_wanted = self._lane is None and not self._reducer.forward_is_collective
        # A batch is of a loop of the user's own, whose forward is not known.
        if is_wanted and not isinstance(lane, LaneBatch) and lane.batch.has_samples:
            self._lane = replace(lane, batch=replace(lane.batch, data=copied(lane.batch.data)))
        if turn.is_last and self._lane is not None:
            _run_twice(self._run_lane, self._results)
            self._lane = replace(self._lane, batch=replace(self._lane.batch, data=None))

    def after_forward(self, turn: LaneTurn, loss: LaneLoss | None) -> None:
        is_of_lane = self._lane is not None and turn == self._lane.batch.turn
        if is_of_lane and loss is not None and loss.share is None:
            self._results.append(_read(_numbers(loss)))

    def finish(self, totals: StepTotals) -> bool:
        self._num_left -= 1
        if self._lane is not None:
            turn = self._lane.batch.turn
            self._require_equal(self._results, "the forward, loss or backward of lanes", turn)
        return self._num_left == 0

    def before_rows(self, turn: LaneTurn, compute: Callable[[], object], what: str) -> None:
        results: list[list[float]] = []
        _run_twice(lambda: _read(_numbers(compute())), results)
        self._require_equal(results, what, turn)

    def _run_lane(self) -> list[float]:
        """Return the loss and the gradients of the lane, and leave the buffers as they are."""
        lane, data = self._lane, copied(self._lane.batch.data)  # which the forward may change
        try:
            made = lane.loss(lane.forward(self._reducer.model, data), data)
            made = lane.check(made) if isinstance(lane, TaskLane) else made
            return _read([*_numbers(made), *self._gradients(made)])
        finally:
            self._buffers.reset()

    def _gradients(self, made: object) -> list[torch.Tensor]:
        """Return a number for each parameter's gradient, which goes into no `param.grad`.

        None where autograd refuses, as under activation checkpointing with use_reentrant=True.
        """
        numbers = [parameter.new_zeros(()) for parameter in self._reducer.parameters]

        def drop(number: int, gradient: torch.Tensor) -> torch.Tensor:
            numbers[number] = _number(gradient)
            return gradient.new_zeros(()).expand_as(gradient)  # which has the memory of one element

        roots = [
            leaf.sum() for leaf in _leaves(made) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        with ExitStack() as handles, suppress(RuntimeError):
            for number, parameter in enumerate(self._reducer.parameters):
                handles.callback(parameter.register_hook(partial(drop, number)).remove)
            if roots:
                torch.autograd.grad(roots, self._reducer.parameters, allow_unused=True)
            return numbers
        return []

    def _digests(self) -> dict[str, str]:
        """Return a digest of all that can be reached, by name."""
        found: dict[str, str] = {}
        for held in walk(self._reducer.model, self._others, into_datasets=False):
            with suppress(Exception):  # as of a tensor without elements
                is_opaque = isinstance(held.value, set | frozenset | Iterator)  # whose items may be anything
                found[held.name] = repr(held.value) if is_opaque else digest(elements_of(held.value))
        return found

    def _require_equal(self, results: Sequence[Sequence[float]], where: str, turn: LaneTurn) -> None:
        """Compare results; that of a pass has no gradients. Name what changed since it began."""
        scale = max(map(abs, chain(*results)), default=0.0)
        are_close = partial(math.isclose, rel_tol=self._tolerance, abs_tol=self._tolerance * scale)
        if all(all(map(are_close, *both)) for both in pairwise(results)):
            return
        now = self._digests()
        changed = [name for name in now | self._before if now.get(name) != self._before.get(name)]
        # What began to exist in the pass is more often a result than a cause.
        names = sorted(changed, key=lambda name: (name not in self._before, name))
        more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
        told = f"{', '.join(names[:MOST_SHOWN])}{more}" or "what neither the model nor the task shows"
        raise TaskError(
            f"{told} changed in {where}, and lane {turn.lane} of step {turn.step + 1} depends on it: run "
            "twice more, from equal weights, buffers and random state, it gave another result. Each process "
            "runs some of the lanes only, so every number of devices would train another model. "
            "self.progress says where the run is. Make a running statistic a buffer of the model "
            "(register_buffer), which becomes the mean over the lanes. What is of the whole step is a buffer "
            "that step_state names, written in after_update from what lanes gather (docs/losses.md). Draw "
            "random numbers from the default generators, which are seeded for every lane."
        )


def _run_twice(run: Callable[[], list[float]], results: list[list[float]]) -> None:
    """Add two results, unless it cannot run again, as for want of memory; leave the random state."""
    with suppress(Exception):
        for _ in range(NUM_RUNS):
            with kept_random_state():
                results.append(run())


def _leaves(made: object) -> list[object]:
    """Return the numbers and tensors in what a loss gave."""
    found: list[object] = []
    map_leaves(found.append, made, lambda leaf: isinstance(leaf, torch.Tensor | int | float))
    return found


def _numbers(made: object) -> list[torch.Tensor]:
    return list(map(_number, _leaves(made)))


def _number(leaf: Any) -> torch.Tensor:
    """Return the value of a number; of a tensor its norm plus its share along the vector of ones.

    The norm alone is equal where signs differ. Both feel errors of rounding alike. Where the number is not
    finite, that is all it tells.
    """
    tensor = torch.as_tensor(leaf).detach()
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    is_number = tensor.numel() == 1 and not tensor.is_complex()
    if is_number:
        number = tensor.reshape(())
    else:
        number = torch.linalg.vector_norm(tensor) + tensor.sum().real / math.sqrt(max(1, tensor.numel()))
    return number.nan_to_num(-1.0, -1.0, -1.0)


def _read(numbers: Sequence[torch.Tensor]) -> list[float]:
    """Return numbers of any devices, waiting once."""
    return start_copy_to_host(torch.stack([one.to(numbers[0].device) for one in numbers]))().tolist()
