"""Buffers that a state dict leaves out are saved where they are no longer those of the new module."""

import pytest
import torch
from torch import nn

from lanewise.engine.state.run_state import LEFT_OUT, RunState
from lanewise.errors import CheckpointError


class Router(nn.Module):
    """Has a buffer of each kind, of which only `table` stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2, 2)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("table", torch.arange(5), persistent=False)
        self.register_buffer("counts", torch.zeros(2), persistent=False)
        self.register_buffer("cache", torch.zeros(1, 3), persistent=False)
        self.register_buffer("late", None, persistent=False)
        self.register_buffer("gone", torch.ones(2), persistent=False)

    def use(self) -> None:
        self.kept += 1
        self.counts += 2
        self.cache = torch.full((4, 3), 7.0)
        self.late = torch.tensor([True])
        self.gone = None


def values_of(module: nn.Module) -> dict[str, list[float] | None]:
    return {name: None if buffer is None else buffer.tolist() for name, buffer in module._buffers.items()}


def test_those_that_changed_are_saved_and_restored():
    model, other = Router(), Router()
    state = RunState({"model": model, "other": other})
    assert LEFT_OUT not in state.take()
    model.use()
    taken = state.take()
    assert sorted(taken[LEFT_OUT]["model"]) == ["cache", "counts", "gone", "late"]
    assert taken[LEFT_OUT].keys() == {"model"}
    assert "counts" not in taken["model"]
    new = Router()
    own = new.counts
    state = RunState({"model": new, "other": Router()})
    assert state.compare(taken) == []
    state.restore(taken)
    assert values_of(new) == values_of(model)
    assert new.counts is own
    assert state.take()[LEFT_OUT]["model"].keys() == taken[LEFT_OUT]["model"].keys()


def test_a_module_that_is_no_longer_new_brings_its_digests():
    model = Router()
    digests = RunState({"model": model})._digests["model"]
    model.use()
    assert LEFT_OUT not in RunState({"model": model}).take()
    assert "counts" in RunState({"model": model}, digests={model: digests}).take()[LEFT_OUT]["model"]


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ({"model": {"weight": torch.ones(1)}}, "model weight is in it, and is no buffer"),
        ({"model": {"gate.weight": torch.ones(2, 2)}}, "model gate.weight is in it, and is no buffer"),
        ({"model": {"counts": 5}}, "model counts is a <class 'int'> in it"),
        ({"model": 5}, "the buffers that the state of model leaves out are a <class 'int'> in it"),
        ({"teacher": {}}, "it has lanewise_buffers of other modules than this run"),
        ([], "it has lanewise_buffers of other modules than this run"),
    ],
)
def test_what_no_save_writes_is_refused(left_out, said):
    state = RunState({"model": Router()})
    (mistake,) = state.compare({**state.take(), LEFT_OUT: left_out})
    assert mistake.startswith(said)


def test_a_changed_buffer_that_cannot_be_saved_is_one_error():
    model = nn.Linear(1, 1)
    model.register_buffer("links", torch.zeros(2, 2).to_sparse(), persistent=False)
    state = RunState({"model": model})
    state.require_savable()
    model.links = torch.ones(2, 2).to_sparse()
    with pytest.raises(CheckpointError, match=r"links cannot be saved: it is a torch.sparse_coo tensor"):
        state.require_savable()
