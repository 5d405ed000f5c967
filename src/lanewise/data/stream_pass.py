"""Reads a stream once from its beginning to its end, as an evaluation does."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from lanewise.data.lane_reader import LaneBatch
from lanewise.data.stream import StreamReader
from lanewise.data.stream_lanes import StreamLanes
from lanewise.errors import DataError


def read_to_end(reader: StreamReader, num_workers: int, *, pin_memory: bool = False) -> Iterator[LaneBatch]:
    """Yield the micro-batches of a reader's lanes in epoch 0; `turn.is_last` marks the last one of its lane.

    Those of a lane come in order. A lane-aware stream is read lane after lane, by several workers as many
    lanes at a time; of a plain stream the lanes alternate.

    Args:
        reader: tells the stream, its cut and the lanes; nothing is read through it, so it may serve again.
        num_workers: see `StreamLanes`.
        pin_memory: see `StreamLanes`.
    """
    anew, is_aware = reader.anew(reader.lanes), reader.is_lane_aware
    lanes = StreamLanes(anew, num_workers, pin_memory=pin_memory, lane_after_lane=is_aware)
    lanes.open(0)
    in_turn: Sequence[Sequence[int]] = lanes.shares if is_aware else [[lane] for lane in reader.lanes]
    while going := [lane for own in in_turn for lane in islice(filter(lanes.num_next, own), 1)]:
        for lane in going:
            batch = lanes.take(lane)
            yield replace(batch, turn=batch.turn._replace(is_last=not lanes.num_next(lane)))


def read_first(reader: StreamReader) -> LaneBatch:
    """Return the first micro-batch with a sample, of the first lane that has one.

    An empty one if the stream is empty.

    Args:
        reader: tells the stream and its cut; nothing is read through it.

    Raises:
        DataError: if a lane begins with very many samples that are None.
    """
    for lane in range(reader.cut.num_lanes if reader.is_lane_aware else 1):
        opened = reader.anew(range(lane, lane + 1))
        for _ in range(_MOST_TRIED):
            batch = opened[0, lane]
            if batch.num_samples:
                return batch
            if not batch.indices:
                break
        else:
            num_samples = _MOST_TRIED * reader.cut.micro_batch_size
            raise DataError(
                f"the stream yields None as each of the first {num_samples:,} samples of lane {lane}. Does "
                "what makes its samples lack a return?"
            )
    return batch


_MOST_TRIED = 1000
