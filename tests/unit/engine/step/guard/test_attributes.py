"""What lanes, and what runs once in a step, may keep besides parameters and buffers."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from lanewise.data import LaneBatch
from lanewise.engine.step.guard.attributes import Attributes
from lanewise.engine.step.message import StepTotals
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn
from lanewise.processes.device.random_state import set_random_state
from lanewise.processes.world.world import LocalWorld


@dataclass
class Lane:
    """A lane whose loss is the sum of the outputs times what a function of the task returns."""

    batch: LaneBatch
    factor: Callable[[], object]

    def forward(self, model, data):
        set_random_state(5)
        return model(data)

    def loss(self, outputs, data):
        return outputs.sum() * self.factor()


def build(model, task=None, *, is_collective=False):
    reducer = SimpleNamespace(
        model=model, parameters=list(model.parameters()), forward_is_collective=is_collective
    )
    return Attributes(reducer, LocalWorld(torch.device("cpu")), {} if task is None else {"task": task}, [])


def run(attributes, factor, backward=lambda: None):
    """Run steps of two lanes until enough was seen."""
    model = attributes._reducer.model
    for step in range(9):
        for number in range(2):
            turn = LaneTurn(0, step, number, range(1), range(2), is_last=number == 1)
            lane = Lane(LaneBatch(turn, (0,), torch.ones(1, 2), 1), factor)
            if not number:
                attributes.begin(turn)
            attributes.before_forward(turn, lane)
            lane.loss(lane.forward(model, lane.batch.data), lane.batch.data)
            attributes.after_forward(turn, None)
            backward()
            attributes.after_backward(turn)
        if attributes.finish(StepTotals([])):
            return step + 1
    raise AssertionError("it looks for ever")


DRAWS = {
    "torch": (lambda: torch.Generator().manual_seed(7), lambda one: torch.rand((), generator=one)),
    "python": (lambda: random.Random(7), lambda one: one.random()),
    "numpy": (lambda: np.random.default_rng(7), lambda one: one.random()),
    "numpy's old one": (lambda: np.random.RandomState(7), lambda one: one.rand()),
    "many at once": (lambda: np.random.RandomState(7), lambda one: one.rand(100_000).mean()),
    "of another kind": (
        lambda: np.random.RandomState(np.random.PCG64(7)),
        lambda one: one.random_sample(),
    ),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_a_generator_whose_numbers_enter_the_loss_is_named_with_its_remedy(kind):
    make, draw = DRAWS[kind]
    task = SimpleNamespace(noise=make())
    with pytest.raises(TaskError) as error:
        run(build(nn.Linear(2, 1), task), lambda: draw(task.noise))
    said = str(error.value)
    assert said.startswith(
        "task.noise changed in the forward, loss or backward of lanes, and lane 0 of step 1"
    )
    assert "Draw random numbers from the default generators" in said


@pytest.mark.parametrize("seed", [torch.initial_seed, lambda: 7], ids=["of the lane", "always the same"])
def test_a_generator_that_lanes_seed_or_make_anew_is_right(seed):
    task = SimpleNamespace(torch=torch.Generator(), python=random.Random(7), anew=None)

    def factor():
        task.python.seed(seed())
        task.anew = np.random.default_rng(seed())
        drawn = torch.rand((), generator=task.torch.manual_seed(seed()))
        return drawn + task.python.random() + task.anew.random()

    assert run(build(nn.Linear(2, 1), task), factor) == 2


class Samples(Dataset):
    def __init__(self):
        self.reads = 0


def test_what_changes_without_mattering_is_right_and_numbers_are_as_if_nobody_had_looked():
    """A counter that enters nothing, a memo, what is set anew, a log, a dataset's reads, an open file."""
    with Path(__file__).open() as file:
        task = SimpleNamespace(calls=0, memo=None, anew=torch.zeros(1), log=[], data=Samples(), file=file)

        def factor():
            task.calls += 1
            task.memo = task.memo or 2.0
            task.anew = torch.rand(3)
            task.log.append(task.calls)
            task.data.reads += 1
            return task.memo * task.anew.sum()

        assert run(build(nn.Linear(2, 1), task), factor) == 2
    assert task.calls == 4


