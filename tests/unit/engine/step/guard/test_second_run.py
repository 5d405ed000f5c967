"""What lanes may keep besides parameters and buffers."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from lanewise.data import LaneBatch
from lanewise.engine.buffers.buffers import LaneBuffers
from lanewise.engine.step.guard.second_run import SecondRun
from lanewise.engine.step.terms import LaneLoss
from lanewise.engine.step.totals import StepTotals
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn, Placement
from lanewise.processes.device.live_storage import LiveStorage
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
        return LaneLoss(outputs.sum() * self.factor(), weight=1.0)


def build(model, task=None, *, is_collective=False, equality="exact"):
    reducer = SimpleNamespace(
        model=model, parameters=list(model.parameters()), forward_is_collective=is_collective
    )
    world = LocalWorld(torch.device("cpu"))
    buffers = LaneBuffers([[model]], world, Placement((range(2),), 0))
    return SecondRun(reducer, buffers, equality, {} if task is None else {"task": task}), buffers


def run(built, factor, *, num_lanes=2):
    """Run passes until enough was seen, and return how many; each backward adds to the gradients."""
    second_run, buffers = built
    model = second_run._reducer.model
    for step in range(9):
        for number in range(num_lanes):
            turn = LaneTurn(0, step, number, range(1), range(num_lanes), is_last=number == num_lanes - 1)
            lane = Lane(LaneBatch(turn, (0,), torch.ones(1, 2), 1), factor)
            if not number:
                second_run.begin(turn)
            buffers.begin()
            second_run.before_forward(turn, lane)
            loss = lane.loss(lane.forward(model, lane.batch.data), lane.batch.data)
            second_run.after_forward(turn, loss)
            if loss.value.requires_grad:
                loss.value.backward()
            second_run.after_backward(turn)
        buffers.discard()
        if second_run.finish(StepTotals([])):
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


def test_what_changes_without_mattering_is_right():
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
    assert task.calls == 2 * (2 + 2)  # a counter for a log counts the further runs too


@pytest.mark.parametrize("num_lanes", [1, 2, 4])
@pytest.mark.parametrize("limit", [2, 3, 4, 5, 8, 1000])
def test_a_counter_is_refused_wherever_it_saturates(limit, num_lanes):
    """One that had saturated within the lanes of the first step gave equal results from there on."""
    task = SimpleNamespace(calls=0)

    def factor():
        task.calls += 1
        return min(1.0, task.calls / limit)

    with pytest.raises(TaskError, match=r"task\.calls changed"):
        run(build(nn.Linear(2, 1), task), factor, num_lanes=num_lanes)


def test_what_only_other_lanes_changed_is_refused():
    """A largest value so far does not change again where the same lane runs again."""
    task, values = SimpleNamespace(largest=0.0), iter([1.0, 3.0, *[1.0] * 9])

    def factor():
        task.largest = max(task.largest, next(values))
        return task.largest

    with pytest.raises(TaskError, match=r"task\.largest changed"):
        run(build(nn.Linear(2, 1), task), factor, num_lanes=3)


@pytest.mark.parametrize("factor", [lambda calls: calls, lambda calls: (-1) ** calls], ids=["size", "sign"])
def test_a_gradient_that_depends_on_what_a_hook_counted_is_refused(factor):
    """Gradients were compared by their norms, which are equal where only the sign differs."""
    model = nn.Linear(2, 1, bias=False)
    model.calls = 0

    def scale(gradient):
        model.calls += 1
        return gradient * factor(model.calls)

    model.register_forward_hook(lambda _, __, outputs: outputs.register_hook(scale) and None)
    with pytest.raises(TaskError, match=r"model\.calls changed"):
        run(build(model), lambda: 1.0)


def test_of_many_names_those_that_were_there_before_come_first():
    """Three names in the order of the alphabet hid the cause behind outputs that somebody keeps."""
    task = SimpleNamespace(steps=0)

    def factor():
        task.steps += 1
        vars(task).update({f"output_{number}": torch.rand(3) for number in range(9)})
        return task.steps

    with pytest.raises(TaskError, match=r"task\.steps, task\.output_0, .*output_6 and 2 more changed in"):
        run(build(nn.Linear(2, 1), task), factor)


def test_what_was_kept_from_the_step_before_is_found_by_a_process_with_one_lane():
    task = SimpleNamespace(last=torch.zeros(()))

    def factor():
        last, task.last = task.last, task.last + 1
        return last

    with pytest.raises(TaskError, match=r"task\.last changed"):
        run(build(nn.Linear(2, 1), task), factor, num_lanes=1)


def test_a_lane_that_cannot_run_again_or_whose_forward_is_collective_is_left_to_verify():
    calls = []

    def factor():
        calls.append(None)
        if len(calls) == 2:
            raise ValueError("called too often")
        return 1.0

    assert run(build(nn.Linear(2, 1)), factor) == 2
    assert (
        run(build(nn.Linear(2, 1), is_collective=True), lambda: float(calls.append(None) or len(calls))) == 2
    )


class Counting(nn.Module):
    """Has statistics, a buffer that its backward's checkpoint writes again, and hooks for its gradients."""

    def __init__(self, *, use_reentrant):
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 4), nn.BatchNorm1d(1)
        self.use_reentrant, self.num_complete = use_reentrant, 0
        for parameter in self.layer.parameters():
            parameter.register_post_accumulate_grad_hook(self.note)

    def note(self, _):
        self.num_complete += 1

    def forward(self, inputs):
        inputs = inputs + torch.rand(3, 2)
        hidden = checkpoint(self.layer, inputs.requires_grad_(), use_reentrant=self.use_reentrant)
        return self.norm(hidden.mean(1, keepdim=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_it_leaves_gradients_hooks_buffers_and_random_numbers_as_they_are(use_reentrant):
    def left(built):
        set_random_state(3)
        model = built[0]._reducer.model
        assert run(built, lambda: 1.0) == 2
        gradients = [parameter.grad for parameter in model.parameters()]
        return model.num_complete, gradients, dict(model.named_buffers()), torch.rand(())

    torch.manual_seed(1)
    looking = build(Counting(use_reentrant=use_reentrant))
    torch.manual_seed(1)
    other = build(Counting(use_reentrant=use_reentrant), is_collective=True)  # runs no lane again
    torch.testing.assert_close(left(looking), left(other), rtol=0, atol=0)


@pytest.mark.parametrize("num_lanes", [1, 3])
def test_a_further_run_needs_no_more_memory_than_a_lane(num_lanes):
    """Its gradients would come on top of those that the lanes before it left."""

    def peak(*, is_collective):
        layers = [nn.Linear(2, 64), *(nn.Linear(64, 64) for _ in range(8)), nn.Linear(64, 1)]
        built = build(nn.Sequential(*layers), is_collective=is_collective)
        with LiveStorage() as live:
            run(built, lambda: 1.0, num_lanes=num_lanes)
        return live.peak_bytes

    assert peak(is_collective=False) < peak(is_collective=True) + 64 * 64  # a quarter of a layer


def test_where_operators_add_in_any_order_small_differences_are_none():
    """Relative to the largest number: the gradient before a normalisation is nothing but rounding."""
    noise = iter(torch.linspace(1, 1 + 1e-5, 99).tolist())
    assert run(build(nn.Linear(2, 1), equality="close"), lambda: next(noise)) == 2
    with pytest.raises(TaskError):
        run(build(nn.Linear(2, 1)), lambda: next(noise))


def test_a_loss_by_rows_that_keeps_rows_is_refused():
    task = SimpleNamespace(rows=[])

    def row_loss():
        task.rows.append(1.0)
        return sum(task.rows)

    second_run, _ = build(nn.Linear(2, 1), task)
    turn = LaneTurn(0, 0, 0, range(1), range(1), is_last=True)
    second_run.begin(turn)
    with pytest.raises(
        TaskError, match=r"task\.rows\.0, task\.rows\.1 changed in the row_loss of T, and lane"
    ):
        second_run.before_rows(turn, row_loss, "the row_loss of T")
    second_run.before_rows(turn, lambda: torch.rand(3), "the row_loss of T")
