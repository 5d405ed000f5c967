"""Blocks keep their inputs, and run again as they ran, or say that they did not."""

import contextlib
import copy
import gc
import random
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from lanewise.engine.transforms import compare_runs
from lanewise.engine.transforms.checkpointed import Checkpointed, _are_equal, _norm
from lanewise.errors import TaskError
from lanewise.lanes import PROGRESS, RunLength
from lanewise.processes.device.live_storage import LiveStorage


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
        hidden = nn.functional.dropout(self.norm(hidden), 0.5) * draw().sum() + shift + self.norm.running_mean
        return {"hidden": hidden, "count": state["count"] + 1}


def blocks(number: int) -> list[Block]:
    torch.manual_seed(0)
    return [Block() for _ in range(number)]


def keep_inputs(*chain: nn.Module) -> None:
    """Let each of these run again for its backward."""
    for number, block in enumerate(chain):
        block.forward = Checkpointed(f"blocks.{number}", block, block.forward, offload=False)


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
    return [
        loss.detach(),
        *gradients,
        *[buffer for block in chain for buffer in block.buffers()],
        drawn,
        draw(),
    ]


@settings(max_examples=20, deadline=None)
@given(number=st.integers(1, 6), autocasts=st.booleans(), compares=st.booleans())
def test_a_chain_of_blocks_leaves_every_byte_of_the_chain_without_them(number, autocasts, compares):
    inputs, shift = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    plain, checkpointed = blocks(number), blocks(number)
    keep_inputs(*checkpointed)
    compare_runs(checkpointed, is_on=compares)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        expected = run(plain, inputs, shift)
        found = run(checkpointed, inputs, shift)
    assert all(torch.equal(tensor, other) for tensor, other in zip(expected, found, strict=True))
    assert [block.num_calls for block in checkpointed] == [2] * number


def test_a_block_that_is_called_twice_runs_again_for_each_call():
    inputs, shift = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    (plain,), (checkpointed,) = blocks(1), blocks(1)
    keep_inputs(checkpointed)
    expected, found = run([plain, plain], inputs, shift), run([checkpointed, checkpointed], inputs, shift)
    assert all(torch.equal(tensor, other) for tensor, other in zip(expected, found, strict=True))
    assert checkpointed.num_calls == 4


def test_between_forward_and_backward_there_are_the_inputs_alone():
    chain = nn.Sequential(*[nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(4)])
    inputs = torch.randn(100, 8)
    live_bytes = []
    for is_checkpointed in (False, True):
        blocks = list(copy.deepcopy(chain))
        if is_checkpointed:
            keep_inputs(*blocks)
        with LiveStorage() as live:
            outputs = nn.Sequential(*blocks)(inputs)
            live_bytes.append(live.live_bytes)
            del outputs
    of_outputs = inputs.nbytes
    # Without, each block keeps 8 times its input, of tanh; those that run again keep the outputs before them.
    assert live_bytes == [4 * (8 + 1) * of_outputs, 4 * of_outputs]


def test_a_forward_without_gradients_is_the_block_itself():
    (block,) = blocks(1)
    keep_inputs(block)
    with torch.no_grad():
        returned = block({"hidden": torch.zeros(3, 4), "count": 0}, shift=torch.zeros(4))
    assert returned["count"] == 1
    assert block.num_calls == 1


def test_a_graph_that_is_retained_runs_again_for_each_backward():
    (block,) = blocks(1)
    keep_inputs(block)
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
    keep_inputs(checkpointed)
    inputs = torch.randn(3, 4, requires_grad=True)
    found = []
    for block in (plain, checkpointed):
        (gradient,) = torch.autograd.grad(block(inputs).sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), block[0].weight))
    assert torch.equal(*found[0], *found[1])


@pytest.mark.parametrize("has_backward", [True, False])
def test_nothing_is_kept_after_the_graph_is_gone(has_backward):
    chain = blocks(3)
    keep_inputs(*chain)
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
    keep_inputs(*model)
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data.mul_(2)
    inputs, shift = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    plain = blocks(2)
    for parameter in nn.Sequential(*plain).parameters():
        parameter.data.mul_(2)
    expected, found = run(plain, inputs, shift), run(list(copied), inputs, shift)
    assert all(torch.equal(tensor, other) for tensor, other in zip(expected, found, strict=True))


