"""Builds the loader of a process's lanes of a stream, after comparing its first sample between ranks."""

import logging
from typing import Any

from lanewise.config import DataConfig
from lanewise.data import (
    MixedStream,
    StreamCut,
    StreamLoader,
    StreamReader,
    digest,
    draws_in_threads,
    read_first,
    shuffles_itself,
)
from lanewise.device.accelerator import has_streams
from lanewise.errors import DataError, noting
from lanewise.lanes import Placement
from lanewise.world.encode import TensorTable, encode
from lanewise.world.world import World

logger = logging.getLogger(__name__)


def build_stream_loader(
    reader: StreamReader,
    data: DataConfig,
    world: World,
    placement: Placement,
    *,
    num_epochs: int | None = None,
    fills_empty: bool = False,
) -> tuple[StreamLoader, dict[str, Any]]:
    """Build the loader that reads this process's lanes of a stream. Collective: every rank must call this.

    Args:
        reader: reads the stream, which is the same on every rank.
        data: loading, and whether to leave out steps that some lane cannot fill.
        world: the processes.
        placement: which process carries which lanes.
        num_epochs: of the run; None: it ends after a number of steps.
        fills_empty: see `StreamLoader`.

    Returns:
        The loader, and the identity of the run's samples and their order.

    Raises:
        DataError: if the stream differs between ranks.
    """
    found = compare_streams(reader, world)
    if world.rank == 0:
        describe_stream(reader, data.num_workers, world, placement)
    loader = StreamLoader(
        reader,
        world.all_gather_tree,
        num_epochs,
        num_workers=data.num_workers,
        pin_memory=has_streams(world.device),
        drop_last=data.drop_last,
        fills_empty=fills_empty,
    )
    kind = "lane-aware" if reader.is_lane_aware else "plain"
    return loader, {
        "stream": kind,
        "first_sample": found,
        "window_steps": reader.cut.window_steps,
        "drop_last": data.drop_last,
    }


def compare_streams(reader: StreamReader, world: World) -> str:
    """Return the digest of the first sample of the first lane that has one.

    The stream is opened for this on every rank, twice, and closed again. Collective: every rank must call
    this.

    Raises:
        DataError: if it differs, also the second time on the same rank, an eval dataset is empty, or threads
            of the stream draw random numbers.
        CheckpointError: if a checkpoint cannot hold the state of a stream to train on.
    """
    name, num_lanes = reader.eval_dataset, reader.cut.num_lanes
    of = f"eval dataset {name}" if name else "the training dataset"
    with noting(lambda: f"when the first sample of {of} was read, to compare the processes"):
        cut = StreamCut(num_lanes, 1, 1)
        if draws_in_threads(reader.dataset):
            raise DataError(
                f"{of} draws random numbers in threads of Hugging Face's datasets, as in a function of .map "
                "before .shuffle(buffer_size=...) or interleave_datasets: which sample gets which number is "
                "up to chance. Call .map after these, or leave .shuffle out and set data.shuffle_buffer."
            )
        small = StreamReader(reader.dataset, list, reader.seed, cut, range(num_lanes), eval_dataset=name)
        first = read_first(small)
        own = [first.turn.lane, digest(first.data)]
        if first.num_samples:
            index, opened = (0, first.turn.lane), small.anew(range(num_lanes))
            if digest(opened[index].data) != own[1]:
                raise DataError(
                    f"{of} begins with another sample when it is opened a second time. Each call of __iter__ "
                    "or iter_lane must begin anew, with an iterator of its own, and draw random numbers from "
                    "the generators of torch, numpy and python, or from one with a seed."
                )
            if not name:
                what = f"the state_dict of {type(reader.dataset).__name__}"
                encode(opened[index].state, what, TensorTable())
    for rank, other in enumerate(world.all_gather_tree(own)):
        if other != own:
            raise DataError(
                f"ranks {world.rank} and {rank} see different streams: they begin in lanes {own[0]} and "
                f"{other[0]} with samples of digests {own[1]} and {other[1]}. What a lane yields may depend "
                "on the epoch, the lane and the number of lanes, not on the process that reads it."
            )
    if name and not first.num_samples:
        raise DataError(f"the {of} is empty. Check its path, or leave it out.")
    return str(own[1])


def describe_stream(reader: StreamReader, num_workers: int, world: World, placement: Placement) -> None:
    """Log what a plain stream or a shuffle buffer of its own costs, or if loader workers are idle."""
    dataset, name = reader.dataset, reader.eval_dataset
    of = f"the eval dataset {name}" if name else "the training dataset"
    if shuffles_itself(dataset):
        logger.warning(
            "%s has a shuffle buffer (.shuffle(buffer_size=...)), whose samples its state does not hold: a "
            "run that resumes reads each lane from its beginning instead, and leaves out what was trained "
            "on. Take .shuffle out, and set data.shuffle_buffer",
            of,
        )
    if reader.is_lane_aware:
        if num_workers > placement.most:
            logger.info("%d of %d loader workers are used: one for each lane", placement.most, num_workers)
        return
    if world.world_size > 1 or num_workers > 1:
        why = "has no iter_lane(epoch, lane, num_lanes)"
        if (num_shards := getattr(dataset, "num_shards", 1)) > 1:
            why = f"can be cut into {num_shards} lanes, and the run has {placement.num_lanes}"
        elif isinstance(dataset, MixedStream):
            why = "has a stream without iter_lane(epoch, lane, num_lanes)"
        who = "the process" if world.world_size == 1 else f"each of {world.world_size} processes"
        workers = ", with one loader worker" if num_workers else ""
        logger.info(
            "%s, a %s, %s: %s reads all of it%s, and keeps what belongs to its lanes",
            of,
            type(dataset).__name__,
            why,
            who,
            workers,
        )
