"""Values arrive as they were sent, and what is no message is an error and nothing else."""

import json
import math
import pickle
import resource
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lanewise.errors import WorldError
from lanewise.processes.world.shards import HeldTensor
from lanewise.processes.world.tree_message import all_gather_single, dump_tree, load_tree
from lanewise.processes.world.world import LocalWorld
from lanewise.testing import run_distributed

HOST = torch.device("cpu")


def value_of(rank: int) -> Any:
    """A value that is larger on higher ranks."""
    weight = torch.arange(6.0 * (1 + 50 * rank)).view(-1, 3)
    return {
        "rank": rank,
        "text": "\u00fc" * rank,
        "numbers": [math.inf, -0.0, 2**70, None, True],
        30: (rank, [torch.tensor(rank), torch.empty(0, 2), weight.T, weight[::2]]),
        "mixed": [torch.ones(rank + 1, dtype=dtype) for dtype in (torch.bool, torch.float64, torch.bfloat16)],
        "complex": torch.tensor([1 + 2j]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "ordered": OrderedDict(b=1, a=2),
    }


def frozen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), repr(value.tolist())
    if isinstance(value, dict):
        return [(key, frozen(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [frozen(item) for item in value]
    return type(value), repr(value)


def exchange(world):
    value = value_of(world.rank)
    all_gathered, gathered = world.all_gather_tree(value), world.gather_tree(value)
    broadcast = world.broadcast_tree(value if world.rank == 0 else object())
    return frozen(all_gathered), gathered and frozen(gathered), frozen(broadcast)


@pytest.mark.parametrize("world_size", [2, 3])
def test_values_of_all_ranks_arrive_as_they_were(world_size):
    everything = frozen([value_of(rank) for rank in range(world_size)])
    for rank, (all_gathered, gathered, broadcast) in enumerate(run_distributed(exchange, world_size)):
        assert all_gathered == everything
        assert gathered == (None if rank else everything)
        assert broadcast == frozen(value_of(0))


def test_one_process_gets_its_own_value():
    world, value = LocalWorld(HOST), object()
    assert world.all_gather_tree(value) == world.gather_tree(value) == [value]
    assert world.broadcast_tree(value) is value


def send_twice(world):
    weight = torch.ones(2)
    (first, second), _ = world.all_gather_tree([weight, weight[:1]])
    first += world.rank
    return weight.tolist(), second.tolist()


def test_what_arrives_is_memory_of_its_own():
    assert run_distributed(send_twice, 2) == [([1.0, 1.0], [1.0]), ([1.0, 1.0], [1.0])]


def send_without_values(world):
    shapes = [(2, 3), (2, 3), (10**6, 10**6), ()]
    tensors = [torch.empty(shape, dtype=torch.float16, device="meta") for shape in shapes]
    received = world.all_gather_tree(tensors)[1]
    return all(
        one.is_meta and one.dtype == torch.float16 and one.shape == sent.shape
        for one, sent in zip(received, tensors, strict=True)
    )


def test_a_meta_tensor_arrives_as_one():
    assert run_distributed(send_without_values, 2) == [True, True]


def refuse(world):
    said = []
    for value in ({1, 2}, b"bytes", np.float32(1), Path("x"), WorldError("x"), HeldTensor(torch.ones(1))):
        with pytest.raises(WorldError) as caught:
            world.all_gather_tree({"a": [0, value]})
        said.append(str(caught.value))
    return said


def test_what_cannot_be_sent_is_named():
    said = run_distributed(refuse, 2)[0]
    kinds = ["builtins.set", "builtins.bytes", "numpy.float32", "Path", "WorldError", "spread over processes"]
    for kind, text in zip(kinds, said, strict=True):
        assert text.startswith("the value/a/1 cannot be sent to other processes: it is ")
        assert kind in text


def send_raw(lengths: tuple[int, int], content: bytes, num_ranks: int) -> None:
    """Take part in `all_gather_tree` with any bytes, as somebody who speaks for a rank could."""
    told = torch.empty(num_ranks, 2, dtype=torch.int64)
    all_gather_single(told.view(-1), torch.tensor(lengths))
    buffer = torch.zeros(int(told[:, 1].max()), dtype=torch.uint8)
    buffer[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    all_gather_single(torch.empty(num_ranks * len(buffer), dtype=torch.uint8), buffer)


class Intruder:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.mkdir, (self.path,)


def intrude(world, mark):
    content = pickle.dumps(Intruder(mark))
    if world.rank == 1:
        for header in (len(content), 1):
            send_raw((header, len(content)), content, 2)
        send_raw_object(content)
        return [], []
    said = []
    for _ in range(2):
        with pytest.raises(WorldError) as caught:
            world.all_gather_tree("mine")
        said.append(str(caught.value))
    ran = [mark.exists()]
    dist.all_gather_object([None, None], "mine")  # the same bytes, to torch's collective
    return said, [*ran, mark.exists()]


def send_raw_object(content: bytes) -> None:
    """Take part in `dist.all_gather_object` with any bytes."""
    told = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(told, torch.tensor([len(content)]))
    buffer = torch.zeros(int(max(told)), dtype=torch.uint8)
    buffer[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    dist.all_gather([torch.empty_like(buffer) for _ in range(2)], buffer)


def test_a_pickle_in_place_of_a_message_never_runs(tmp_path):
    said, ran = run_distributed(intrude, 2, tmp_path / "intruded")[0]
    assert ran == [False, True]  # so it was a real one
    for text in said:
        assert text.startswith("what came from rank 1 is no message of this version of lanewise: ")


def header(tree: Any, *tensors: Any) -> tuple[tuple[int, int], bytes]:
    """A message of our format, with 16 bytes for its tensors."""
    text = json.dumps([tree, tensors]).encode()
    text += b" " * (-len(text) % 8)
    return (len(text), len(text) + 16), text


ILL_FORMED = {
    "no length": ((0, 8), b""),
    "negative": ((-1, 8), b""),
    "shorter than its header": ((16, 8), b""),
    "huge": ((8, 2**60), b""),
    "too huge to count": ((8, 2**63 - 1), b""),
    "no text": ((8, 8), b"\xff" * 8),
    "deep": ((8000, 8000), b"[" * 8000),
    "a long number": ((8000, 8000), b"1" * 8000),
    "not two": ((8, 8), b"[1,2,3] "),
    "not a list": ((8, 8), b"[1,   5]"),
    "left over": header(0),
    "beyond": header({"$tensor": "a"}, ("a", "F32", [5], False)),
    "far beyond": header({"$tensor": "a"}, ("a", "F32", [2**62, 4], False)),
    "unknown dtype": header({"$tensor": "a"}, ("a", "F31", [4], False)),
    "dtype of another kind": header({"$tensor": "a"}, ("a", [], [4], False)),
    "negative shape": header({"$tensor": "a"}, ("a", "F32", [-2, -2], False)),
    "no shape": header({"$tensor": "a"}, ("a", "F32", 4, False)),
    "fractional shape": header({"$tensor": "a"}, ("a", "F32", [4.0], False)),
    "a shape of text": header({"$tensor": "a"}, ("a", "F32", ["4"], False)),
    "an impossible meta tensor": header({"$tensor": "a"}, ("a", "F32", [2**70, 2**70], True)),
    "a name that is no text": header({"$tensor": "a"}, (["a"], "F32", [4], False)),
    "twice": header({"$tensor": "a"}, ("a", "F32", [2], False), ("a", "F32", [2], False)),
    "unknown name": header({"$tensor": "b"}, ("a", "F32", [4], False)),
    "unused": header({}, ("a", "F32", [4], False)),
    "unknown encoding": header({"$float": "8"}, ("a", "F32", [4], False)),
    "short row": header({"$tensor": "a"}, ("a", "F32")),
}


def receive_ill_formed(world, names):
    said = []
    for name in names:
        if world.rank == 1:
            lengths, content = ILL_FORMED[name]
            if 0 < lengths[0] <= lengths[1] < 2**32:
                send_raw(lengths, content, 2)
            else:  # the others stop there
                all_gather_single(torch.empty(4, dtype=torch.int64), torch.tensor(lengths))
            continue
        try:
            said.append(world.all_gather_tree(0))
        except WorldError as error:
            said.append(str(error))
    return said, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_what_is_no_message_is_an_error_of_its_own():
    names = [*ILL_FORMED]
    said, used_kib = run_distributed(receive_ill_formed, 2, names)[0]
    for name, text in zip(names, said, strict=True):
        assert "from rank 1 is no message" in str(text) or "no memory for messages" in str(text), name
    assert used_kib < 2**20


def receive_damaged(world, num_messages):
    """Receive messages of which some bytes are others; return how many were taken, and how many refused."""
    generator = np.random.default_rng(0)
    content = json.dumps([{"x": [1, {"$tensor": "x/1"}]}, [["x/1", "I16", [4], False]]]).encode()
    content += b" " * (-len(content) % 8) + b"12345678"
    taken = refused = 0
    for _ in range(num_messages):
        if world.rank == 1:
            damaged = np.frombuffer(content, dtype=np.uint8).copy()
            places = generator.integers(len(content), size=generator.integers(1, 5))
            damaged[places] = generator.integers(256, size=len(places))
            send_raw((len(content) - 8, len(content)), damaged.tobytes(), 2)
            continue
        try:
            world.all_gather_tree(0)
            taken += 1
        except WorldError:
            refused += 1
    return taken, refused


def test_damaged_messages_are_values_or_errors():
    taken, refused = run_distributed(receive_damaged, 2, 300)[0]
    assert taken + refused == 300
    assert taken > 0
    assert refused > 100


def test_a_result_is_read_on_another_host_as_it_was_written():
    read = load_tree(dump_tree(value_of(2)))
    assert read["rank"] == 2
    assert read["text"] == value_of(2)["text"]


@pytest.mark.parametrize("written", [b"", b"\0" * 8, b"\0" * 7 + b"\5hello", pickle.dumps({"a": 1})])
def test_what_something_else_wrote_is_an_error(written):
    with pytest.raises(WorldError):
        load_tree(written)
