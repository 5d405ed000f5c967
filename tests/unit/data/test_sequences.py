"""Ragged, padded and packed sequences are the same ones, and it is known which value is of which."""

import re
from textwrap import dedent

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from lanewise.data import Packed, Padded, Ragged, pack, pad
from lanewise.errors import DataError
from lanewise.processes.device.nested import map_leaves
from lanewise.task import Loss

LISTS = st.lists(st.lists(st.integers(-5, 5), max_size=6), max_size=6)


def as_ragged(lists):
    offsets = torch.tensor([0, *map(len, lists)]).cumsum(0)
    return Ragged(torch.tensor(sum(lists, []), dtype=torch.int64), offsets)  # noqa: RUF017 - short


def as_tensors(lists):
    return [torch.tensor(values, dtype=torch.int64) for values in lists]


def test_lengths():
    assert Ragged(torch.arange(3), torch.tensor([0, 1, 1, 3])).lengths.tolist() == [1, 0, 2]
    assert Ragged(torch.arange(0), torch.tensor([0])).lengths.tolist() == []


def test_it_moves_with_a_batch():
    moved = map_leaves(lambda tensor: tensor + 1, {"x": Ragged(torch.arange(1), torch.tensor([0, 1]))})
    assert isinstance(moved["x"], Ragged)
    assert moved["x"].values.tolist() == [1]


@given(LISTS, st.integers(-5, 5), st.sampled_from([as_ragged, as_tensors]))
def test_padded_sequences_come_back(lists, value, given_as):
    padded = pad(given_as(lists), value)
    assert padded.values.dtype == padded.lengths.dtype == torch.int64
    assert padded.values.shape == (len(lists), max(map(len, lists), default=0))
    assert padded.lengths.tolist() == [len(values) for values in lists]
    rows = zip(padded.values, padded.mask, strict=True)
    assert [row[own].tolist() for row, own in rows] == lists
    assert all(other == value for other in padded.values[~padded.mask].tolist())


def test_rows_and_mask():
    padded = pad(as_ragged([[1, 2, 3], [], [4]]), -100)
    assert padded.values.tolist() == [[1, 2, 3], [-100] * 3, [4, -100, -100]]
    assert padded.mask.dtype == torch.bool
    assert padded.mask.tolist() == [[True] * 3, [False] * 3, [True, False, False]]


def test_zeros_are_the_default_and_the_dtype_stays():
    padded = pad([torch.ones(1, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)])
    assert padded.values.dtype == torch.bfloat16
    assert padded.values.tolist() == [[1, 0], [1, 1]]


def test_padded_tensors_are_mapped_within():
    padded = map_leaves(lambda tensor: tensor * 2, pad(as_ragged([[1], [2, 3]])))
    assert isinstance(padded, Padded)
    assert (padded.values.tolist(), padded.lengths.tolist()) == ([[2, 0], [4, 6]], [2, 4])


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([torch.ones(1), torch.ones(2, 3)], r"Sequence 1 is torch\.float32 \[2, 3\]"),
        (
            [torch.ones(1), torch.ones(1).int()],
            r"Sequence 1 is torch\.int32 \[1\], and sequence 0 is torch\.float32",
        ),
        ([torch.tensor(1)], r"Sequence 0 is a single torch\.int64 number"),
        (Ragged(as_ragged([[1]]), torch.tensor([0, 1])), "hold sequences again"),
        (Ragged(torch.ones(2, 2), torch.tensor([0, 2])), "hold sequences again"),
    ],
)
def test_what_is_no_sequence_of_one_dtype_is_refused(sequences, message):
    with pytest.raises(DataError, match=message):
        pad(sequences)


@given(LISTS, st.sampled_from([as_ragged, as_tensors]))
def test_packed_sequences_come_back(lists, given_as):
    packed = pack(given_as(lists))
    assert all(tensor.dtype == torch.int64 for tensor in packed)
    assert packed.lengths.tolist() == [len(values) for values in lists]
    assert [values.tolist() for values in packed.values.split(packed.lengths.tolist())] == lists
    assert packed.position_ids.tolist() == [place for values in lists for place in range(len(values))]
    assert packed.document_ids.tolist() == [number for number, values in enumerate(lists) for _ in values]
    places = list(zip(packed.document_ids.tolist(), packed.position_ids.tolist(), strict=True))
    expected = [[of == own and at <= place for of, at in places] for own, place in places]
    assert packed.attention_mask().tolist() == expected


def test_the_parts_of_a_pack():
    packed = pack(as_ragged([[7, 8], [], [9, 10, 11]]))
    assert packed.values.tolist() == [7, 8, 9, 10, 11]
    assert packed.position_ids.tolist() == [0, 1, 0, 1, 2]
    assert packed.document_ids.tolist() == [0, 0, 2, 2, 2]
    assert packed.offsets.tolist() == [0, 2, 2, 5]
    assert packed.attention_mask().dtype == torch.bool
    assert packed.attention_mask().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]


def test_attention_in_a_pack_is_that_of_each_sequence():
    torch.manual_seed(0)
    packed = pack([torch.arange(4), torch.arange(3)])
    values = torch.randn(1, 7, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    together = attend(values, values, values, attn_mask=packed.attention_mask())
    alone = [
        attend(heads, heads, heads, is_causal=True) for heads in values.split(packed.lengths.tolist(), dim=1)
    ]
    torch.testing.assert_close(together, torch.cat(alone, dim=1))


def test_packed_tensors_are_mapped_within():
    packed = map_leaves(lambda tensor: tensor * 2, pack(as_ragged([[1], [2, 3]])))
    assert isinstance(packed, Packed)
    assert packed.values.tolist() == [2, 4, 6]


def example_of(function):
    """The methods of a task that the docstring shows."""
    (code,) = re.findall(r"(        def collate.*?)\n\n    Args:", function.__doc__, re.DOTALL)
    names = {"IGNORED": -100, "Loss": Loss, "cross_entropy": cross_entropy, "pack": pack, "pad": pad}
    exec(dedent(code), names)
    return type("Shown", (), names)()


@pytest.mark.parametrize("function", [pack, pad])
def test_the_example_is_a_task_whose_loss_is_the_mean_over_all_tokens(function):
    task, tokens = example_of(function), [torch.tensor([1, 2, 3]), torch.tensor([0, 2])]
    torch.manual_seed(0)
    logits_of = torch.randn(4, 4)  # by token
    batch = task.collate([{"tokens": sequence} for sequence in tokens])
    loss = task.loss(task.forward(lambda values, *_: logits_of[values], batch), batch)
    last = -1 if function is pack else None  # of a pack each token's target is the token that follows
    expected = cross_entropy(
        logits_of[torch.cat([sequence[:last] for sequence in tokens])],
        torch.cat([sequence[1:] if function is pack else sequence for sequence in tokens]),
    )
    torch.testing.assert_close(loss.sum / loss.weight, expected)
