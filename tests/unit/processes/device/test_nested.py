"""Tensors are found in any containers, and what is made of these has the same types."""

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from lanewise.processes.device.nested import copied, map_leaves, plain, structure, tensors_in


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Frozen:
    scores: torch.Tensor
    name: str = "frozen"
    inner: Any = None


@dataclass(slots=True)
class Slots:
    scores: torch.Tensor
    made: torch.Tensor = field(init=False, default_factory=lambda: torch.zeros(1))


class Movable:
    """Something of the user's that can be moved, as a whole."""

    def to(self, _device: Any) -> "Movable":
        return self


def containers(number: float) -> dict[str, Any]:
    one = torch.tensor([number])
    return {
        "dict": {"a": one, 3: [one, (one, "text")]},
        "named": Pair(one, {"x": one}),
        "frozen": Frozen(one, inner=[Pair(one, 1.5)]),
        "slots": Slots(one),
        "ordered": OrderedDict(b=one, a=one),
        "default": defaultdict(list, a=one),
        "user": UserDict(a=one),
        "none": None,
    }


def types_in(data: Any) -> Any:
    if isinstance(data, dict | UserDict):
        return type(data), [(key, types_in(value)) for key, value in data.items()]
    if isinstance(data, list | tuple):
        return type(data), list(map(types_in, data))
    return type(data)


@pytest.mark.parametrize("name", containers(0))
def test_containers_keep_their_types(name):
    given = containers(1)[name]
    made = map_leaves(lambda leaf: leaf + 1, given)
    assert types_in(made) == types_in(given)
    assert structure(made) == structure(given)
    assert [one.item() for one in tensors_in(made)] == [one.item() + 1 for one in tensors_in(given)]


def test_a_dataclass_is_copied_and_not_changed():
    given = Frozen(torch.ones(1), inner=Slots(torch.ones(1)))
    made = copied(given)
    made.inner.scores += 1
    assert given.inner.scores.item() == 1
    assert made.name == "frozen"


def test_what_can_be_moved_is_a_leaf_of_its_own():
    leaves: list[Any] = []
    movable = Movable()
    map_leaves(leaves.append, [movable, {"a": torch.ones(1)}])
    assert leaves[0] is movable
    assert len(leaves) == 2


def test_plain_containers_hold_the_same_tensors_in_the_same_order():
    for given in containers(1).values():
        made = plain(given)
        assert all(a is b for a, b in zip(tensors_in(made), tensors_in(given), strict=True))
        assert structure(made) == structure(plain(made))
    assert types_in(plain(containers(1)["frozen"])) == types_in(
        {"scores": torch.ones(1), "name": "", "inner": [(torch.ones(1), 1.5)]}
    )


def test_the_structure_tells_containers_apart_but_not_tensors():
    every = containers(1)
    assert len({structure(one) for one in every.values()}) == len(every)
    assert structure(every) == structure(containers(2))
    one = torch.ones(1)
    for other in ([one], [one, one], [one, 2], [one, "1"], (one, 1), [1, one], {0: one, 1: 1}):
        assert structure(other) != structure([one, 1])
    assert structure({"a": one, "b": one}) != structure({"b": one, "a": one})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4)[:, :-1],
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(3.0)[:, None].expand(3, 4),
        torch.arange(24.0).reshape(2, 3, 4)[:, 1:, 0],
    ],
)
def test_a_copy_has_the_strides_of_what_it_is_of(tensor):
    """A layer rounded otherwise on a copy, and a lane that ran again was taken for one that keeps state."""
    (made,) = copied([tensor])
    assert torch.equal(made, tensor)
    assert made.stride() == tensor.stride()
    assert made.data_ptr() != tensor.data_ptr()


def test_windows_that_overlap_are_copied():
    windows = torch.arange(5.0).unfold(0, 3, 1)
    assert torch.equal(copied(windows), windows)
