"""Refuses code of a lane that draws from a generator of its own, which no lane seeds."""

import random
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import nn

from lanewise.data import digest
from lanewise.engine.reachable import OR_MAKE_IT_ANEW, SEED_THEM, Generator, own_generators
from lanewise.engine.step.guard.look import Look
from lanewise.engine.step.message import StepTotals
from lanewise.engine.step.terms import LaneLoss
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn

_NUM_STEPS = 4
_NUM_TWISTS = 1000
_LENGTH = 624
"""Words of a Mersenne twister's state, which it makes anew (a twist) when they are used up."""


class _State(NamedTuple):
    """The state of a generator, and what of it tells whether it was seeded anew."""

    whole: str
    origin: Any
    """The seed of torch's; the words of a Mersenne twister; None where only drawing changes the state."""


@final
class OwnGenerators(Look):
    """Looks at the generators of random numbers that model and task hold, around each lane.

    Each process runs some lanes only, so what such a generator gives to a lane depends on the number of
    processes. One that code of the lane seeds before it draws is right: its state does not follow from the
    one before, or, where each lane seeds it alike, it ends where the last lane left it. So it is refused when
    it moves for the second time. Generators of datasets move when samples are read, and are not looked at.

    Args:
        model: see `own_generators`.
        others: see `own_generators`; the task, if there is one.
    """

    def __init__(self, model: nn.Module, **others: object) -> None:
        self._generators: dict[str, Generator] = {
            held.name: held.value for held in own_generators(model, **others) if not held.is_of_a_dataset
        }
        self._before: dict[str, _State] = {}
        self._left: dict[str, _State] = {}
        """How lanes that moved a generator left it."""
        self._num_steps = 0

    def begin(self, turn: LaneTurn) -> None:
        """Begin a step, or go on with one whose lanes had a forward without a backward before."""
        if not self._before:
            self._before = self._states()

    def after_forward(self, turn: LaneTurn, loss: LaneLoss | None) -> None:
        """Raise TaskError if forward and loss of a lane moved a generator on."""
        self._require_unmoved(turn, "forward or the loss")

    def after_backward(self, turn: LaneTurn) -> None:
        """Raise TaskError if the backward moved a generator on."""
        self._require_unmoved(turn, "backward")

    def finish(self, totals: StepTotals) -> bool:
        """End the step; return whether enough was seen."""
        self._before = {}
        self._num_steps += 1
        return not self._generators or self._num_steps == _NUM_STEPS

    def _require_unmoved(self, turn: LaneTurn, where: str) -> None:
        states = self._states()
        for name, now in states.items():
            before = self._before[name]
            if now.whole == before.whole:
                continue
            if self._left.get(name, now).whole != now.whole and _is_later(before.origin, now.origin):
                raise TaskError(
                    f"the generator {name} drew random numbers in the {where} of lane {turn.lane} in step "
                    f"{turn.step + 1}. It is not seeded for the lane, so its numbers depend on which lanes a "
                    "process runs. "
                    f"{SEED_THEM} {OR_MAKE_IT_ANEW}"
                )
            self._left[name] = now
        self._before = states

    def _states(self) -> dict[str, _State]:
        return {name: _look_at(generator) for name, generator in self._generators.items()}


def _look_at(generator: Generator) -> _State:
    match generator:
        case torch.Generator():
            return _State(digest(generator.get_state()), generator.initial_seed())
        case random.Random():
            _, words, gauss = generator.getstate()
            return _State(digest(words := np.array(words, np.uint32), gauss), words[:_LENGTH])
        case np.random.RandomState():
            state = generator.get_state(legacy=False)
            return _State(digest(state), state["state"].get("key"))
    return _State(digest(generator.bit_generator.state), None)


def _is_later(before: Any, now: Any) -> bool:
    """Tell whether a state follows from another one by drawing, as far as their origins tell."""
    if not isinstance(before, np.ndarray) or len(before) != _LENGTH:
        return bool(np.array_equal(before, now))
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": before, "pos": _LENGTH}}
    for _ in range(_NUM_TWISTS):
        if np.array_equal(twister.state["state"]["key"], now):
            return True
        twister.random_raw(_LENGTH, output=False)
    return False