def test_one_second_run_at_a_time_has_the_generators_of_the_process():
    """The backwards of replicas on several devices run in threads."""
    inside, overlaps = threading.Semaphore(1), []

    class Drawing(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if threading.current_thread() is not threading.main_thread():
                overlaps.append(not inside.acquire(blocking=False))
                threading.Event().wait(0.02)
                inside.release()
            return nn.functional.dropout(super().forward(inputs), 0.5)

    chain = [Drawing(4, 4) for _ in range(3)]
    keep_inputs(*chain)
    losses = [block(torch.randn(3, 4)).sum() for block in chain]
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == [False] * 3


def test_a_block_may_be_left_out():
    """As stochastic depth does it."""
    chain = [nn.Linear(4, 4) for _ in range(3)]
    keep_inputs(*chain)
    chain[2](chain[0](torch.randn(3, 4))).sum().backward()
    assert [block.weight.grad is None for block in chain] == [False, True, False]


def test_an_input_that_changes_in_place_is_an_error():
    block = nn.Linear(4, 4)
    keep_inputs(block)
    inputs = torch.randn(3, 4)
    outputs = block(inputs)
    inputs += 1
    with pytest.raises(TaskError, match=r"input of blocks.0, a Linear, was changed in place.*x = x \+ y"):
        outputs.sum().backward()


class Cached(nn.Linear):
    """Remembers what it saw."""

    seen = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(inputs.repeat(self.seen, 1))


@pytest.mark.parametrize(
    ("compares", "said"),
    [
        (True, r"returned something else when it ran again.*counter"),
        (False, r"could not run again.*different metadata.*cache"),
    ],
)
def test_a_block_that_does_not_repeat_itself_is_an_error(compares, said):
    block = Cached(4, 4)
    keep_inputs(block)
    compare_runs([block], is_on=compares)
    loss = block(torch.randn(3, 4)).sum()
    with pytest.raises(TaskError, match=f"blocks.0, a Cached, {said}"):
        loss.backward()


def test_one_that_saves_another_number_of_tensors_is_named_too():
    class Deeper(nn.Linear):
        depth = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.depth += 1
            for _ in range(self.depth % self.limit):
                inputs = super().forward(inputs)
            return inputs

    for limit in (2, 3):  # fewer, and more
        block = Deeper(4, 4)
        block.limit = limit
        keep_inputs(block)
        compare_runs([block], is_on=False)
        loss = block(torch.randn(3, 4)).sum()
        with pytest.raises(TaskError, match=r"blocks.0, a Deeper, could not run again.*tensors"):
            loss.backward()


# What a block may depend on besides its inputs, buffers and random numbers.


class Residual(nn.Module):
    """A block of the models below."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.inner(hidden)


class OfObjects(Residual):
    """Changes an attribute of what it was given, as layers over PyTorch Geometric's Data do."""

    def forward(self, data: Any) -> Any:
        data.x = super().forward(data.x)
        return data


class Copying(Residual):
    def forward(self, data: Any) -> Any:
        data = copy.copy(data)
        data.x = super().forward(data.x)
        return data


class Silent(Residual):
    """Changes its argument, and returns nothing."""

    def forward(self, state: dict) -> None:
        state["hidden"] = super().forward(state["hidden"])
        state["norms"].append(state["hidden"].norm())


class Counting(Residual):
    num_calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return super().forward(hidden) * self.num_calls


class Scaled(Residual):
    scale = 1.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * self.scale


class Conjugating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden * self.weight).conj()


class Busy(Residual):
    """Has state that is right only where a forward runs to its end."""

    busy = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.busy:
            raise RuntimeError("is busy")
        self.busy = True
        returned = super().forward(hidden)
        self.busy = False
        return returned


depths: list[int] = []


@contextlib.contextmanager
def one_deeper() -> Any:
    depths.append(len(depths))
    yield
    depths.pop()  # without finally


class Entering(Residual):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with one_deeper():
            return super().forward(hidden) * len(depths)


