"""Builds what gives a process the batches of its lanes, from a dataset with an index or from a stream."""

from collections.abc import Callable
from typing import Any

from lanewise.config import BatchConfig, DataConfig
from lanewise.data import LaneReader, LaneSource, StreamCut, StreamLoader, StreamReader, is_stream
from lanewise.engine.samples.dataset import OrderChoice, Tables, build_loader
from lanewise.engine.samples.stream import compare_streams, describe_stream
from lanewise.errors import ConfigError
from lanewise.lanes import Placement
from lanewise.processes.device.accelerator import has_streams
from lanewise.processes.device.random_state import kept_random_state
from lanewise.processes.world.world import World

CONTENT = ("samples_digest", "tables_digest", "first_sample")
"""What the identity of a source has of the samples themselves."""


@kept_random_state()
def build_source(  # noqa: PLR0913 - the parts of a run, as arguments
    dataset: Any,
    collate: Callable[[Any], Any],
    seed: int,
    batch: BatchConfig,
    data: DataConfig,
    world: World,
    placement: Placement,
    *,
    order: OrderChoice | None,
    tables: Tables,
    num_epochs: int | None = None,
    fills_empty: bool = False,
) -> LaneSource:
    """Build the loader of this process's lanes. Collective: every rank must call this.

    Samples are read on the way, and the random state is as before afterwards: a loop of the user's own may
    have seeded it for the model that it builds next.

    Args:
        dataset: map-style or a stream, the same on every rank.
        collate: makes a micro-batch of samples.
        seed: seed of the run.
        batch: sizes of the micro-batch and the global batch.
        data: loading, shuffling, and whether to leave out steps that are not whole.
        world: the processes.
        placement: which process carries which lanes.
        order: the order of the samples, which only a map-style dataset has; None: its default order.
        tables: functions that return the tables which an order may need, by name.
        num_epochs: the epochs of the run; None: it ends after a number of steps.
        fills_empty: see `LaneReader` and `StreamLoader`.

    Raises:
        ConfigError: if an argument of the order is out of its range, or a key is for the other kind.
        DataError: if the dataset is too small for one step, or differs between ranks; see `compare_streams`.
        TaskError: if the dataset is neither, or can be read only once.
    """
    name = type(dataset).__name__
    if is_stream(dataset):
        if order is not None:
            raise ConfigError(
                f"an order is for a dataset with an index: got {order.spec['class_path']} for {name}, a "
                "stream, whose samples come as they come. shuffle_buffer, a key of data and an argument of "
                "lanes.steps, shuffles them in windows."
            )
        cut = StreamCut.of(placement.num_lanes, batch.micro_batch_size, data.shuffle_buffer)
        of_stream = StreamReader(dataset, collate, seed, cut, placement.own, missing=data.missing)
        first_sample = compare_streams(of_stream, world)
        describe_stream(of_stream, data.num_workers, world, placement)
        return StreamLoader(
            of_stream,
            world.all_gather_tree,
            num_epochs,
            most_lanes=placement.most,
            first_sample=first_sample,
            num_workers=data.num_workers,
            pin_memory=data.pin_memory and has_streams(world.device),
            drop_last=data.drop_last,
            fills_empty=fills_empty,
        )
    if data.shuffle_buffer:
        raise ConfigError(
            f"shuffle_buffer is for streams: got {data.shuffle_buffer} for {name}, which has an index. "
            "Its order says how its samples are shuffled, all of them."
        )
    reader = LaneReader(dataset, collate, seed, missing=data.missing, fills_empty=fills_empty)
    return build_loader(reader, batch, data, world, placement, order=order, tables=tables)
