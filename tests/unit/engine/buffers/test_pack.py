"""One buffer: an evaluation puts it back, whatever a forward did with it."""

import numpy as np
import pytest
import torch
from torch import nn

from lanewise.engine.buffers.pack import CHANGED, BufferPack, evaluating, pack_buffers
from lanewise.errors import TaskError


class Changing(nn.Module):
    """Has a buffer that a forward replaces by one of another shape, one that begins as None, and no other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("late", None)


def test_an_evaluation_puts_every_buffer_back():
    norm, changing = nn.BatchNorm1d(2), Changing()
    kept = changing.replaced
    with evaluating([nn.Sequential(norm, changing)]):
        norm(torch.randn(4, 2))
        changing.replaced = changing.late = torch.ones(3)
    assert norm.running_mean.tolist() == [0.0, 0.0]
    assert norm.num_batches_tracked.item() == 0
    assert changing.replaced is kept
    assert kept.tolist() == [0.0]
    assert changing.late is None


def test_a_parameter_that_an_evaluation_changes_is_an_error():
    """An embedding with max_norm scales its rows in a forward, those of the samples that a process has."""
    embedding = nn.Embedding(3, 2, max_norm=0.1)
    with (
        pytest.raises(TaskError, match="an evaluation changed parameter weight"),
        evaluating([embedding]),
    ):
        embedding(torch.tensor([0, 1]))


def test_a_forward_may_make_hooks_which_an_evaluation_may_be_the_first_to_run():
    """Models of transformers that return hidden states do, and could be trained, but not evaluated."""
    layer = nn.Linear(2, 2)
    with evaluating([layer]):
        layer.register_forward_hook(lambda *_: None)


def test_of_several_models_each_is_looked_at():
    """The second one's weights, of the same names, were taken for those of the first."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(TaskError, match="changed parameter weight"), evaluating([first, second]):
        first.weight.data.mul_(2)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda layer: layer.weight.data.mul_(2), "parameter weight"),
        (
            lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach().clone())),
            "parameter weight",
        ),
        (lambda layer: layer.weight.requires_grad_(False), "parameter weight"),
        (lambda layer: layer.register_forward_hook(lambda *_: None), "the hooks of the model"),
    ],
)
def test_a_change_that_moves_no_version_a_replaced_parameter_or_a_hook_is_an_error(change, name):
    layer = nn.Linear(2, 2)
    with pytest.raises(TaskError, match=f"other code changed {name}"), evaluating([layer], "other code"):
        change(layer)


def test_a_hook_that_is_removed_leaves_no_trace():
    layer = nn.Linear(2, 2)
    with evaluating([layer]):
        layer.register_forward_hook(lambda *_: None).remove()


def pack_of_a_step_without_change(buffer: torch.Tensor) -> tuple[nn.Module, BufferPack]:
    model = nn.Module()
    model.register_buffer("queue", buffer)
    (pack,) = pack_buffers([model])
    assert pack.snapshot().change == 0.0
    pack.end_step(is_changed=False)
    pack.note_start()
    return model, pack


def address(tensor: torch.Tensor) -> int:
    return torch._C._data_address(tensor)


def test_a_large_buffer_that_lanes_only_read_is_neither_copied_nor_compared():
    model, pack = pack_of_a_step_without_change(torch.randn(300, 100))
    inputs = torch.ones(2, 100, requires_grad=True)
    (inputs @ model.queue.T + model.queue[[3, 5]].sum()).sum().backward()
    torch.cdist(inputs, model.queue).argmin(dim=1)
    assert pack.snapshot().values is None
    pack.reset()
    assert address(model.queue) == address(pack.start)


def test_who_writes_it_between_steps_copies_nothing():
    model, pack = pack_of_a_step_without_change(torch.randn(300, 100))
    where = address(model.queue)
    pack.end_step(is_changed=False)
    model.queue.zero_()
    assert address(model.queue) == where
    pack.note_start()
    assert not pack.start.any()


def kernel(model: nn.Module) -> None:
    nn.functional.batch_norm(torch.ones(2, 30_000), model.queue, torch.ones(30_000), training=True)


WRITES = {
    "in place": lambda model: model.queue.add_(1),
    "through data": lambda model: model.queue.data.add_(1),
    "through a view": lambda model: model.queue.detach()[:5].zero_(),
    "through NumPy": lambda model: model.queue.numpy().fill(2),
    "by DLPack": lambda model: torch.from_dlpack(model.queue).add_(1),
    "by a kernel that counts no version": kernel,
    "with other memory": lambda model: setattr(model.queue, "data", torch.ones(30_000)),
    "as another tensor": lambda model: setattr(model, "queue", model.queue + 1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_no_way_to_write_it_is_missed(write):
    """Not even those that torch's version of a tensor does not count."""
    model, pack = pack_of_a_step_without_change(torch.randn(30_000))
    start = model.queue.clone()
    write(model)
    snapshot = pack.snapshot()
    assert snapshot.change == CHANGED
    assert torch.equal(snapshot.values, model.queue)
    pack.reset()
    assert torch.equal(model.queue, start)
    pack.end_step(is_changed=True)
    pack.note_start()
    model.queue.data.add_(1)
    assert pack.snapshot().change == CHANGED


def test_a_view_that_was_made_before_still_writes_the_buffer():
    queue = torch.randn(300, 100)
    first, through_data = queue[:1], queue.data
    model, pack = pack_of_a_step_without_change(queue)
    first.zero_()
    through_data[1].zero_()
    assert not model.queue[:2].any()
    assert pack.snapshot().change == CHANGED


def test_memory_that_cannot_be_shared_is_compared():
    model, pack = pack_of_a_step_without_change(torch.from_numpy(np.zeros(30_000)))
    model.queue[3] = 1.0
    assert pack.snapshot().change == CHANGED
    pack.reset()
    assert not model.queue.any()