class Forces(Residual):
    """Takes a gradient inside of its forward."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        energy = super().forward(positions).square().sum()
        (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        return positions - 0.1 * forces + nn.functional.dropout(energy.expand(4), 0.5)


class ForcesOfFunc(Residual):
    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return positions - torch.func.grad(lambda moved: self.inner(moved).sum())(positions)


class ScaledBy(torch.autograd.Function):
    """Reads what it saved one by one, which torch's `checkpoint` forbids."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, scale)
        return inputs * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient * ctx.saved_tensors[1], gradient * ctx.saved_tensors[0]


class OfFunction(Residual):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return ScaledBy.apply(super().forward(hidden), hidden.tanh())


class Nested(Residual):
    """Has a part of its own that runs again."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(super().forward, hidden, use_reentrant=False)
        return nn.functional.dropout(inner, 0.5)


class Sparse(Residual):
    def forward(self, hidden: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.sparse.mm(adjacency, hidden))


class Jagged(nn.Module):
    """Computes on sequences of unequal lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.linear(sequences)) + sequences


class Rebuilding(Jagged):
    """Makes its nested tensor anew."""

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        anew = torch.nested.nested_tensor_from_jagged(sequences.values() * 2, sequences.offsets().clone())
        return super().forward(anew)


class Model(nn.Module):
    """Calls its blocks one after the other; `call` says how."""

    def __init__(self, kind: type[nn.Module], call: Any, number: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind() for _ in range(number))
        self.call = call

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.call(self, inputs)


def through(model: Model, inputs: Any) -> Any:
    for block in model.blocks:
        inputs = block(inputs)
    return inputs


def through_objects(model: Model, inputs: torch.Tensor) -> torch.Tensor:
    return through(model, SimpleNamespace(x=inputs * 2)).x


def through_silent(model: Model, inputs: torch.Tensor) -> torch.Tensor:
    state = {"hidden": inputs, "norms": []}
    for block in model.blocks:
        block(state)
    return state["hidden"] * sum(state["norms"])


def through_a_scale(model: Model, inputs: torch.Tensor) -> torch.Tensor:
    for number, block in enumerate(model.blocks):
        Scaled.scale = 1.0 + number
        inputs = block(inputs)
    return inputs


def through_conjugates(model: Model, inputs: torch.Tensor) -> torch.Tensor:
    hidden = torch.complex(inputs, inputs + 1)
    for block in model.blocks:
        hidden = block(hidden.conj())
    return torch.view_as_real(hidden.resolve_conj())


def through_sparse(layout: torch.layout) -> Any:
    def call(model: Model, inputs: torch.Tensor) -> torch.Tensor:
        adjacency = torch.tensor([[0.0, 1, 0], [2, 0, 0], [0, 0, 3]]).to_sparse(layout=layout)
        for block in model.blocks:
            inputs = block(inputs, adjacency)
        return inputs

    return call


def through_jagged(model: Model, inputs: torch.Tensor) -> torch.Tensor:
    sequences = torch.nested.nested_tensor_from_jagged(inputs, torch.tensor([0, 1, 3]))
    return through(model, sequences).values()


def through_one(model: Model, inputs: torch.Tensor) -> torch.Tensor:
    return checkpoint(through, model, inputs, use_reentrant=False)


def results(model: nn.Module) -> list[torch.Tensor]:
    """Return losses and gradients of two lanes."""
    found = []
    for lane in range(2):
        torch.manual_seed(lane)
        inputs = torch.randn(3, 4, requires_grad=True)
        loss = model(inputs).square().sum()
        model.zero_grad()
        loss.backward()
        found += [loss.detach(), inputs.grad, *[parameter.grad.clone() for parameter in model.parameters()]]
    return found


def checkpointed_results(kind: type[nn.Module], call: Any) -> list[torch.Tensor]:
    model = Model(kind, call)
    keep_inputs(*model.blocks)
    return results(model)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (Copying, through_objects),
        (Silent, through_silent),
        (Conjugating, through_conjugates),
        (Busy, through),
        (Entering, through),
        (Forces, through),
        (Nested, through),
        (Nested, through_one),
        (Sparse, through_sparse(torch.sparse_coo)),
        (Sparse, through_sparse(torch.sparse_csr)),
        (Jagged, through_jagged),
    ],
)
def test_what_is_unusual_and_repeats_itself_leaves_the_same_bytes(kind, call):
    expected = results(Model(kind, call))
    assert all(map(torch.equal, checkpointed_results(kind, call), expected))
    assert not depths


