"""What feeds the lanes of a process: datasets are counted, compared between ranks, and read by a loader."""

import logging
from collections.abc import Callable, Mapping, Sized
from types import MappingProxyType
from typing import Any

from lanewise.config import BatchConfig, DataConfig
from lanewise.data import FileDataset, Fingerprint, LaneLoader, LaneReader, digest, fingerprint
from lanewise.device.accelerator import has_streams
from lanewise.engine.samples.order import OrderChoice, require_block_sizes
from lanewise.errors import DataError, TaskError
from lanewise.lanes import BlockedOrder, OrderInputs, Placement, SampleOrder, Schedule
from lanewise.world.world import World

logger = logging.getLogger(__name__)

Collate = Callable[[Any], Any]
Tables = Mapping[str, Callable[[], Any]]

_READ_FACTOR = 1.15
"""A lane reads its first and last block in part; more than this is worth a word."""


def build_loader(
    reader: LaneReader,
    batch: BatchConfig,
    data: DataConfig,
    world: World,
    placement: Placement,
    *,
    order: OrderChoice | None = None,
    tables: Tables = MappingProxyType({}),
) -> tuple[LaneLoader, dict[str, Any]]:
    """Build what feeds the lanes of this process. Collective: every rank must call this.

    Args:
        reader: of the dataset, which is map-style, and equal on every rank.
        batch: sizes.
        data: loading, and whether to drop the partial last step.
        world: the processes.
        placement: who carries which lanes.
        order: in which the samples come; None: what suits the dataset.
        tables: what orders may ask for, by name; see `OrderInputs`.

    Returns:
        The loader, and what identifies the samples of a run and their order.

    Raises:
        ConfigError: if an argument of the order is out of its range.
        DataError: if not one step can be made of the dataset, it differs between ranks, or it lacks what the
            order needs.
        TaskError: if it is not map-style.
    """
    dataset: Any = reader.dataset
    num_samples = count_samples(dataset)
    choice = order or OrderChoice.default(dataset)
    schedule = Schedule(num_samples, batch.global_batch_size, batch.samples_per_lane, data.drop_last)
    if not schedule.steps_per_epoch:
        raise DataError(
            f"the training dataset is too small for one step: it has {num_samples} samples, a step takes "
            f"{batch.global_batch_size}" + (" and drop_last is set." if num_samples else ". Check its path.")
        )
    inputs = OrderInputs(schedule, reader.seed, {"block_sizes": require_block_sizes(dataset), **tables})
    loader = LaneLoader(
        reader,
        choice.make(inputs),
        placement.own,
        num_workers=data.num_workers,
        pin_memory=has_streams(world.device),
    )
    found = compare_datasets(reader, num_samples, world, inputs.used)
    if world.rank == 0:
        _describe(dataset, loader.order, data.num_workers, placement)
    return loader, {**found._asdict(), "order": choice.spec, "drop_last": data.drop_last}


def _describe(dataset: Any, order: SampleOrder, num_workers: int, placement: Placement) -> None:
    """Say what the order costs, where blocks are read more than once or workers stay idle."""
    if order.reads_blocks and num_workers > placement.most:
        logger.info("%d of %d loader workers are used: one for each lane", placement.most, num_workers)
    if not getattr(dataset, "reads_from_start", False):
        return
    if not order.reads_blocks:
        logger.warning(
            "%s asks for rows all over the files, which are read from the start of a block: each process "
            "reads nearly all of them, and again and again where their rows don't fit into memory_mib. "
            "data.order blocked reads each once.",
            type(order).__name__,
        )
    elif isinstance(order, BlockedOrder) and (factor := order.read_factor(placement.ranges)) > _READ_FACTOR:
        logger.warning(
            "the processes together read %.1f times what the files have, as %d blocks of rows are few for "
            "%d lanes: one that two processes share is read by both. Write more and smaller blocks.",
            factor,
            order.num_blocks,
            order.schedule.num_lanes,
        )


def count_samples(dataset: Any) -> int:
    """Return the length of a map-style dataset, or raise TaskError where it is none."""
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise TaskError(
            f"a dataset of the task must be map-style: got {type(dataset).__name__}. "
            "Lanes read samples by index, so it needs __len__ and __getitem__."
        )
    return len(dataset)


def compare_datasets(
    reader: LaneReader, num_samples: int, world: World, tables: Mapping[str, Any] = MappingProxyType({})
) -> Fingerprint:
    """Return what a dataset is known by; raise where ranks see other ones.

    A difference would otherwise show as a hang or a wrong model. Collective: every rank must call this.

    Args:
        reader: reads the dataset.
        num_samples: its length.
        world: the processes.
        tables: what the order was made from.
    """
    local = fingerprint(reader, num_samples)._replace(tables_digest=digest(tables) if tables else "")
    of = "the files" if isinstance(reader.dataset, FileDataset) else "three samples"
    of_tables = f" and of {', '.join(tables)}" if tables else ""
    for rank, other in enumerate(world.all_gather_object(local)):
        if other != local:
            raise DataError(
                f"ranks {world.rank} and {rank} see different datasets: {local.num_samples} and "
                f"{other.num_samples} samples, digests of {of}{of_tables} "
                f"{_digests(local)} and {_digests(other)}. A dataset must be whole on every rank."
            )
    return local


def _digests(one: Fingerprint) -> str:
    return f"{one.samples_digest} {one.tables_digest}".strip()
