"""What a lane may give for the whole step."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from lanewise.engine.step.parts import lane_parts
from lanewise.errors import TaskError


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Holder:
    ids: torch.Tensor


def test_containers_become_plain_and_gradients_are_left_out():
    keys = torch.ones(2, 3, requires_grad=True)
    parts = lane_parts({"a": Pair(keys, [keys]), "b": Holder(torch.arange(2))}, {"c": {1: keys}}, "the loss")
    assert isinstance(parts.gather["a"], tuple)
    assert parts.gather["b"]["ids"].tolist() == [0, 1]
    assert not parts.gather["a"][1][0].requires_grad
    assert not parts.total["c"][1].requires_grad


def test_the_form_has_all_but_the_number_of_rows():
    forms = {lane_parts({"keys": torch.ones(rows, 3)}, {"n": torch.ones(2)}, "").form for rows in (0, 5)}
    assert forms == {"gather keys: [rows, 3] float32; total n: [2] float32"}
    others = (
        lane_parts({"keys": torch.ones(5, 4)}, {"n": torch.ones(2)}, ""),
        lane_parts({"keys": torch.ones(5, 3).double()}, {"n": torch.ones(2)}, ""),
        lane_parts({"keys": [torch.ones(5, 3)]}, {"n": torch.ones(2)}, ""),
        lane_parts({"keys": torch.ones(5, 3)}, {"n": torch.ones(3)}, ""),
        lane_parts({"keys": torch.ones(5, 3)}, None, ""),
    )
    assert len({other.form for other in others} - forms) == len(others)


@pytest.mark.parametrize(
    ("gather", "total", "expected"),
    [
        (torch.ones(2), None, "has gather=tensor.* need a mapping of names to tensors"),
        ({0: torch.ones(2)}, None, "need a mapping of names"),
        ({"keys": torch.ones(())}, None, "under 'keys' a scalar, which has no rows"),
        ({"keys": [3]}, None, "under 'keys' 3, and not a dense tensor"),
        (None, {"n": 3.0}, r"has in total under 'n' 3\.0, and not a dense tensor"),
        (None, {"n": torch.ones(2).to_sparse()}, "not a dense tensor"),
        (None, {"n": torch.ones(2, dtype=torch.complex64)}, "view_as_real"),
    ],
)
def test_wrong_parts_are_an_error(gather, total, expected):
    with pytest.raises(TaskError, match=expected):
        lane_parts(gather, total, "the loss")
