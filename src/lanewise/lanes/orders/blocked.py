"""The order of a dataset in blocks: each block is read by one lane, from its begin to its end.

A step of a shuffled order has samples of all blocks, so every process would read every block. Here each epoch
gives every lane a range of blocks, and the lane deals them to strands, from which it draws at once. Six
blocks, two lanes, and two strands each; block 3 is cut where the second lane begins:

    blocks in the epoch's order      4 4 4 4 | 1 1 | 3 3 3   3 | 0 0 0 0 0 | 2 2 2
                                     lane 0                  lane 1

    lane 0, strand 0                 4   4   4   4
            strand 1                  1 1  3  3  3          a strand of n rows gives row k
                                     ---------------> time  at the time (k + 1/2) / n

A strand shuffles its rows in windows, so a process holds some windows and not whole blocks. Sixty-four
strands are enough: on digits sorted by class a small network learned as well as with a full shuffle, with 10
to 400 blocks and 1 to 8 lanes (docs/decisions/0011-orders-that-know-where-data-lie.md).

Only integers, and quotients of them, decide: the order is the same on every platform.
"""

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar, Final, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from lanewise.errors import ConfigError, DataError
from lanewise.lanes.orders.order import OrderInputs, SampleOrder
from lanewise.lanes.orders.permutation import permutation
from lanewise.lanes.schedule import LaneTurn

_Integers: TypeAlias = npt.NDArray[np.int64]

# A saved run relies on these numbers: they decide which rows a strand has, and which are ordered together.
_MIN_STRANDS: Final = 64

_CHUNK: Final = 4096
"""About so many rows of a lane are ordered at once, which costs about 1 ms."""


