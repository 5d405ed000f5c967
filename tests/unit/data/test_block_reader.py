"""Blocks come out right whatever is asked for, and are decoded once where memory allows it."""

import multiprocessing
import pickle
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanewise.data.block_reader import _MAX_CURSORS, BlockReader


class Blocks:
    """Row r of block b is (b, r); a row takes one byte. Counts what is opened and decoded."""

    def __init__(self, sizes, rows_per_chunk=4, *, fails_at=None):
        self.sizes, self.rows_per_chunk, self.fails_at = sizes, rows_per_chunk, fails_at
        self.num_opened, self.num_open = Counter(), 0
        self.decoded = Counter()

    def open(self, block):
        self.num_opened[block] += 1
        self.num_open += 1
        try:
            for number, first in enumerate(range(0, self.sizes[block], self.rows_per_chunk)):
                if (block, number) == self.fails_at:
                    raise ValueError("damaged")
                self.decoded[block, number] += 1
                last = min(first + self.rows_per_chunk, self.sizes[block])
                yield [(block, row) for row in range(first, last)]
        finally:
            self.num_open -= 1

    def reader(self, memory=10**9):
        return BlockReader(self.open, self.sizes, len, memory, self.rows_per_chunk)


def take(reader, blocks, block, row):
    number, row = divmod(row, blocks.rows_per_chunk)
    return reader.chunk(block, number, (row,))[row]


SIZES = st.lists(st.integers(0, 23), min_size=1, max_size=5).filter(any)


@given(SIZES, st.integers(1, 7), st.integers(0, 60), st.data())
def test_any_requests_give_the_right_rows_under_any_budget(sizes, rows_per_chunk, memory, data):
    blocks = Blocks(sizes, rows_per_chunk)
    reader = blocks.reader(memory)
    rows = [(block, row) for block, size in enumerate(sizes) for row in range(size)]
    for block, row in data.draw(st.lists(st.sampled_from(rows), max_size=60)):
        assert take(reader, blocks, block, row) == (block, row)
        kept = reader._kept.values()
        assert reader._bytes_kept == sum(len(kept_chunk.chunk) for kept_chunk in kept)
        assert reader._bytes_kept <= memory or len(kept) == 1
        assert blocks.num_open == len(reader._cursors)


@given(SIZES, st.integers(1, 7), st.data())
def test_with_room_every_chunk_is_decoded_once_in_an_epoch_in_any_order(sizes, rows_per_chunk, data):
    blocks = Blocks(sizes, rows_per_chunk)
    reader = blocks.reader()
    rows = [(block, row) for block, size in enumerate(sizes) for row in range(size)]
    for block, row in data.draw(st.permutations(rows)):
        take(reader, blocks, block, row)
    assert set(blocks.decoded.values()) == {1}
    assert set(blocks.num_opened.values()) == {1}
    assert (blocks.num_open, reader._bytes_kept) == (0, 0)


def test_a_chunk_goes_with_its_last_row_and_not_before():
    blocks = Blocks([10])
    reader = blocks.reader()
    reader.chunk(0, 0, (0, 3))
    assert reader._bytes_kept == 4
    reader.chunk(0, 0, (1, 2))
    assert reader._bytes_kept == 0
    reader.chunk(0, 2, (0, 1))  # the last chunk is short; chunk 1 was passed
    assert reader._bytes_kept == 4


def test_what_one_epoch_left_does_not_count_in_the_next():
    blocks = Blocks([4])
    reader = blocks.reader()
    reader.chunk(0, 0, (0, 1, 2))
    reader.chunk(0, 0, (1,))  # the next epoch begins
    reader.chunk(0, 0, (3,))
    assert reader._bytes_kept == 4
    reader.chunk(0, 0, (0, 2))
    assert reader._bytes_kept == 0
    assert blocks.num_opened[0] == 1


def test_two_places_of_one_block_share_a_cursor():
    blocks = Blocks([80])
    reader = blocks.reader()
    for step in range(40):
        take(reader, blocks, 0, 40 + step)
        take(reader, blocks, 0, step)
    assert blocks.num_opened[0] == 1
    assert blocks.num_open == 0


