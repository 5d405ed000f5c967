"""State that processes keep differently is named; what they train apart is not compared."""

import pytest
import torch
from torch import nn

from lanewise.engine.step.guard.equal_state import require_equal_state
from lanewise.errors import TaskError
from lanewise.processes.world.world import LocalWorld


class Other(LocalWorld):
    """A second process, which has another model."""

    world_size = 2
    told = None

    def all_gather_tree(self, value):
        Other.told, before = value, Other.told
        return [before or value, value]


def model(**changes):
    made = nn.Linear(2, 2)
    made.weight.data.fill_(1.0)
    made.bias.requires_grad_(False)
    made.bias.data.copy_(torch.tensor([1.0, 2.0]))
    made.register_buffer("queue", torch.arange(6.0, dtype=torch.float64).view(3, 2))
    made.register_buffer("holes", torch.tensor([float("nan"), 1.0]))
    for name, value in changes.items():
        getattr(made, name).data.copy_(torch.as_tensor(value))
    return made


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"queue": [[2.0, 3.0], [0.0, 1.0], [4.0, 5.0]]}, "buffer queue differs between ranks 0 and 1"),
        ({"queue": [[-0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]}, "buffer queue differs"),
        ({"bias": [2.0, 1.0]}, "parameter bias differs .* after step 3"),
    ],
)
def test_what_differs_is_named_also_where_only_the_order_does(changes, expected):
    Other.told = None
    world = Other(torch.device("cpu"))
    require_equal_state(model(), world, 2)
    with pytest.raises(TaskError, match=expected):
        require_equal_state(model(**changes), world, 2)


def test_equal_state_and_trained_parameters_are_no_difference():
    Other.told = None
    world = Other(torch.device("cpu"))
    require_equal_state(model(), world, 2)
    require_equal_state(model(weight=torch.zeros(2, 2)), world, 2)
