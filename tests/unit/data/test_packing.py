"""Packed sequences stay apart: by their positions, their numbers and the mask."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lanewise.data import Packed, Ragged, pack
from lanewise.nested import map_leaves

LISTS = st.lists(st.lists(st.integers(-5, 5), max_size=5), max_size=5)


def as_ragged(lists):
    offsets = torch.tensor([0, *map(len, lists)]).cumsum(0)
    return Ragged(torch.tensor(sum(lists, []), dtype=torch.int64), offsets)  # noqa: RUF017 - short


def as_tensors(lists):
    return [torch.tensor(one, dtype=torch.int64) for one in lists]


@given(LISTS, st.sampled_from([as_ragged, as_tensors]))
def test_the_sequences_come_back(lists, given_as):
    packed = pack(given_as(lists))
    assert all(tensor.dtype == torch.int64 for tensor in packed)
    assert packed.lengths.tolist() == [len(one) for one in lists]
    assert [one.tolist() for one in packed.values.split(packed.lengths.tolist())] == lists
    assert packed.position_ids.tolist() == [place for one in lists for place in range(len(one))]
    assert packed.document_ids.tolist() == [number for number, one in enumerate(lists) for _ in one]
    places = list(zip(packed.document_ids.tolist(), packed.position_ids.tolist(), strict=True))
    expected = [[of == own and at <= place for of, at in places] for own, place in places]
    assert packed.attention_mask().tolist() == expected


def test_the_parts():
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
    alone = [attend(one, one, one, is_causal=True) for one in values.split(packed.lengths.tolist(), dim=1)]
    torch.testing.assert_close(together, torch.cat(alone, dim=1))


def test_tensors_are_mapped_within():
    packed = map_leaves(lambda tensor: tensor * 2, pack(as_ragged([[1], [2, 3]])))
    assert isinstance(packed, Packed)
    assert packed.values.tolist() == [2, 4, 6]