@pytest.mark.parametrize(
    ("kind", "call", "said"),
    [
        (OfObjects, through_objects, r"was given something else when it ran again.*copy"),
        (Counting, through, r"returned something else when it ran again.*counter"),
        (Scaled, through_a_scale, r"returned something else when it ran again.*what the model sets"),
        (ForcesOfFunc, through, r"takes a gradient by torch.func.*torch.autograd.grad"),
        (OfFunction, through, r"could not run again.*ctx.saved_tensors in backward"),
        (Rebuilding, through_jagged, r"could not run again.*different metadata"),
    ],
)
def test_what_does_not_repeat_itself_is_an_error_with_its_name(kind, call, said):
    with pytest.raises(TaskError, match=rf"blocks\.\d, a {kind.__name__}, {said}.*activation_checkpointing"):
        checkpointed_results(kind, call)


def collecting(model: Model, *, clears_first: bool) -> nn.Module:
    """Let the loss depend on features that hooks within the blocks keep in a list."""
    features: list[torch.Tensor] = []
    for block in model.blocks:
        block.inner.register_forward_hook(lambda _module, _inputs, output: features.append(output))

    def call(model: Model, inputs: torch.Tensor) -> torch.Tensor:
        if clears_first:
            features.clear()
        total = through(model, inputs).sum() + sum(feature.square().sum() for feature in features)
        if not clears_first:
            features.clear()
        return total

    model.call = call
    return model


def test_hooks_that_keep_features_for_one_forward_leave_the_same_bytes():
    expected = results(collecting(Model(Residual, None), clears_first=True))
    model = collecting(Model(Residual, None), clears_first=True)
    keep_inputs(*model.blocks)
    assert all(map(torch.equal, results(model), expected))


def test_features_of_a_second_run_in_a_later_loss_are_an_error():
    """Where the list is emptied after the loss, the second run fills it again."""
    model = collecting(Model(Residual, None), clears_first=False)
    keep_inputs(*model.blocks)
    with pytest.raises(
        TaskError, match=r"what blocks.\d, a Residual, computed when it ran again.*Empty such a list before"
    ):
        results(model)


def test_weights_that_are_put_in_from_outside_are_an_error():
    model = Model(Residual, through)
    keep_inputs(*model.blocks)
    weights = {name: (weight * 2).detach().requires_grad_() for name, weight in model.named_parameters()}
    outputs = torch.func.functional_call(model, weights, (torch.randn(3, 4),))
    with pytest.raises(TaskError, match=r"blocks.2, a Residual, has another weight.*functional_call"):
        outputs.sum().backward()


class Calling(Residual):
    """Lets a part of it run with other weights."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights = {name: weight * 2 for name, weight in self.inner.named_parameters()}
        return hidden + torch.func.functional_call(self.inner, weights, (hidden,))


def test_weights_that_a_block_itself_puts_in_are_those_of_both_runs():
    expected = results(Model(Calling, through))
    assert all(map(torch.equal, checkpointed_results(Calling, through), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64])
def test_where_a_device_adds_in_any_order_norms_are_compared(dtype):
    torch.manual_seed(0)
    values = (torch.randn(100) * 100).to(dtype)
    norm = _norm(values)
    assert norm == pytest.approx(float(values.abs().double().square().sum().sqrt()), rel=1e-5)
    assert _are_equal([norm], [_norm(values * 1.001)])
    assert not _are_equal([norm], [_norm(values * 2)])
    assert _are_equal([_norm(values * torch.nan)], [_norm(values * torch.nan)])


def test_a_block_that_runs_again_in_another_thread_sees_where_the_run_is():
    """Autograd has a thread for each accelerator, with context variables of its own."""
    seen = []

    class Annealed(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            seen.append(PROGRESS.get())
            return super().forward(hidden)

    block = Annealed(2, 2)
    keep_inputs(block)
    here = (3, 1, RunLength(9))
    token = PROGRESS.set(here)
    try:
        loss = block(torch.ones(1, 2)).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    finally:
        PROGRESS.reset(token)
    assert seen == [here, here]
