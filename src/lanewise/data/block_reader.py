"""Reads blocks that can only be read from their start, many at a time, in chunks, within a memory budget."""

import logging
import os
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

Chunk = TypeVar("Chunk")

_MAX_CURSORS = 256
"""How many blocks are open at a time: each holds a file and the page that it is decoding."""
_NOW_AND_THEN = 8
"""Nothing is said while fewer chunks than this were decoded again, as happens at the border of two epochs."""


@dataclass(slots=True)
class _Kept(Generic[Chunk]):
    """A decoded chunk."""

    chunk: Chunk
    num_bytes: int
    all_rows: int
    """A set of bits, one for each row of the chunk."""
    rows_left: int
    """Those of them that were not handed out yet."""

    def take(self, rows: int) -> None:
        """Hand rows out; one that was handed out before begins another pass over all of them."""
        if self.rows_left & rows != rows:
            self.rows_left = self.all_rows
        self.rows_left ^= rows


@dataclass(eq=False)
class BlockReader(Generic[Chunk]):
    """Decodes blocks chunk by chunk, and keeps a chunk until each of its rows was handed out once.

    A block is a piece of a file that is decoded from its start, such as a row group of Parquet or a
    compressed file. An open cursor holds the place up to which it was decoded. A chunk comes from memory if
    it is kept there. Otherwise the nearest cursor before it moves on to it, or a new cursor begins at the
    start of the block. So where requests go forward in each of many places, each block is decoded once, even
    if several of the places lie in one block, and a chunk or two are kept for each place.

    Chunks that a cursor passes on its way are kept too, in case another place of the block needs them. They
    are the first to be dropped when the memory is full; then those are that were not asked for the longest. A
    chunk that was dropped too early is decoded again from the start of its block, which gives the same rows
    and takes more time. If that happens more than now and then, one warning says so.

    A pickled copy and a forked process begin without cursors and chunks.
    """

    open_block: Callable[[int], Generator[Chunk, None, None]]
    """Opens a cursor over a block: a generator of its chunks in order. Each chunk but the last has
    `rows_per_chunk` rows. An error of the generator is raised by `chunk`, and the cursor counts as closed."""
    block_sizes: Sequence[int]
    """How many rows each block has."""
    num_bytes: Callable[[Chunk], int]
    """Returns the memory that a chunk takes, in bytes."""
    memory: int
    """How many bytes the kept chunks may take together. One chunk is kept in any case."""
    rows_per_chunk: int = 512
    """How many rows are decoded at a time."""

    def __post_init__(self) -> None:
        self._process = os.getpid()
        self._cursors: OrderedDict[tuple[int, int], Generator[Chunk, None, None]] = OrderedDict()
        """Open cursors by block and by the number of the next chunk; the one that moved last is last."""
        self._kept: OrderedDict[tuple[int, int], _Kept[Chunk]] = OrderedDict()
        """Chunks by block and number; the latest asked for is last, and those never asked for are first."""
        self._bytes_kept = 0
        self._dropped: defaultdict[int, set[int]] = defaultdict(set)
        """The chunks that were dropped for lack of memory since a cursor was at the block's end, by block."""
        self._num_decoded = 0
        self._num_asked_again = 0
        self._num_decoded_again = 0
        self._has_warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = self.open_block, self.block_sizes, self.num_bytes, self.memory, self.rows_per_chunk
        return BlockReader, arguments

    def chunk(self, block: int, number: int, rows: Iterable[int]) -> Chunk:
        """Return a decoded chunk.

        Args:
            block: number of the block.
            number: number of the chunk within its block.
            rows: the rows that the caller takes of it now, numbered from the chunk's first. A row that was
                taken before begins another pass: the chunk stays until all of its rows were taken again.
        """
        if self._process != os.getpid():
            self.__post_init__()  # the parent's file handles share their position with ours
        place = (block, number)
        kept = self._kept.pop(place, None) or self._decode(block, number)
        self._kept[place] = kept
        kept.take(reduce(or_, map((1).__lshift__, rows), 0))
        if not kept.rows_left:
            self._bytes_kept -= self._kept.pop(place).num_bytes
        elif self._bytes_kept > self.memory:
            self._drop_beyond_memory()
        return kept.chunk

    def _decode(self, block: int, number: int) -> _Kept[Chunk]:
        """Move a cursor on until it has decoded the chunk."""
        begin = max((at for of, at in self._cursors if of == block and at <= number), default=0)
        cursor = self._cursors.pop((block, begin), None) or self.open_block(block)
        for passed in range(begin, number):
            kept = self._next(cursor, block, passed)
            if (block, passed) in self._kept:
                self._bytes_kept -= kept.num_bytes
            else:
                self._kept[block, passed] = kept
                self._kept.move_to_end((block, passed), last=False)
                self._drop_beyond_memory()
        kept = self._next(cursor, block, number)
        if number in self._dropped[block]:
            self._dropped[block].remove(number)
            self._count_again(number + 1 - begin)
        following = (block, number + 1)
        if following in self._cursors:
            self._cursors.pop(following).close()
        self._cursors[following] = cursor
        if following[1] * self.rows_per_chunk >= self.block_sizes[block]:
            self._dropped.pop(block)  # earlier chunks are asked for in another epoch, or never
            self._cursors.pop(following).close()
        elif len(self._cursors) > _MAX_CURSORS:
            self._cursors.popitem(last=False)[1].close()
        return kept

    def _next(self, cursor: Generator[Chunk, None, None], block: int, number: int) -> _Kept[Chunk]:
        chunk = next(cursor, None)
        assert chunk is not None, f"block {block} ended before its chunk {number}"
        first = number * self.rows_per_chunk
        rows = (1 << min(self.rows_per_chunk, self.block_sizes[block] - first)) - 1
        kept = _Kept(chunk, self.num_bytes(chunk), rows, rows)
        self._bytes_kept += kept.num_bytes
        self._num_decoded += 1
        return kept

    def _drop_beyond_memory(self) -> None:
        while self._bytes_kept > self.memory and len(self._kept) > 1:
            (block, number), kept = self._kept.popitem(last=False)
            self._bytes_kept -= kept.num_bytes
            self._dropped[block].add(number)

    def _count_again(self, num_chunks: int) -> None:
        """Count what a chunk cost that had been dropped for lack of memory; warn once, if it is much."""
        self._num_asked_again += 1
        self._num_decoded_again += num_chunks
        is_much = self._num_asked_again >= _NOW_AND_THEN and 4 * self._num_decoded_again > self._num_decoded
        if is_much and not self._has_warned:
            self._has_warned = True
            counts = self._num_decoded_again, self._num_decoded, self.rows_per_chunk
            logger.warning(
                "Blocks of the dataset are decoded again and again from their start: %d of %d chunks of %d "
                "rows so far, since those that are in use take more than %.3g MiB. Give the dataset a larger "
                "memory_mib, and set data.order to blocked.",
                *(*counts, self.memory / 2**20),
            )