def test_passed_chunks_are_the_first_to_go():
    blocks = Blocks([4, 40])
    reader = blocks.reader(memory=12)
    take(reader, blocks, 0, 0)
    take(reader, blocks, 1, 30)
    take(reader, blocks, 0, 1)
    assert blocks.num_opened[0] == 1
    assert reader._bytes_kept == 12


def test_the_chunk_not_asked_for_the_longest_goes():
    blocks = Blocks([4, 4, 4])
    reader = blocks.reader(memory=8)
    for block, row in [(0, 0), (1, 0), (0, 1), (2, 0), (0, 2), (1, 1)]:
        take(reader, blocks, block, row)
    assert blocks.num_opened == {0: 1, 1: 2, 2: 1}


def test_without_room_each_place_of_a_block_gets_a_cursor_of_its_own():
    blocks = Blocks([400])
    reader = blocks.reader(memory=20)
    for step in range(100):
        for place in (3, 1, 0, 2):
            take(reader, blocks, 0, 100 * place + step)
    assert blocks.num_opened[0] <= 6  # and not 400
    assert sum(blocks.decoded.values()) < 4 * 100


def test_cursors_are_bounded_and_the_least_recent_is_closed():
    blocks = Blocks([8] * (_MAX_CURSORS + 1))
    reader = blocks.reader()
    for block in range(_MAX_CURSORS + 1):
        take(reader, blocks, block, 0)
    assert blocks.num_open == _MAX_CURSORS
    take(reader, blocks, 1, 4)
    assert blocks.num_opened[1] == 1
    take(reader, blocks, 0, 4)
    assert blocks.num_opened[0] == 2


def test_an_error_comes_out_and_what_lies_before_it_can_be_read():
    blocks = Blocks([40], fails_at=(0, 5))
    reader = blocks.reader(memory=8)
    for _ in range(2):
        with pytest.raises(ValueError, match="damaged"):
            take(reader, blocks, 0, 30)
        assert blocks.num_open == 0
    assert take(reader, blocks, 0, 3) == (0, 3)
    assert take(reader, blocks, 0, 19) == (0, 19)


def test_one_warning_says_that_memory_is_short(caplog):
    blocks = Blocks([40] * 4)
    reader = blocks.reader(memory=8)
    for row in range(20):
        for block in range(4):
            take(reader, blocks, block, row)
    (record,) = caplog.records
    assert "take more than 7.63e-06 MiB. Give the dataset a larger memory_mib" in record.message


@pytest.mark.parametrize("sizes", [[4] * 40, [40] * 4, [160]])
def test_many_epochs_from_the_middle_warn_of_nothing(sizes, caplog):
    """As after a resume, and where other processes read the rest of a block."""
    blocks = Blocks(sizes)
    reader = blocks.reader(memory=16)
    rows = [(block, row) for block, size in enumerate(sizes) for row in range(size)]
    for _ in range(10):
        for block, row in rows[70:90]:
            take(reader, blocks, block, row)
    for _ in range(10):
        for block, row in rows[70:]:
            take(reader, blocks, block, row)
    assert not caplog.records


def test_what_a_resumed_epoch_passed_is_not_missed_in_the_next(caplog):
    blocks = Blocks([160] * 3)
    reader = blocks.reader(memory=16)
    for first in (120, 0, 0):
        for row in range(first, 160):
            for block in range(3):
                take(reader, blocks, block, row)
    assert set(blocks.num_opened.values()) == {3}
    assert not caplog.records


def test_a_pickled_reader_begins_anew_and_is_small():
    blocks = Blocks([1000])
    reader = blocks.reader()
    take(reader, blocks, 0, 500)
    pickled = pickle.dumps(reader)
    assert len(pickled) < 2000
    copy = pickle.loads(pickled)
    assert take(copy, blocks, 0, 999) == (0, 999)
    assert blocks.num_opened[0] == 1


def test_a_forked_process_opens_its_own_cursors():
    blocks = Blocks([40])
    reader = blocks.reader()
    take(reader, blocks, 0, 0)

    def read(results):
        results.put((take(reader, blocks, 0, 4), blocks.num_opened[0], blocks.num_open))

    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=read, args=(results,))
    process.start()
    process.join()
    assert results.get() == ((0, 4), 2, 1)
    take(reader, blocks, 0, 4)
    assert blocks.num_opened[0] == 1
