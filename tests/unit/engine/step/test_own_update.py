"""What a task may do after an update, and what is refused."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lanewise import Task
from lanewise.engine.precision import Precision
from lanewise.engine.step.average import update_average
from lanewise.engine.step.joining import Joined
from lanewise.engine.step.lanes import LaneRunner
from lanewise.engine.step.metrics import Gradient
from lanewise.engine.step.own_update import OwnUpdate, own_updates
from lanewise.engine.step.totals import StepTotals
from lanewise.engine.step.wire import LaneRow, Term
from lanewise.errors import TaskError
from lanewise.lanes import PROGRESS, LaneTurn, RunLength
from lanewise.processes.world.world import LocalWorld


class Base(Task):
    def build_model(self):
        model = nn.Linear(2, 2)
        model.register_buffer("queue", torch.zeros(3))
        return model

    def train_dataset(self):
        return []

    def forward(self, model, batch):
        return model(batch)

    def loss(self, outputs, batch):
        return outputs.mean()


def update(task, model, number=4):
    turn = LaneTurn(1, number, 0, range(1), range(1), is_last=True)
    totals = StepTotals([LaneRow(0, (Term(6.0, 2.0),))])
    totals.joined = Joined(3, {"keys": torch.ones(2)}, {})
    runner = LaneRunner(task, Precision("float32", "cpu"), 0)
    gradient = Gradient(turn, totals, None, None, allows_update=True, is_logged=False)
    token = PROGRESS.set((number, 1, RunLength(8)))
    try:
        OwnUpdate(runner, model, LocalWorld(torch.device("cpu")), "after_update")(gradient)
    finally:
        PROGRESS.reset(token)


def test_it_gets_the_step_without_gradients_under_a_seed_of_the_step():
    seen = []

    class Notes(Base):
        def after_update(self, model, step):
            seen.append((step, torch.is_grad_enabled(), torch.rand(()).item()))

    model = Base().build_model()
    for number in (4, 4, 5):
        update(Notes(), model, number)
    step, has_gradients, drawn = seen[0]
    assert (step.loss, step.weight, step.num_samples, has_gradients) == (3.0, 2.0, 3, False)
    assert (*step.progress[:2], step.progress.num_steps, step.progress.fraction) == (4, 1, 8, 0.5)
    assert seen[1][2] == drawn != seen[2][2]


def replace_parameter(model):
    model.weight = nn.Parameter(torch.ones(2, 2))


def reshape_parameter(model):
    model.weight.data = torch.ones(3, 2)


def reshape_buffer(model):
    model.queue = torch.cat([model.queue, torch.ones(1)])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (replace_parameter, "parameter weight"),
        (reshape_parameter, "parameter weight"),
        (reshape_buffer, "buffer queue"),
        (lambda model: model.register_buffer("other", torch.ones(1)), "buffer other"),
    ],
)
def test_what_is_replaced_or_reshaped_is_an_error(change, name):
    class Changes(Base):
        def after_update(self, model, step):
            change(model)

    task = Changes()
    with pytest.raises(TaskError, match=f"after_update replaced {name}.* in step 5"):
        update(task, task.build_model())


def test_a_buffer_may_be_replaced_by_one_of_its_form():
    class Replaces(Base):
        def after_update(self, model, step):
            model.queue = model.queue + 1

    task, model = Replaces(), Base().build_model()
    update(task, model)
    assert model.queue.tolist() == [1.0] * 3


def test_a_task_without_it_is_not_asked():
    assert own_updates(Base()) == []


def test_an_average_follows_what_is_trained_and_takes_frozen_parameters_as_they_are():
    class Teaches(Base):
        def after_update(self, model, step):
            model.weight.mul_(2)
            model.bias.add_(1)

    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
    model.bias.requires_grad_(False)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(2):
        update(Teaches(), model)
        update_average(average, model)
    assert average.module.weight.item() == 3.0  # 2, and then halfway to 4
    assert average.module.bias.item() == 2.0
