"""A model's weights in a file: plain names, tied tensors once, whole or not at all."""

import errno
import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from lanewise.errors import CheckpointError, StorageError
from lanewise.runs.checkpoint.model_file import load_model, save_model


class Tied(nn.Module):
    """Three names for one matrix, and two for one bias."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(3, 5)
        self.first.weight = self.second.weight = self.embedding.weight
        self.second.bias = self.first.bias


def read(path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a file and its aliases."""
    with safe_open(path, "pt") as file:
        aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
    return load_file(path), aliases


def load(model: nn.Module, path) -> nn.Module:
    tensors, aliases = read(path)
    model.load_state_dict(tensors | {name: tensors[first] for name, first in aliases.items()})
    return model


def assert_same_state(model: nn.Module, other: nn.Module) -> None:
    expected, found = model.state_dict(), other.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_the_names_are_the_modules_own(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    save_model(model, tmp_path / "model.safetensors")
    tensors, aliases = read(tmp_path / "model.safetensors")
    assert tensors.keys() == model.state_dict().keys()
    assert "1.running_mean" in tensors
    assert aliases == {}
    assert_same_state(
        model, load(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), tmp_path / "model.safetensors")
    )


def test_a_buffer_that_is_not_persistent_is_left_out(tmp_path):
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    save_model(model, tmp_path / "m")
    assert read(tmp_path / "m")[0].keys() == {"weight", "bias"}


def test_a_tied_tensor_is_written_once_and_loads_back(tmp_path):
    model = Tied()
    save_model(model, tmp_path / "m")
    tensors, aliases = read(tmp_path / "m")
    assert tensors.keys() == {"embedding.weight", "first.bias"}
    assert aliases == {
        "first.weight": "embedding.weight",
        "second.weight": "embedding.weight",
        "second.bias": "first.bias",
    }
    assert_same_state(model, load(Tied(), tmp_path / "m"))


def test_a_module_used_twice_is_written_once(tmp_path):
    layer = nn.Linear(2, 2)
    save_model(nn.Sequential(layer, nn.ReLU(), layer), tmp_path / "m")
    tensors, aliases = read(tmp_path / "m")
    assert tensors.keys() == {"0.weight", "0.bias"}
    assert aliases == {"2.weight": "0.weight", "2.bias": "0.bias"}


class Buffers(nn.Module):
    def __init__(self, **buffers: torch.Tensor):
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)


TABLE = torch.arange(6.0)


@pytest.mark.parametrize(
    "buffers",
    [
        {"transposed": TABLE.reshape(2, 3).T},
        {"strided": TABLE[::2]},
        {"expanded": torch.ones(1).expand(4)},
        {"matrix": TABLE.reshape(2, 3), "transposed": TABLE.reshape(2, 3).T},
        {"square": TABLE[:4].reshape(2, 2), "transposed": TABLE[:4].reshape(2, 2).T},
        {"front": TABLE[:3], "back": TABLE[3:]},
        {"long": TABLE, "every_other": TABLE[::2]},
        {"bits": torch.tensor([True, False]), "brain": torch.ones(2, dtype=torch.bfloat16)},
        {"empty": torch.empty(0, 3), "also_empty": torch.empty(0, 3)},
        {"scalar": torch.tensor(3)},
        {"whole": TABLE, "tail": TABLE[1:]},
        {"as_float": TABLE, "as_int": TABLE.view(torch.int32)},
        {"flat": TABLE, "matrix": TABLE.view(2, 3)},
    ],
    ids=" ".join,
)
def test_tensors_of_all_kinds_come_back(tmp_path, buffers):
    model = Buffers(**buffers)
    save_model(model, tmp_path / "m")
    tensors, aliases = read(tmp_path / "m")
    assert tensors.keys() == buffers.keys()
    assert aliases == {}
    blank = Buffers(**{name: torch.zeros(x.shape, dtype=x.dtype) for name, x in buffers.items()})
    assert_same_state(model, load(blank, tmp_path / "m"))


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"version": 2}

    def set_extra_state(self, state):
        assert state == {"version": 2}


