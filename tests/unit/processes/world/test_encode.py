"""State survives JSON unchanged, what cannot is named, and nothing that is loaded runs."""

import copy
import json
import math
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from lanewise.errors import CheckpointError
from lanewise.processes.world.encode import TensorTable, decode, encode
from lanewise.processes.world.shards import HeldTensor
from lanewise.runs.checkpoint.part import Staging

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def through_json(value: Any) -> Any:
    tensors = TensorTable()
    text = json.dumps(encode(value, "state", tensors), allow_nan=False)
    return decode(json.loads(text), tensors)


def through_file(value: Any, path: Path) -> Any:
    tensors, staging = TensorTable(), Staging()
    text = json.dumps(encode(value, "state", tensors), allow_nan=False)
    staging.take(tensors)
    staging.write(path)
    with safe_open(path, framework="pt") as file:
        return decode(json.loads(text), {name: file.get_tensor(name) for name in tensors})


def freeze(value: Any) -> Any:
    """Make values comparable to the last bit: nan equals nan, 0.0 is not -0.0, True is not 1."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.contiguous().flatten().view(torch.uint8).tolist()
    if isinstance(value, dict):
        return type(value), [(freeze(key), freeze(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [freeze(item) for item in value]
    return type(value), repr(value)


atoms = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.text() | st.integers() | st.booleans() | st.floats(allow_nan=False) | st.none()
keys |= st.tuples(st.integers(), st.text()) | st.sampled_from(["$tensor", "$float", "$tuple", "$items"])
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.integers(), st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=20,
)


@given(values)
def test_nested_values_come_back_with_their_types(value):
    assert freeze(through_json(value)) == freeze(value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308, 2**70, True, 1, 1.0])
def test_numbers_come_back_as_they_were(number):
    assert freeze(through_json({"number": [number]})) == freeze({"number": [number]})


@pytest.mark.parametrize("tag", ["$tensor", "$shards", "$float", "$tuple", "$items", "$counter"])
@pytest.mark.parametrize("content", ["nan", [1, 2], [[1, 2]], {}, None])
def test_a_key_that_looks_like_a_tag_is_a_key(tag, content):
    for value in ({tag: content}, {tag: content, "other": 1}, {"outer": [{tag: {tag: content}}]}):
        assert freeze(through_json(value)) == freeze(value)


def test_an_ordered_mapping_comes_back_in_its_order():
    assert list(through_json(OrderedDict(b=1, a=2))) == ["b", "a"]


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    numbers = torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator)
    return numbers.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_and_shape_come_back(tmp_path, dtype):
    state = {
        "scalar": sample(dtype),
        "empty": sample(dtype, 0),
        "empty matrix": sample(dtype, 3, 0),
        "odd": sample(dtype, 3),
        "transposed": sample(dtype, 3, 5).T,
        "strided": sample(dtype, 9)[1::2],
        "expanded": sample(dtype, 1).expand(4),
        "deep": [{"a": (sample(dtype, 2, 2, 2).permute(2, 0, 1), 7)}],
    }
    assert freeze(through_file(state, tmp_path / "f")) == freeze(state)


def test_tensors_of_mixed_dtypes_come_back(tmp_path):
    state = {f"{dtype} {size}": sample(dtype, size) for dtype in DTYPES for size in (1, 3, 0, 8)}
    assert freeze(through_file(state, tmp_path / "f")) == freeze(state)


def test_every_bit_of_a_float_comes_back(tmp_path):
    bits = torch.tensor([0x7FC00001, -0x400000, 0x7F800000, 1, -(2**31), 0x7F800001], dtype=torch.int32)
    state = {"odd": bits.view(torch.float32)}
    assert torch.equal(through_file(state, tmp_path / "f")["odd"].view(torch.int32), bits)


def test_a_parameter_comes_back_as_a_tensor(tmp_path):
    state = through_file({"w": torch.nn.Parameter(torch.ones(2))}, tmp_path / "f")
    assert torch.equal(state["w"], torch.ones(2))
    assert not state["w"].requires_grad


def test_state_without_tensors_is_a_file_too(tmp_path):
    assert through_file({"a": 1}, tmp_path / "f") == {"a": 1}


def test_a_tied_tensor_is_written_once():
    weight = torch.ones(2, 3)
    tensors = TensorTable()
    tree = encode({"a": weight, "b": [weight, weight[:]], "c": weight.T, "d": weight[:1]}, "s", tensors)
    assert tensors.keys() == {"s/a", "s/c", "s/d"}
    state = decode(tree, tensors)
    assert state["b"][0] is state["b"][1] is state["a"]


def test_tensors_that_only_begin_alike_are_not_tied():
    storage = torch.arange(6.0)
    views = {"a": storage, "b": storage[:3], "c": storage[::2], "d": storage.view(torch.int32)}
    views |= {"e": storage.view(2, 3), "f": storage[:0], "g": storage[:0]}
    tensors = TensorTable()
    encode(views, "s", tensors)
    assert len(tensors) == len(views)


@pytest.mark.parametrize(
    "value",
    [
        {1: torch.zeros(2), "1": torch.ones(2)},
        {"a/b": torch.zeros(2), "a": {"b": torch.ones(2)}},
        {"a": {0: torch.zeros(2)}, "a/0": torch.ones(2)},
        {1: torch.zeros(2), 1.5: torch.ones(2), "1.5": torch.zeros(2)},
    ],
)
def test_keys_that_are_spelled_alike_keep_their_own_tensors(value):
    assert freeze(through_json(value)) == freeze(value)


@pytest.mark.parametrize(
    "foreign",
    [object(), print, {1, 2}, b"bytes", 1j, np.float32(1), np.ones(2), torch.float32, Path("x"), range(3)],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_encoded_is_named(foreign):
    kind = type(foreign).__qualname__
    with pytest.raises(CheckpointError, match=f"scheduler/phases/1/fn cannot be saved: .*{kind}"):
        encode({"phases": [0, {"fn": foreign}]}, "scheduler", TensorTable())


def test_a_key_that_cannot_be_encoded_is_named():
    with pytest.raises(CheckpointError, match=r"s/a/\(key\) cannot be saved"):
        encode({"a": {b"x": 1}}, "s", TensorTable())


def test_encoding_changes_nothing():
    state = {"a": [1, (2, {3: torch.ones(2)})], "c": Counter([1])}
    before = copy.deepcopy(state)
    encode(state, "s", TensorTable())
    assert freeze(state) == freeze(before)


@pytest.mark.parametrize(
    "tree",
    [
        {"$tensor": "missing"},
        {"$tensor": ["a"]},
        {"$tensor": None},
        {"$shards": []},
        {"$shards": None},
        {"$shards": [["missing", 0]]},
        {"$shards": [["a", 1]]},
        {"$shards": [["a", 0], ["a", 2]]},
        {"$shards": [["a", 0], ["wide", 1]]},
        {"$float": "1.5"},
        {"$float": None},
        {"$tuple": None},
        {"$tuple": 5},
        {"$items": 5},
        {"$items": [[1]]},
        {"$items": [[1, 2, 3]]},
        {"$items": [[[1], 2]]},
        {"$counter": {"a": 1}},
        [{"a": {"$counter": None}}],
    ],
    ids=repr,
)
def test_what_is_not_our_encoding_is_an_error(tree):
    with pytest.raises(LookupError, match="which is not a known encoding"):
        decode(tree, {"a": torch.ones(1), "wide": torch.ones(1, 2)})


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_tensors_survive_as_pairs_of_real_ones(tmp_path, dtype):
    weight = torch.tensor([[1 + 2j, -0.0 - 3j], [float("inf") + 0j, 5e-4j]]).to(dtype)
    value = {
        "a": weight.t(),
        "b": weight.conj(),
        "scalar": weight[0, 0],
        "empty": weight[:0],
        "again": weight,
    }
    for back in (through_json(value), through_file(value, tmp_path / "part")):
        for name, tensor in value.items():
            assert back[name].dtype == dtype
            assert torch.equal(torch.view_as_real(back[name]), torch.view_as_real(tensor.resolve_conj()))


def test_a_held_tensor_has_one_name_on_every_rank_and_is_in_the_table_of_one():
    value = {"": torch.ones(2), "phase": torch.ones(2, dtype=torch.complex64)}
    trees = []
    for device, names in (("cpu", {"state/", "state/phase"}), ("meta", set())):
        tensors = TensorTable()
        held = {key: HeldTensor(tensor.to(device)) for key, tensor in value.items()}
        trees.append(encode({"shared": torch.zeros(1), **held}, "state", tensors))
        assert tensors.held == names
        assert tensors.keys() == names | {"state/shared"}
    assert trees[0] == trees[1]
    assert trees[0]["phase"] == {"$complex": "state/phase"}
