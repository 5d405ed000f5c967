"""Digests tell every change of a bit, and nothing else: neither strides, nor who has which part."""

import math
import re

import pytest
import torch
from torch import nn

from lanewise.errors import CheckpointError, WorldError
from lanewise.processes.world.digests import gather_digests, require_digests
from lanewise.processes.world.shards import HeldTensor
from lanewise.processes.world.world import LocalWorld
from lanewise.testing import run_distributed

LOCAL = LocalWorld(torch.device("cpu"))


def digest_of(tensor: torch.Tensor) -> str:
    (digest,) = gather_digests({"one": tensor}, LOCAL, 1).values()
    assert re.fullmatch("[0-9a-f]{16}", digest)
    return digest


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Forty elements, none of which is zero or another one's negative; of bool both values."""
    return (torch.arange(1, 41) % 3 == 0) if dtype is torch.bool else torch.arange(1, 41).to(dtype)


DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.complex64, torch.complex128),
]


def negate(tensor: torch.Tensor, *places: int) -> torch.Tensor:
    """Flip the highest bit of each element at some places, or of all of them: of a float its sign."""
    changed = tensor.clone()
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    bits = changed.view(width)
    for place in places or range(len(bits)):
        bits[place] ^= 128 if width is torch.uint8 else torch.iinfo(width).min
    return changed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("places", [(), (3,), (3, 4), (0, 1), (7, 39), (2, 3, 4, 5)], ids=str)
def test_flipped_signs_are_seen(dtype, places):
    """An odd factor of the element's own width would miss all of them but single ones."""
    tensor = numbers(dtype)
    assert digest_of(negate(tensor, *places)) != digest_of(tensor)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
def test_elements_that_changed_places_are_seen(dtype):
    tensor = numbers(dtype)
    order = list(range(40))
    order[2], order[9] = 9, 2  # of bool True and False
    assert digest_of(tensor[order]) != digest_of(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_zeros_have_signs(dtype):
    zeros = torch.zeros(6, dtype=dtype)
    assert len({digest_of(zeros), digest_of(-zeros), digest_of(negate(zeros, 5))}) == 3


def test_dtype_and_shape_count():
    empty = [torch.empty(0), torch.empty(0, 3), torch.empty(3, 0), torch.empty(0, dtype=torch.int64)]
    zeros = [torch.zeros(()), torch.zeros(1), torch.zeros(2), torch.zeros(1, 2), torch.zeros(2).bool()]
    zeros += [torch.zeros(2).half(), torch.zeros(2).bfloat16(), torch.zeros(2, dtype=torch.int32)]
    digests = [digest_of(tensor) for tensor in (*empty, *zeros)]
    assert len(set(digests)) == len(digests)


def test_a_scalar_has_one():
    values = [torch.tensor(value) for value in (0.0, -0.0, 1.0, math.nan, 7, True, False)]
    assert len({digest_of(value) for value in values}) == len(values)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(5, 7).t(),
        torch.randn(31, 2)[::2],
        torch.randn(3, 1).expand(3, 4),
        nn.Parameter(torch.randn(3, 2)),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.randn(4, dtype=torch.complex64).conj().imag,
    ],
)
def test_strides_do_not_count(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    assert digest_of(tensor) == digest_of(plain)


def test_every_tensor_of_a_nested_state_has_its_name():
    state = {"model": {"weight": torch.ones(2)}, "optimizer": {"state": [(torch.zeros(1), 3)], 7: None}}
    assert list(gather_digests(state, LOCAL, 1)) == ["model/weight", "optimizer/state/0/0"]


def held_apart(world, tensors):
    """Each process has one of the tensors, and all have a whole one."""
    state = {
        name: HeldTensor(tensor if owner == world.rank else tensor.to("meta"))
        for owner, (name, tensor) in enumerate(tensors.items())
    }
    return gather_digests({**state, "whole": torch.arange(5.0)}, world, 1)


def test_what_one_process_holds_has_the_digest_that_it_has_on_one_device():
    tensors = {"first": torch.randn(4, 3), "second": torch.randn(3).double(), "empty": torch.empty(0, 2)}
    alone = gather_digests({**tensors, "whole": torch.arange(5.0)}, LOCAL, 1)
    assert run_distributed(held_apart, 3, tensors) == [alone] * 3


def refused(world, values):
    """Each process has its own value; those without one lack the tensor."""
    state = {"count": torch.tensor(3)}
    if values[world.rank] is not None:
        state["weight"] = torch.full((3,), values[world.rank])
    with pytest.raises(WorldError) as raised:
        gather_digests({"model": state}, world, 7)
    return str(raised.value)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ((1.0, 1.0, 2.0), [2]),
        ((2.0, 1.0, 1.0), [0]),
        ((0.0, 0.0, -0.0), [2]),
        ((1.0, None, 1.0), [1]),
        ((None, 1.0, None), [1]),
        ((1.0, 2.0), [0, 1]),  # which of two is wrong nobody knows
        ((1.0, 2.0, 3.0), [0, 1, 2]),
    ],
)
def test_a_difference_names_step_tensor_and_ranks(values, named):
    messages = set(run_distributed(refused, len(values), values))
    (message,) = messages  # all processes end alike
    assert message.startswith("model/weight differs between processes after step 7, ")
    assert [int(rank) for rank in re.findall(r"rank (\d) \([^)]+, cpu\) has", message)] == named
    assert ("so any of them may be wrong" in message) == (len(named) == len(values))


@pytest.mark.parametrize("change", [{"weight": torch.tensor([1.0, -2.0])}, {}], ids=["changed", "missing"])
def test_a_state_that_is_not_what_it_was_is_refused_by_name(change):
    digests = gather_digests({"model": {"bias": torch.ones(1), "weight": torch.tensor([1.0, 2.0])}}, LOCAL, 1)
    require_digests({"model": {"bias": torch.ones(1), "weight": torch.tensor([1.0, 2.0])}}, digests, "it")
    with pytest.raises(CheckpointError, match="it is damaged: model/weight has the digest"):
        require_digests({"model": {"bias": torch.ones(1), **change}}, digests, "it")
