"""The file of one process: readable by safetensors, and shared out by a pure function."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from lanewise.errors import CheckpointError
from lanewise.processes.world.encode import DTYPES, TensorTable
from lanewise.runs.checkpoint.manifest import Manifest
from lanewise.runs.checkpoint.part import Staging, part_name, share_out

sizes = st.dictionaries(st.text(min_size=1), st.integers(0, 10**9), max_size=40)
num_parts = st.integers(1, 9)


@given(sizes, num_parts)
def test_every_tensor_is_in_one_part(num_bytes, num_parts):
    parts = share_out(num_bytes, num_parts)
    assert len(parts) == num_parts
    assert sorted(name for part in parts for name in part) == sorted(num_bytes)


@given(sizes, num_parts)
def test_no_part_is_larger_than_another_by_more_than_a_tensor(num_bytes, num_parts):
    loads = [sum(num_bytes[name] for name in part) for part in share_out(num_bytes, num_parts)]
    assert max(loads) - min(loads) <= max(num_bytes.values(), default=0)


@given(sizes, num_parts, st.randoms())
def test_the_order_of_the_tensors_does_not_matter(num_bytes, num_parts, shuffler: random.Random):
    items = list(num_bytes.items())
    shuffler.shuffle(items)
    before = dict(num_bytes)
    assert share_out(dict(items), num_parts) == share_out(num_bytes, num_parts)
    assert num_bytes == before


def test_the_largest_go_first_each_to_the_emptiest_part():
    assert share_out({"a": 1, "b": 5, "c": 3, "d": 3, "e": 1}, 2) == [["b", "a", "e"], ["c", "d"]]


def test_parts_are_named_by_rank():
    assert [part_name(rank) for rank in (0, 12345)] == [
        "part-00000.safetensors",
        "part-12345.safetensors",
    ]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def many(scale: int = 1) -> dict[str, torch.Tensor]:
    """Random bits of every dtype in shapes of all kinds."""
    generator = torch.Generator().manual_seed(scale)
    tensors = {}
    for dtype in DTYPES:
        top = 2 if dtype is torch.bool else 256
        for shape in ((), (0,), (3,), (2, 0, 3), (5, 7)):
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            bits = torch.randint(0, top, (num_bytes,), dtype=torch.uint8, generator=generator)
            tensors[f"{dtype}/{shape}"] = bits.view(dtype).view(shape)
        tensors[f"{dtype}/transposed"] = tensors[f"{dtype}/(5, 7)"].T
    return tensors


def test_safetensors_reads_equal_bytes(tmp_path):
    tensors = many()
    staging = Staging()
    staging.take(tensors)
    entry = staging.write(tmp_path / "part")
    found = load_file(tmp_path / "part")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert raw(found[name]) == raw(tensor), name
    Manifest(1, None, {}, (entry,)).verify(tmp_path)


def test_tensors_lie_aligned_in_the_file(tmp_path):
    staging = Staging()
    staging.take(many())
    staging.write(tmp_path / "part")
    header = (tmp_path / "part").read_bytes()[:8]
    assert int.from_bytes(header, "little") % 8 == 0


def test_a_part_without_tensors_is_read_back(tmp_path):
    staging = Staging()
    staging.take({})
    staging.write(tmp_path / "part")
    with safe_open(tmp_path / "part", framework="pt") as file:
        assert not list(file.keys())


def test_names_of_all_kinds_come_back(tmp_path):
    tensors = {
        name: torch.tensor(number) for number, name in enumerate(["a/b", 'a"b', "a\\b", "\u00e9", " "])
    }
    staging = Staging()
    staging.take(tensors)
    staging.write(tmp_path / "part")
    found = load_file(tmp_path / "part")
    assert {name: int(tensor) for name, tensor in found.items()} == {
        name: int(tensor) for name, tensor in tensors.items()
    }


def test_the_buffer_is_allocated_once(tmp_path):
    staging = Staging()
    staging.take(many())
    pointer = staging._buffer.data_ptr()
    staging.take(many(2))
    assert staging._buffer.data_ptr() == pointer
    small = {"only": torch.arange(3)}
    staging.take(small)
    assert staging._buffer.data_ptr() == pointer
    staging.write(tmp_path / "part")
    found = load_file(tmp_path / "part")  # and nothing of the larger one before
    assert found.keys() == {"only"}
    assert torch.equal(found["only"], small["only"])


def test_more_tensors_get_a_larger_buffer(tmp_path):
    staging = Staging()
    staging.take({"a": torch.ones(2)})
    staging.take({"a": torch.ones(2), "b": torch.ones(1000)})
    staging.write(tmp_path / "part")
    assert load_file(tmp_path / "part")["b"].sum() == 1000


def test_what_was_taken_may_be_changed_afterwards(tmp_path):
    tensor = torch.ones(4, requires_grad=True)
    staging = Staging()
    staging.take({"a": tensor})
    with torch.no_grad():
        tensor.zero_()
    staging.write(tmp_path / "part")
    assert load_file(tmp_path / "part")["a"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("tensor", [torch.ones(1, dtype=torch.complex64), torch.ones(2, 2).to_sparse()])
def test_what_the_format_lacks_is_named(tensor):
    with pytest.raises(CheckpointError, match="model/odd cannot be saved"):
        TensorTable().add("model/odd", tensor)
