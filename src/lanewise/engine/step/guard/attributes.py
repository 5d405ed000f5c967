"""Refuses what code of the user keeps besides parameters and buffers, where the run would depend on it.

[Note: one look]
Whatever can be reached may change, and most of it does so without harm: caches, counters for a log, what each
forward sets anew. So nothing is refused because it changed. Where the first lane of a step changes a value,
this lane runs twice more at the end of the next step, from equal weights, buffers and random numbers: if its
result differs, it depends on such a value. Where `before_update`, `after_update` or a loss of all samples
changes one, it and that lane run twice more: with numbers as it left them, and as they were before.

The first two steps are looked at, and the two after each checkpoint; a step between them pays nothing. What
acts rarely, or is of a dataset, is found by `lanewise verify`. See decision 26.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar, final

import torch

from lanewise.data import LaneBatch, digest
from lanewise.engine.buffers.buffers import StepState
from lanewise.engine.buffers.pack import kept_buffers
from lanewise.engine.reachable import Held, elements_of, setter_of, walk
from lanewise.engine.step.guard.equal_state import require_equal_state
from lanewise.engine.step.guard.look import Look
from lanewise.engine.step.message import StepTotals
from lanewise.engine.step.terms import LaneLoss
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn
from lanewise.processes.device.nested import copied
from lanewise.processes.device.random_state import kept_random_state
from lanewise.processes.device.tensor_bytes import checksums
from lanewise.processes.world.world import World
from lanewise.reduce import Reducer, kept_gradients

NUM_LOOKS = 2
"""How many steps are looked at, one after the other."""
_INSTEAD = (
    "self.progress says where the run is. Make a running statistic a buffer of the model (register_buffer), "
    "which becomes the mean over the lanes. What is of the whole step is a buffer that step_state names, "
    "written in after_update from what lanes gather (docs/losses.md). Draw random numbers from the default "
    "generators, which are seeded for every lane."
)

Seen: TypeAlias = Mapping[str, tuple[Held, str]]
"""What was found, by name, with a digest of its value."""
T = TypeVar("T")


@final
class Attributes(Look):
    """Looks at what can be reached from a model and its task. See [Note: one look].

    Besides it compares buffers between processes, and finds lanes that write buffers of the whole step.

    Args:
        reducer: holds the model.
        world: the processes.
        others: whatever else may hold state, by name; the task, if there is one.
        step_state: the buffers that no lane may write.
    """

    def __init__(
        self, reducer: Reducer, world: World, others: Mapping[str, object], step_state: StepState
    ) -> None:
        self._reducer, self._world = reducer, world
        self._others, self._step_state = others, step_state
        self._unsaved = ""
        """What is to be said before a checkpoint."""
        self._harmless: set[str] = set()
        """What was found to enter no result."""
        self.restart()

    def restart(self) -> None:
        """Look at the next steps."""
        self._num_left = NUM_LOOKS
        self.num_watched = NUM_LOOKS
        """In how many calls `watched` still looks; with 0 no lane runs again either."""
        self._lane: Any = None
        """The first lane that has samples, with a copy of its data; None: none yet, or no longer."""
        self._changed: dict[str, Held] = {}
        self._before: Seen | None = None

    def begin(self, turn: LaneTurn) -> None:
        """Collective."""
        if self._before is None:
            if self._num_left < NUM_LOOKS:
                require_equal_state(self._reducer.model, self._world, turn.step - 1)
            self._before, self._sums = self._look(), self._sums_of_step_state()

    def watch_no_more(self) -> None:
        """Run what is run once in a step without a look at it."""
        self.num_watched = 0

    def before_forward(self, turn: LaneTurn, lane: Any) -> None:
        is_wanted = self.num_watched and self._lane is None and not self._reducer.forward_is_collective
        # A batch is of a loop of the user's own, whose forward is not known.
        if is_wanted and not isinstance(lane, LaneBatch) and lane.batch.has_samples:
            self._lane = replace(lane, batch=replace(lane.batch, data=copied(lane.batch.data)))

    def after_forward(self, turn: LaneTurn, loss: LaneLoss | None) -> None:
        self._require_unwritten(turn, "forward or the loss")

    def after_backward(self, turn: LaneTurn) -> None:
        self._require_unwritten(turn, "backward")

    def finish(self, totals: StepTotals) -> bool:
        self._num_left -= 1
        self._changed |= _changed(self._before or {}, self._look())
        self._before = None
        if self._num_left > 0:
            return False
        names = sorted(self._changed.keys() - self._harmless)
        if self._lane is not None and names and self._gives_two_results([self._run_lane], names, {}):
            turn = self._lane.batch.turn
            raise TaskError(
                f"{', '.join(names[:3])} changed in the forward, loss or backward of lanes, and lane "
                f"{turn.lane} of step {turn.step + 1} depends on it: run twice more, from equal weights, "
                "buffers and random state, it gave two results. Each process runs some of the lanes only, so "
                f"every number of devices would train another model. {_INSTEAD}"
            )
        self._harmless.update(names)
        if self.num_watched in (0, NUM_LOOKS):  # nothing is watched after this step
            self._lane = None
        return True

    def watched(self, run: Callable[[], T], what: str, *, until_saved: bool) -> T:
        """Run what is run once in a step.

        Raises:
            TaskError: if it keeps something; where every process does the same, before a checkpoint only.
        """
        self.num_watched -= 1
        parameters = self._reducer.parameters
        before, begin = self._look(), kept_gradients(parameters)  # before_update changes them
        returned = run()
        now, put_back = self._look(), kept_gradients(parameters)

        def run_again() -> object:
            begin()
            return run(), [parameter.grad for parameter in parameters]

        found = _changed(before, now)
        names, runs = sorted(found.keys() - self._harmless), [self._run_lane] * (self._lane is not None)
        depends = bool(names) and self._gives_two_results([*runs, run_again], names, before)
        put_back()
        if depends:
            self._unsaved = (
                f"{what} changes {', '.join(names[:3])}, which no checkpoint has: a run that resumes "
                f"would be another one. {_INSTEAD}"
            )
        self._harmless.update(names)
        if not self.num_watched and self._num_left <= 0:
            self._lane = None
        if not until_saved:
            self.require_saved()
        return returned

    def require_saved(self) -> None:
        """Raise TaskError if something is kept that no checkpoint would have."""
        if self._unsaved:
            raise TaskError(self._unsaved)

    def _look(self) -> Seen:
        found = walk(self._reducer.model, self._others, into_datasets=False)
        return {held.name: (held, _digest(held.value)) for held in found}

    def _run_lane(self) -> object:
        """Run the forward and the loss of the first lane."""
        data = copied(self._lane.batch.data)  # which the forward may change
        return self._lane.loss(self._lane.forward(self._reducer.model, data), data)

    def _gives_two_results(
        self, runs: Iterable[Callable[[], object]], names: Iterable[str], before: Seen
    ) -> bool:
        """Run twice, and tell whether a loss, a gradient or a weight differs; put everything back.

        Args:
            runs: what to run; in an order that all of them follow twice.
            names: values that changed.
            before: what they were; the second time numbers among them are those.
        """
        if self._reducer.forward_is_collective:  # each process would have to run again
            return False
        now, results = self._look(), []
        put_back = _kept([now[name][0] for name in names if name in now])
        try:
            for values in (now, before):
                for name in names:
                    _put(values.get(name))
                results.append([self._result_of(run) for run in runs])
        except Exception:  # noqa: BLE001 - such as of a forward that cannot run again, or of full memory
            return False
        finally:
            put_back()
        is_repeated = self._world.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        are_close = partial(math.isclose, rel_tol=0.0 if is_repeated else 1e-4)
        return any(
            text != other or not all(map(are_close, norms, others))
            for (text, norms), (other, others) in zip(*results, strict=True)
        )

    def _result_of(self, run: Callable[[], object]) -> tuple[str, list[float]]:
        """Run something, and return what tells its result; put weights, buffers and random numbers back."""
        model = self._reducer.model
        weights, tensors = [part.detach().clone() for part in model.parameters()], list[Any]()
        with kept_random_state(), kept_buffers([model]):
            text = digest(run(), tensors=tensors)
            roots = [tensor.sum() for tensor in tensors if tensor.requires_grad]
            if roots:
                tensors += torch.autograd.grad(roots, self._reducer.parameters, allow_unused=True)
            tensors += [*model.parameters(), *model.buffers()]
            norms = [_norm(tensor) for tensor in tensors if tensor is not None]
        with torch.no_grad():
            for part, weight in zip(model.parameters(), weights, strict=True):
                if not torch.equal(part, weight):
                    part.copy_(weight)
        return text, norms

    def _sums_of_step_state(self) -> dict[str, int]:
        places = self._step_state[0] if self._step_state else ()
        tensors = {place.name: place.tensor for place in places if place.tensor is not None}
        return dict(zip(tensors, checksums(tensors.values()), strict=True))

    def _require_unwritten(self, turn: LaneTurn, where: str) -> None:
        for name, total in self._sums_of_step_state().items():
            if total != self._sums.get(name):
                raise TaskError(
                    f"buffer {name} changed in the {where} of lane {turn.lane} in step {turn.step + 1}, and "
                    "step_state says that no lane writes it. Give what is new in Loss(..., gather=...) or "
                    "total=..., and write the buffer in after_update, once in a step (docs/losses.md); or "
                    "leave it out of step_state: then it becomes the mean over the lanes."
                )


def _changed(before: Seen, now: Seen) -> dict[str, Held]:
    """Return what has another value; what was None or absent was made late, which is no change.

    But a list that had items may have more.
    """
    grown = {
        name: held
        for name, (held, _) in now.items()
        if name not in before and isinstance(held.path[-1][0], list | deque)
    }
    return {
        name: held
        for name, (held, digest_of) in before.items()
        if held.value is not None and now.get(name, (held, digest_of))[1] != digest_of
    } | {name: held for name, held in grown.items() if f"{name.rpartition('.')[0]}.0" in before}


def _put(found: tuple[Held, str] | None) -> None:
    """Put a number where it is held."""
    put = None if found is None else setter_of(found[0])
    if found is not None and put is not None and isinstance(found[0].value, int | float):
        put(found[0].value)


def _kept(values: Sequence[Held]) -> Callable[[], None]:
    """Return a function that puts numbers, tensors and what lists hold back to what they are now."""
    tensors = [(held, held.value.detach().clone()) for held in values if isinstance(held.value, torch.Tensor)]
    holders = [held.path[-1][0] for held in values]
    lists = [(holder, [*holder]) for holder in holders if isinstance(holder, list | deque)]

    def put_back() -> None:
        for held in values:
            _put((held, ""))
        for held, value in tensors:
            if (put := setter_of(held)) is not None:
                put(held.value)
            held.value.data.copy_(value)  # which a graph may have saved
        for holder, items in lists:
            holder.clear()
            holder.extend(items)

    return put_back


def _norm(tensor: torch.Tensor) -> float:
    """Return the norm of a tensor; where it is not finite, that is all that is told."""
    widened = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
    return float(torch.linalg.vector_norm(widened).nan_to_num(-1.0, -1.0, -1.0))


def _digest(value: Any) -> str:
    """Return what tells whether a value is as it was; of what cannot be read it tells nothing."""
    if isinstance(value, set | frozenset | Iterator):  # whose items may be anything
        return repr(value)
    with suppress(Exception):  # as of a tensor without elements
        return digest(elements_of(value))
    return ""
