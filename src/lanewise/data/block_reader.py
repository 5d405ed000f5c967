"""Reads blocks that can only be read from their start, many at a time, in chunks, within a memory budget."""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

Chunk = TypeVar("Chunk")

_MAX_CURSORS = 256
"""How many blocks are open at a time: each holds a file and the page that it is decoding."""
_NOW_AND_THEN = 8
"""Fewer chunks than this may be decoded again before anything is said, as at the border of two epochs."""


@dataclass(slots=True)
class _Kept(Generic[Chunk]):
    """A decoded chunk."""

    chunk: Chunk
    num_bytes: int
    rows_left: int
    """A set of bits: bit k is set until row k of the chunk is handed out."""


class BlockReader(Generic[Chunk]):
    """Decodes blocks chunk by chunk, and keeps a chunk until each of its rows was handed out once.

    A block is a piece of a file that is decoded from its start, such as a row group of Parquet or a
    compressed file. An open cursor holds the place up to which it was decoded. The chunk that is asked for
    comes from memory, or else from the nearest cursor before it, which moves on to it, or else from a new
    cursor at the block's start. So where requests go forward in each of many places, each block is decoded
    once, also if several of the places lie in one block, and what is kept is a chunk or two for each place.

    Chunks that a cursor passes on its way are kept too, in case another place of the block needs them, but
    they are the first to go where the budget is full; then go those that were not asked for the longest. A
    chunk that went too early is decoded again from its block's start: the rows are the same, the time is not.
    One warning says so, where it is more than now and then.

    Cursors and chunks stay behind when the reader is pickled, and a forked process begins without any.

    Args:
        open_block: opens a cursor over a block: a generator of its chunks in order. Each chunk but the last
            has `rows_per_chunk` rows. What it raises comes out of `chunk`, and the cursor counts as closed.
        block_sizes: how many rows each block has.
        num_bytes: the memory that a chunk takes, in bytes.
        memory: how many bytes the kept chunks may take together. One chunk is kept in any case.
        rows_per_chunk: how many rows are decoded at a time.
    """

    def __init__(
        self,
        open_block: Callable[[int], Generator[Chunk, None, None]],
        block_sizes: Sequence[int],
        num_bytes: Callable[[Chunk], int],
        memory: int,
        rows_per_chunk: int = 512,
    ) -> None:
        self._open_block = open_block
        self._block_sizes = block_sizes
        self._num_bytes = num_bytes
        self._memory = memory
        self._rows_per_chunk = rows_per_chunk
        self._begin()

    def chunk(self, block: int, number: int, rows: Iterable[int]) -> Chunk:
        """Return a decoded chunk.

        Args:
            block: number of the block.
            number: number of the chunk within its block.
            rows: the rows that the caller takes of it now, numbered from the chunk's first. A row that was
                taken before begins a new round: the chunk stays until all of its rows were taken again.
        """
        if self._process != os.getpid():
            self._begin()  # the parent's file handles share their position with ours
        place = (block, number)
        kept = self._asked.get(place)
        if kept is None:
            kept = self._passed.pop(place, None) or self._decode(block, number)
            self._asked[place] = kept
        else:
            self._asked.move_to_end(place)
        taken = 0
        for row in rows:
            taken |= 1 << row
        if kept.rows_left & taken != taken:
            kept.rows_left = self._all_rows(block, number)
        kept.rows_left ^= taken
        if not kept.rows_left:
            self._bytes_kept -= self._asked.pop(place).num_bytes
        elif self._bytes_kept > self._memory:
            self._drop_beyond_memory()
        return kept.chunk

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process."""
        arguments = ("_open_block", "_block_sizes", "_num_bytes", "_memory", "_rows_per_chunk")
        return {name: getattr(self, name) for name in arguments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._cursors: OrderedDict[tuple[int, int], Generator[Chunk, None, None]] = OrderedDict()
        """By block and by the number of the chunk that comes next; the one that moved last is last."""
        self._asked: OrderedDict[tuple[int, int], _Kept[Chunk]] = OrderedDict()
        """By block and number; the one that was asked for last is last."""
        self._passed: OrderedDict[tuple[int, int], _Kept[Chunk]] = OrderedDict()
        """Chunks that nobody asked for so far."""
        self._bytes_kept = 0
        self._dropped: dict[int, int] = {}
        """By block a set of bits: the chunks that went for lack of room since a cursor reached its end."""
        self._num_decoded = 0
        self._num_asked_again = 0
        self._num_decoded_again = 0
        self._has_warned = False

    def _all_rows(self, block: int, number: int) -> int:
        first = number * self._rows_per_chunk
        return (1 << min(self._rows_per_chunk, self._block_sizes[block] - first)) - 1

    def _decode(self, block: int, number: int) -> _Kept[Chunk]:
        """Move a cursor on until it has decoded the chunk."""
        place = (block, number)
        if place not in self._cursors:
            at = max((at for of, at in self._cursors if of == block and at <= number), default=0)
            place = (block, at)
        cursor = self._cursors.pop(place, None) or self._open_block(block)
        for passed in range(place[1], number):
            kept = self._next(cursor, block, passed)
            if (block, passed) in self._asked or (block, passed) in self._passed:
                self._bytes_kept -= kept.num_bytes
            else:
                self._passed[block, passed] = kept
                self._drop_beyond_memory()
        kept = self._next(cursor, block, number)
        self._note_decoded_again(block, number, number + 1 - place[1])
        self._leave(cursor, block, number + 1)
        return kept

    def _next(self, cursor: Generator[Chunk, None, None], block: int, number: int) -> _Kept[Chunk]:
        chunk = next(cursor, None)
        assert chunk is not None, f"block {block} ended before its chunk {number}"
        kept = _Kept(chunk, self._num_bytes(chunk), self._all_rows(block, number))
        self._bytes_kept += kept.num_bytes
        self._num_decoded += 1
        return kept

    def _leave(self, cursor: Generator[Chunk, None, None], block: int, number: int) -> None:
        """Keep a cursor for the chunk that comes next, or close it at the end of its block."""
        if number * self._rows_per_chunk >= self._block_sizes[block]:
            self._dropped.pop(block, None)  # what lies before is asked for in another epoch, or by nobody
            cursor.close()
            return
        if (block, number) in self._cursors:
            self._cursors.pop((block, number)).close()
        self._cursors[block, number] = cursor
        if len(self._cursors) > _MAX_CURSORS:
            self._cursors.popitem(last=False)[1].close()

    def _drop_beyond_memory(self) -> None:
        while self._bytes_kept > self._memory and (self._passed or len(self._asked) > 1):
            (block, number), kept = (self._passed or self._asked).popitem(last=False)
            self._bytes_kept -= kept.num_bytes
            self._dropped[block] = self._dropped.get(block, 0) | 1 << number

    def _note_decoded_again(self, block: int, number: int, num_chunks: int) -> None:
        """Count what a chunk cost that had gone for lack of room, and say so once, if it is much."""
        dropped = self._dropped.get(block, 0)
        if not dropped >> number & 1:
            return
        self._dropped[block] = dropped & ~(1 << number)
        self._num_asked_again += 1
        self._num_decoded_again += num_chunks
        is_much = self._num_asked_again >= _NOW_AND_THEN and 4 * self._num_decoded_again > self._num_decoded
        if is_much and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Blocks of the dataset are decoded again and again from their start: %d of %d chunks of %d "
                "rows so far, since those that are in use take more than %.3g MiB. Give the dataset a larger "
                "memory_mib, and set data.order to blocked.",
                self._num_decoded_again,
                self._num_decoded,
                self._rows_per_chunk,
                self._memory / 2**20,
            )
