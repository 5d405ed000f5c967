"""Compares the first sample of a stream between ranks, and tells what reading it costs."""

import logging

from lanewise.data import MixedStream, StreamReader, digest, draws_in_threads, read_first, shuffles_itself
from lanewise.errors import DataError, noting
from lanewise.lanes import Placement
from lanewise.processes.world.encode import TensorTable, encode
from lanewise.processes.world.world import World

logger = logging.getLogger(__name__)


def compare_streams(reader: StreamReader, world: World) -> str:
    """Return the digest of the first sample of the first lane that has one.

    The stream is opened for this on every rank, twice, and closed again. Collective: every rank must call
    this.

    Raises:
        DataError: if it differs, also the second time on the same rank, an eval dataset is empty, or threads
            of the stream draw random numbers.
        CheckpointError: if a checkpoint cannot hold the state of a stream to train on.
    """
    name = reader.eval_dataset
    of = f"eval dataset {name}" if name else "the training dataset"
    with noting(lambda: f"when the first sample of {of} was read, to compare the processes"):
        if draws_in_threads(reader.dataset):
            raise DataError(
                f"{of} draws random numbers in threads of Hugging Face's datasets, as in a function of .map "
                "before .shuffle(buffer_size=...) or interleave_datasets: which sample gets which number is "
                "up to chance. Call .map after these, or leave .shuffle out and set data.shuffle_buffer."
            )
        small = reader.of_samples(reader.dataset)
        first = read_first(small)
        own = [first.turn.lane, digest(first.data)]
        if first.num_samples:
            index, opened = (0, first.turn.lane), small.anew(small.lanes)
            for _ in range(first.turn.step + 1):
                again = opened[index]
            if digest(again.data) != own[1]:
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
    """Log on rank 0 what a plain stream or its own shuffle buffer costs, or if loader workers are idle."""
    if world.rank:
        return
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