def test_a_gradient_that_depends_on_what_a_hook_counted_is_refused():
    model = nn.Linear(2, 1)
    model.calls = 0

    def scale(gradient):
        model.calls += 1
        return gradient * model.calls

    model.register_forward_hook(lambda _, __, outputs: outputs.register_hook(scale) and None)
    step = lambda: model(torch.ones(1, 2)).sum().backward()  # noqa: E731
    with pytest.raises(TaskError, match=r"model\.calls changed"):
        run(build(model), lambda: 1.0, step)


def test_what_was_kept_from_the_step_before_is_found_by_a_process_with_one_lane():
    task = SimpleNamespace(last=torch.zeros(()))

    def factor():
        last, task.last = task.last, task.last + 1
        return last

    with pytest.raises(TaskError, match=r"task\.last changed"):
        run(build(nn.Linear(2, 1), task), factor)


def test_a_lane_that_cannot_run_again_or_whose_forward_is_collective_is_left_to_verify():
    task = SimpleNamespace(calls=0)

    def factor():
        task.calls += 1
        if task.calls > 4:
            raise ValueError("called too often")
        return task.calls

    assert run(build(nn.Linear(2, 1), task), factor) == 2
    task.calls = 0
    assert run(build(nn.Linear(2, 1), task, is_collective=True), factor) == 2


class Holds:
    """A task that keeps something in its update, on which what it does to the weights depends."""

    def __init__(self):
        self.number, self.unread, self.queue, self.seen = 0, 0, torch.zeros(3), []
        self.table, self.names = None, {}
        self.state = SimpleNamespace(n=0)
        self.teacher = nn.Linear(2, 2)
        self.rng = random.Random(7)

    def shift(self):
        kept = self.number + self.state.n + len(self.seen) + float(self.queue.sum())
        return kept + float(self.teacher.weight.detach().sum()) + 3 * bool(self.table)

    def count(self):
        self.number += 1

    def count_for_nobody(self):
        self.unread += 1

    def make_late(self):
        self.table = self.table or [1]
        self.names.setdefault("a", "b")


def update_twice(task, update):
    model = nn.Linear(2, 2)
    attributes = build(model, task)

    @torch.no_grad()
    def after_update():
        model.weight.add_(task.shift())
        drawn = update(task)
        model.bias.add_(drawn if isinstance(drawn, float) else 0.0)

    for _ in range(2):
        before = model.weight.clone()
        expected = before + task.shift()
        attributes.watched(after_update, "after_update", until_saved=False)
        assert torch.equal(model.weight, expected)  # also where it ran more often than once


@pytest.mark.parametrize(
    ("update", "name"),
    [
        (Holds.count, "task.number"),
        (lambda task: setattr(task.state, "n", 4), "task.state.n"),
        (lambda task: task.queue.add_(1), "task.queue"),
        (lambda task: task.seen.append(1), "task.seen.1"),
        (lambda task: task.teacher.weight.data.mul_(2), "task.teacher.weight"),
        (lambda task: task.rng.random(), "task.rng"),
    ],
)
def test_what_an_update_keeps_where_no_checkpoint_has_it_is_refused(update, name):
    task = Holds()
    with pytest.raises(TaskError, match=f"after_update changes {name}, which no checkpoint has"):
        update_twice(task, update)


@pytest.mark.parametrize("update", [Holds.count_for_nobody, Holds.make_late])
def test_what_an_update_counts_for_nobody_or_makes_once_is_right(update):
    update_twice(Holds(), update)


def test_what_every_process_keeps_alike_is_refused_before_a_checkpoint_only():
    task = Holds()
    attributes = build(nn.Linear(2, 2), task)

    def batch_loss():
        task.count()
        return 2 + task.number

    assert attributes.watched(batch_loss, "the batch_loss of T", until_saved=True) == 3
    assert task.number == 1
    with pytest.raises(TaskError, match=r"the batch_loss of T changes task\.number, which no checkpoint has"):
        attributes.require_saved()
