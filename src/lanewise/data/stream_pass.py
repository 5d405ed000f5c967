"""Reads a stream once from its beginning to its end, as an evaluation does."""

from collections.abc import Iterator
from dataclasses import replace

from lanewise.data.loader import read_turns
from lanewise.data.reader import LaneBatch
from lanewise.data.stream import StreamReader
from lanewise.lanes import lane_ranges


def read_to_end(reader: StreamReader, num_workers: int, *, pin_memory: bool = False) -> Iterator[LaneBatch]:
    """Yield the micro-batches of a reader's lanes in epoch 0; `turn.is_last` marks the last one of its lane.

    Those of a lane come in order. A lane-aware stream is read lane after lane, by several workers as many
    lanes at a time; of a plain stream the lanes take turns. To know which micro-batch is the last one, each
    lane is read one ahead.

    Args:
        reader: tells the stream, its cut and the lanes; nothing is read through it, so it may serve again.
        num_workers: processes that read ahead; 0 reads in this one. A lane lives in one of them, and a plain
            stream in a single one.
        pin_memory: whether batches lie in page-locked memory, for a GPU.
    """
    lanes, ended = reader.lanes, set[int]()
    num_workers = min(num_workers, len(lanes) if reader.is_lane_aware else 1)
    shares = [lanes[share.start : share.stop] for share in lane_ranges(len(lanes), max(1, num_workers))]

    def requests() -> Iterator[tuple[int, int] | None]:
        """Ask each worker in turn, as a DataLoader does; one whose lanes have ended is asked for nothing."""
        while len(ended) < len(lanes):
            for share in shares:
                going = [lane for lane in share if lane not in ended]
                if reader.is_lane_aware:
                    yield (0, going[0]) if going else None
                else:
                    yield from ((0, lane) for lane in going)

    waiting: dict[int, LaneBatch] = {}
    for batch in read_turns(reader.anew(lanes), requests(), num_workers, pin_memory=pin_memory):
        turn = batch.turn
        if turn.epoch or turn.lane in ended:
            continue  # nothing, or asked for when nobody knew that the lane had ended
        is_end = batch.num_samples < reader.cut.micro_batch_size
        if turn.lane in waiting:
            yield _marked(waiting.pop(turn.lane), is_last=not batch.num_samples)
        if not is_end:
            waiting[turn.lane] = batch
            continue
        ended.add(turn.lane)
        if batch.num_samples:
            yield _marked(batch, is_last=True)
        if len(ended) == len(lanes):
            return


def read_first(reader: StreamReader) -> LaneBatch:
    """Return the first micro-batch of the first lane that has one; an empty one if the stream is empty.

    Args:
        reader: tells the stream and its cut; nothing is read through it.
    """
    last = reader.cut.num_lanes - 1 if reader.is_lane_aware else 0
    for lane in range(last):
        batch = reader.anew(range(lane, lane + 1))[0, lane]
        if batch.num_samples:
            return batch
    return reader.anew(range(last, last + 1))[0, last]


def _marked(batch: LaneBatch, *, is_last: bool) -> LaneBatch:
    return replace(batch, turn=batch.turn._replace(is_last=is_last))
