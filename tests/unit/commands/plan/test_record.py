from typing import Any

import pytest
import torch
from torch import nn

from lanewise import Loss
from lanewise.commands.plan.memory import LaneMark
from lanewise.commands.plan.record import count_flops, record_memory
from lanewise.data import LaneBatch
from lanewise.engine.precision import Precision
from lanewise.engine.step.lanes import LaneRunner, TaskLane
from lanewise.errors import TaskError
from lanewise.lanes import LaneTurn


class Sums:
    """A task whose loss is the sum of the outputs."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return Loss(outputs.sum(), len(batch))

    def loss_method(self) -> str:
        return "loss"


def lane(task: Any) -> TaskLane:
    batch = LaneBatch(LaneTurn(0, 0, 0, range(4), range(1), is_last=True), (0, 1, 2, 3), torch.ones(4, 8), 4)
    return LaneRunner(task, Precision("float32", "cpu"), 0).lane(batch)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def test_the_memory_has_the_lane_in_its_order_and_no_gradients():
    model = network()
    memory = record_memory(model, lane(Sums()), [model[0], model[2]])
    assert [(one.mark, one.number) for one in memory.stretches] == [
        (LaneMark.FORWARD, 0),
        (LaneMark.BLOCK_FORWARD, 1),
        (LaneMark.BLOCK_END, 1),
        (LaneMark.BLOCK_FORWARD, 2),
        (LaneMark.BLOCK_END, 2),
        (LaneMark.BACKWARD, 0),
        (LaneMark.BLOCK_BACKWARD, 2),
        (LaneMark.GRADIENT, 3),
        (LaneMark.GRADIENT, 2),
        (LaneMark.BLOCK_BACKWARD, 1),
        (LaneMark.GRADIENT, 1),
        (LaneMark.GRADIENT, 0),
        (LaneMark.END, 0),
    ]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert memory.batch_bytes == 4 * 8 * 4
    assert memory.output_bytes == 4 * 2 * 4
    assert memory.saved_bytes == memory.batch_bytes + 4 * 16 * 4 + 4  # what tanh returned, and the loss
    assert memory.stretches[-1].live_bytes <= memory.batch_bytes + 4 + 4  # the loss and its gradient


def test_what_is_added_decides_where_most_is_alive():
    memory = record_memory(network(), lane(Sums()), [])
    assert memory.peak().lane_bytes == max(one.peak_bytes for one in memory.stretches)
    at_end = memory.peak(10**6 if one.mark is LaneMark.END else 0 for one in memory.stretches)
    assert at_end.added_bytes == 10**6


def test_flops_are_those_of_three_products_for_each_weight_but_that_of_the_inputs_gradient():
    assert count_flops(network(), lane(Sums())) == 2 * 4 * (2 * 8 * 16 + 3 * 16 * 2)


def test_a_loss_without_a_gradient_is_an_error():
    class Detached(Sums):
        def loss(self, outputs: Any, batch: Any) -> Any:
            return outputs.detach().sum()

    with pytest.raises(TaskError, match=r"the loss of Detached must be a scalar tensor with a gradient"):
        record_memory(network(), lane(Detached()), [])
