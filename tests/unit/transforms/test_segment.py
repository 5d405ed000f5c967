"""Segments keep their inputs, and run again as they ran."""

import copy
import gc
import random
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lanewise.errors import TaskError
from lanewise.transforms.segment import Segment
from lanewise.world.live_storage import LiveStorage


def draw() -> torch.Tensor:
    """Return a number from each generator."""
    return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])  # noqa: NPY002


class Block(nn.Module):
    """Takes and returns containers, draws from every generator, and reads and writes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("total", torch.zeros(4))
        self.num_calls = 0

    def forward(self, state: dict, *, shift: torch.Tensor) -> dict:
        self.num_calls += 1
        hidden = torch.tanh(self.linear(state["hidden"])) + self.total
        self.total = self.total + hidden.detach().mean(0)
        hidden = nn.functional.dropout(self.norm(hidden), 0.5) * draw().sum() + shift
        return {"hidden": hidden, "count": state["count"] + 1}


def blocks(number: int) -> list[Block]:
    torch.manual_seed(0)
    return [Block() for _ in range(number)]


def segment(chain: list[nn.Module]) -> Segment:
    return Segment({str(number): block for number, block in enumerate(chain)}, offload=False)


def run(chain: list[nn.Module], inputs: torch.Tensor, shift: torch.Tensor) -> list[torch.Tensor]:
    """Return loss, gradients, buffers and what is drawn next, after a forward and backward."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1)
    state = {"hidden": inputs, "count": 0}
    for block in chain:
        state = block(state, shift=shift)
    loss = state["hidden"].square().sum()
    leaves = [parameter for block in chain for parameter in block.parameters()] + [inputs, shift]
    drawn = draw()
    gradients = torch.autograd.grad(loss, leaves)
    return [loss.detach(), *gradients, *[one for block in chain for one in block.buffers()], drawn, draw()]


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), autocasts=st.booleans())
def test_a_chain_of_segments_leaves_every_byte_of_the_chain_without_them(sizes, autocasts):
    inputs, shift = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    plain, checkpointed = blocks(sum(sizes)), blocks(sum(sizes))
    start = 0
    for size in sizes:
        segment(checkpointed[start : start + size])
        start += size
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        expected = run(plain, inputs, shift)
        found = run(checkpointed, inputs, shift)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert [block.num_calls for block in checkpointed] == [2] * sum(sizes)


def test_between_forward_and_backward_there_are_the_inputs_alone():
    chain = nn.Sequential(*[nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(4)])
    inputs = torch.randn(100, 8)
    live_bytes = []
    for every in (None, 1, 4):
        blocks = list(copy.deepcopy(chain))
        for first in range(0, 4, every or 5):
            if every is not None:
                segment(blocks[first : first + every])
        with LiveStorage() as live:
            outputs = nn.Sequential(*blocks)(inputs)
            live_bytes.append(live.live_bytes)
            del outputs
    of_outputs = inputs.nbytes
    # Without, each block keeps 8 times its input, of tanh; segments of one keep the outputs before them.
    assert live_bytes == [4 * (8 + 1) * of_outputs, 4 * of_outputs, of_outputs]


def test_a_forward_without_gradients_is_the_block_itself():
    (block,) = blocks(1)
    segment([block])
    with torch.no_grad():
        returned = block({"hidden": torch.zeros(3, 4), "count": 0}, shift=torch.zeros(4))
    assert returned["count"] == 1
    assert block.num_calls == 1


def test_a_graph_that_is_retained_runs_again_for_each_backward():
    (block,) = blocks(1)
    segment([block])
    inputs = torch.randn(3, 4, requires_grad=True)
    loss = block({"hidden": inputs, "count": 0}, shift=torch.zeros(4))["hidden"].square().sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    assert torch.equal(*first, *torch.autograd.grad(loss, inputs))
    assert block.num_calls == 3


def test_a_gradient_of_a_gradient():
    """A gradient penalty."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    checkpointed = copy.deepcopy(plain)
    segment([checkpointed])
    inputs = torch.randn(3, 4, requires_grad=True)
    found = []
    for block in (plain, checkpointed):
        (gradient,) = torch.autograd.grad(block(inputs).sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), block[0].weight))
    assert torch.equal(*found[0], *found[1])


@pytest.mark.parametrize("has_backward", [True, False])
def test_nothing_is_kept_after_the_graph_is_gone(has_backward):
    chain = blocks(3)
    segment(chain)
    inputs = torch.randn(3, 4)
    kept = weakref.ref(inputs)
    state = {"hidden": inputs, "count": 0}
    for block in chain:
        state = block(state, shift=torch.zeros(4))
    if has_backward:
        state["hidden"].sum().backward()
    del inputs, state
    gc.collect()
    assert kept() is None


def test_a_copy_of_the_model_runs_its_own_weights_again():
    model = nn.Sequential(*blocks(2))
    segment(list(model))
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data.mul_(2)
    inputs, shift = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    plain = blocks(2)
    for parameter in nn.Sequential(*plain).parameters():
        parameter.data.mul_(2)
    expected, found = run(plain, inputs, shift), run(list(copied), inputs, shift)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize("between", [lambda x: x * 2, lambda x: x.detach(), lambda x: x.add_(1)])
def test_blocks_that_are_not_chained_are_an_error(between):
    chain = [nn.Linear(4, 4), nn.Linear(4, 4)]
    segment(chain)
    with pytest.raises(TaskError, match=r"1 does not take what the block before it returned.*every=1"):
        chain[1](between(chain[0](torch.randn(3, 4))))


def test_a_block_may_be_left_out():
    """As stochastic depth does it."""
    chain = [nn.Linear(4, 4) for _ in range(3)]
    segment(chain)
    chain[2](chain[0](torch.randn(3, 4))).sum().backward()
    assert [block.weight.grad is None for block in chain] == [False, True, False]


def test_an_input_that_changes_in_place_is_an_error():
    block = nn.Linear(4, 4)
    segment([block])
    inputs = torch.randn(3, 4)
    outputs = block(inputs)
    inputs += 1
    with pytest.raises(TaskError, match=r"shape \(3, 4\), was changed in place"):
        outputs.sum().backward()


class Cached(nn.Linear):
    """Remembers what it saw."""

    seen = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(inputs.repeat(self.seen, 1))


def test_a_block_that_does_not_repeat_itself_is_an_error():
    block = Cached(4, 4)
    segment([block])
    with pytest.raises(TaskError, match=r"Cached computed something else when it ran again.*cache"):
        block(torch.randn(3, 4)).sum().backward()