@final
class BlockedOrder(SampleOrder):
    """Every epoch visits the blocks in an order of its own, and mixes the rows of those that are open.

    Args:
        inputs: has the table `block_sizes`: how many consecutive samples each block holds.
        window: rows of a strand that are shuffled among each other. A process holds about two windows of
            each of its strands, which are 64 in a run, or as many as there are lanes.

    Raises:
        ConfigError: if the window is not positive.
        DataError: if the blocks don't hold the samples of the dataset.
    """

    reads_blocks: ClassVar[bool] = True

    def __init__(self, inputs: OrderInputs, window: int = 512) -> None:
        super().__init__(inputs)
        if window < 1:
            raise ConfigError(f"data.order.init_args.window must be at least 1: got {window}.")
        self._window = window
        self._sizes = inputs.table("block_sizes", np.int64)
        if self._sizes.sum() != self.schedule.num_samples:
            raise DataError(
                f"block_sizes must add up to the {self.schedule.num_samples} samples of the dataset: "
                f"got {self._sizes.sum()} in {len(self._sizes)} blocks."
            )
        num_lanes = self.schedule.num_lanes
        self._num_strands = -(-_MIN_STRANDS // num_lanes)
        self._lane_ends = np.cumsum([self.schedule.num_samples_of(lane) for lane in range(num_lanes)])
        self._blocks = lru_cache(maxsize=2)(self._make_blocks)
        self._strands = lru_cache(maxsize=num_lanes)(self._make_strands)

    def samples(self, turn: LaneTurn) -> tuple[int, ...]:
        if not turn.positions:
            return ()
        start = turn.step % self.schedule.steps_per_epoch * self.schedule.micro_batch_size
        rows = self._strands(turn.epoch, turn.lane).rows(start, start + len(turn.positions))
        return tuple(rows.tolist())

    @property
    def num_blocks(self) -> int:
        """Blocks of the dataset."""
        return len(self._sizes)

    def read_factor(self, lane_ranges: Sequence[range]) -> float:
        """Return how often a row is read in the first epoch, on average, if blocks are read from their start.

        A block that several processes share is read by each, from its begin to its last row there.

        Args:
            lane_ranges: the lanes of each process.
        """
        starts = np.cumsum(self._sizes) - self._sizes
        num_read = 0
        for lanes in lane_ranges:
            ends = np.zeros(len(self._sizes), np.int64)  # how far this process reads each block
            for pieces in (self._pieces(0, lane) for lane in lanes):
                blocks = np.searchsorted(starts, pieces.first_rows, side="right") - 1
                np.maximum.at(ends, blocks, pieces.first_rows + pieces.sizes - starts[blocks])
            num_read += int(ends.sum())
        return num_read / max(1, int(self._lane_ends[-1]))

    def _make_blocks(self, epoch: int) -> tuple[_Integers, _Integers]:
        """Return the blocks in the epoch's order, and where each ends when their rows are laid end to end."""
        blocks = permutation(len(self._sizes), "blocks", self.seed, epoch)
        return blocks, np.cumsum(self._sizes[blocks])

    def _pieces(self, epoch: int, lane: int) -> "_Pieces":
        """Return the blocks of a lane in their order; the first and the last may be cut."""
        blocks, ends = self._blocks(epoch)
        stop = int(self._lane_ends[lane])
        start = stop - self.schedule.num_samples_of(lane)
        own = slice(np.searchsorted(ends, start, side="right"), np.searchsorted(ends, stop, side="left") + 1)
        ends, sizes = ends[own], self._sizes[blocks[own]]
        begins = ends - sizes
        first_rows = (np.cumsum(self._sizes) - self._sizes)[blocks[own]] + np.maximum(start - begins, 0)
        pieces = _Pieces(first_rows, np.minimum(ends, stop) - np.maximum(begins, start))
        return _Pieces(*(part[pieces.sizes > 0] for part in pieces))

    def _make_strands(self, epoch: int, lane: int) -> "_Strands":
        pieces = _cut(self._pieces(epoch, lane), self._num_strands)
        strand_of = _deal(pieces.sizes, self._num_strands)
        sizes = np.bincount(strand_of, pieces.sizes).astype(np.int64)
        by_strand = np.argsort(strand_of, kind="stable")
        pieces = _Pieces(pieces.first_rows[by_strand], pieces.sizes[by_strand])
        return _Strands(pieces, sizes, self._window, f"{self.seed} {epoch} {lane}")


class _Pieces(NamedTuple):
    """Blocks, or pieces of them."""

    first_rows: _Integers
    """Index in the dataset of the first row of each."""
    sizes: _Integers


def _cut(pieces: _Pieces, num_strands: int) -> _Pieces:
    """Cut the longest pieces into halves where there are fewer than strands."""
    if len(pieces.sizes) >= num_strands:
        return pieces
    # By size, then by place in the order, which halves keep.
    heap: list[tuple[int, tuple[int, ...], int]] = [
        (-int(size), (place,), int(row)) for place, (row, size) in enumerate(zip(*pieces, strict=True))
    ]
    heapq.heapify(heap)
    while heap and len(heap) < num_strands and -heap[0][0] > 1:
        size, place, row = heapq.heappop(heap)
        half = -size // 2
        heapq.heappush(heap, (-half, (*place, 0), row))
        heapq.heappush(heap, (size + half, (*place, 1), row + half))
    heap.sort(key=lambda piece: piece[1])
    rows, sizes = [piece[2] for piece in heap], [-piece[0] for piece in heap]
    return _Pieces(np.array(rows, dtype=np.int64), np.array(sizes, dtype=np.int64))


def _deal(sizes: _Integers, num_strands: int) -> _Integers:
    """Deal pieces to strands, the longest first, each to the shortest strand; return the strand of each."""
    strand_of = np.empty(len(sizes), dtype=np.int64)
    strands = [(0, strand) for strand in range(num_strands)]
    for piece in np.argsort(-sizes, kind="stable").tolist():
        rows, strand = heapq.heappop(strands)
        strand_of[piece] = strand
        heapq.heappush(strands, (rows + int(sizes[piece]), strand))
    return strand_of


@final
class _Strands:
    """The rows of one lane in one epoch, in the order in which they are drawn.

    Args:
        pieces: those of the first strand in their order, then those of the second, and so on.
        sizes: rows of each strand.
        window: rows of a strand that are shuffled among each other.
        key: what the shuffles depend on.
    """

    def __init__(self, pieces: _Pieces, sizes: _Integers, window: int, key: str) -> None:
        self._pieces = pieces
        self._piece_ends = np.cumsum(pieces.sizes)
        self._sizes = sizes
        self._starts = np.cumsum(sizes) - sizes
        self._num_rows = int(sizes.sum())
        self._num_chunks = max(1, self._num_rows // _CHUNK)
        self._window = window
        self._key = key
        self._shuffled = lru_cache(maxsize=2 * len(sizes))(self._make_window)
        self._latest: tuple[int, _Integers] = 0, np.empty(0, np.int64)
        """The first position of the latest chunk, and its rows."""

    def rows(self, start: int, stop: int) -> _Integers:
        """Return the dataset indices of the rows at positions [start, stop) of the lane."""
        parts = []
        while start < stop:
            first, rows = self._latest
            if not first <= start < first + len(rows):
                first, rows = self._latest = self._make_chunk(self._chunk_of(start))
            parts.append(rows[start - first : stop - first])
            start = min(stop, first + len(rows))
        return np.concatenate(parts)

    def _rows_before(self, chunk: int) -> _Integers:
        """Count the rows of each strand whose time is before that of a chunk, which is chunk / num_chunks."""
        return (2 * chunk * self._sizes + self._num_chunks - 1) // (2 * self._num_chunks)

    def _chunk_of(self, position: int) -> int:
        chunk = position * self._num_chunks // self._num_rows
        while self._rows_before(chunk).sum() > position:
            chunk -= 1
        while self._rows_before(chunk + 1).sum() <= position:
            chunk += 1
        return chunk

    def _make_chunk(self, chunk: int) -> tuple[int, _Integers]:
        first, stop = self._rows_before(chunk), self._rows_before(chunk + 1)
        counts = stop - first
        strands = np.repeat(np.arange(len(counts)), counts)
        numbers = np.arange(len(strands)) - np.repeat(np.cumsum(counts) - counts - first, counts)
        times = (2 * numbers + 1) / (2 * self._sizes[strands])
        shuffled = [
            self._shuffle(strand, int(first[strand]), int(stop[strand]))
            for strand in np.flatnonzero(counts).tolist()
        ]
        places = (self._starts[strands] + np.concatenate(shuffled))[np.lexsort((strands, times))]
        pieces = np.searchsorted(self._piece_ends, places, side="right")
        begins = self._piece_ends[pieces] - self._pieces.sizes[pieces]
        return int(first.sum()), self._pieces.first_rows[pieces] + places - begins

    def _shuffle(self, strand: int, first: int, stop: int) -> _Integers:
        """Return the rows of a strand that stand at its places [first, stop), which are not empty."""
        windows = range(first // self._window, (stop - 1) // self._window + 1)
        begin = windows.start * self._window
        rows = np.concatenate([self._shuffled(strand, window) for window in windows])
        return rows[first - begin : stop - begin]

    def _make_window(self, strand: int, window: int) -> _Integers:
        """Return the rows of a window of a strand in their order."""
        begin = window * self._window
        size = min(self._window, int(self._sizes[strand]) - begin)
        return begin + permutation(size, "window", self._key, strand, window)