def test_the_weights_of_a_module_with_extra_state_are_saved(tmp_path):
    save_model(WithExtraState(2, 2), tmp_path / "m")
    assert {"weight", "bias"} <= read(tmp_path / "m")[0].keys()


def test_the_same_model_gives_the_same_bytes(tmp_path):
    model = Tied()
    save_model(model, tmp_path / "a")
    copy = Tied()
    copy.load_state_dict(model.state_dict())
    for name in ("b", "c", "d", "e"):
        save_model(copy, tmp_path / name)
        assert (tmp_path / name).read_bytes() == (tmp_path / "a").read_bytes()


def test_only_the_file_is_left(tmp_path):
    save_model(nn.Linear(2, 2), tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "model.safetensors"
    save_model(nn.Linear(200, 200), path)
    small = nn.Linear(2, 2)
    with path.open("rb") as old:
        before = path.read_bytes()
        save_model(small, path)
        assert old.read() == before  # who reads the old file is not disturbed
    assert_same_state(small, load(nn.Linear(2, 2), path))


def test_the_file_appears_only_when_it_is_complete(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_model(nn.Linear(2, 2), path)
    before = path.read_bytes()
    seen = []

    def refuse(descriptor):
        seen.append(path.read_bytes())
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match="no space left"):
        save_model(nn.Linear(3, 3), path)
    assert seen == [before]
    assert path.read_bytes() == before


def test_the_model_stays_as_it_is(tmp_path):
    model = Tied()
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    save_model(model, tmp_path / "m")
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert model.first.weight is model.embedding.weight


def test_complex_weights_are_pairs_of_real_ones_in_the_file(tmp_path):
    model = Tied()
    model.phases = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64).t())
    model.register_buffer("also", model.phases.detach())
    save_model(model, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["complex"]) == ["phases", "also"]
        assert file.get_tensor("phases").shape == (2, 3, 2)
    fresh = Tied()
    fresh.phases = nn.Parameter(torch.zeros(2, 3, dtype=torch.complex64))
    fresh.register_buffer("also", torch.zeros(2, 3, dtype=torch.complex64))
    load_model(fresh, tmp_path / "model.safetensors")
    assert_same_state(model, fresh)


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match=r"model\.safetensors cannot be written: .* MiB are free in"):
        save_model(nn.Linear(2, 2), tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_halfway_is_the_same_error(small_disk):
    with pytest.raises(StorageError, match=r"model\.safetensors cannot be written: .* MiB are free in"):
        save_model(nn.Linear(1000, 1000), small_disk / "model.safetensors")
    assert list(small_disk.iterdir()) == []


def test_links_in_the_way_are_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("mine")
    for name in ("model.safetensors", ".model.safetensors.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    save_model(nn.Linear(2, 2), tmp_path / "model.safetensors")
    load_model(nn.Linear(2, 2), tmp_path / "model.safetensors")
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("aliases", ["x", "[]", '{"a": "nothing"}', '{"a": []}'])
def test_a_file_with_strange_aliases_is_an_error(tmp_path, aliases):
    save_file({"weight": torch.ones(1)}, tmp_path / "m", metadata={"aliases": aliases})
    with pytest.raises(CheckpointError):
        load_model(nn.Linear(1, 1), tmp_path / "m")


def test_a_pipe_is_no_model(tmp_path):
    os.mkfifo(tmp_path / "m")
    with pytest.raises(CheckpointError, match="it is not a regular file"):
        load_model(nn.Linear(1, 1), tmp_path / "m")


def test_a_buffer_that_was_saved_can_be_resized(tmp_path):
    model = nn.BatchNorm1d(2)
    save_model(model, tmp_path / "model.safetensors")
    assert model.running_mean.resize_(5000).shape == (5000,)
