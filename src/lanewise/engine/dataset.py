"""What feeds the lanes of a process: datasets are counted, compared between ranks, and read by a loader."""

from collections.abc import Callable, Sized
from typing import Any

from lanewise.config import BatchConfig, DataConfig
from lanewise.data import Fingerprint, LaneLoader, LaneReader, fingerprint
from lanewise.errors import DataError, TaskError
from lanewise.lanes import Schedule, choose_order, lane_ranges
from lanewise.world.accelerator import has_streams
from lanewise.world.world import World

Collate = Callable[[Any], Any]


def build_loader(
    dataset: Any,
    collate: Collate,
    batch: BatchConfig,
    data: DataConfig,
    world: World,
    seed: int,
) -> tuple[LaneLoader, Fingerprint]:
    """Build what feeds the lanes of this process. Collective: every rank must call this.

    Args:
        dataset: map-style; equal on every rank.
        collate: makes a micro-batch of samples.
        batch: sizes.
        data: order and loading.
        world: the processes.
        seed: seed of the run.

    Returns:
        The loader, and what its dataset is known by.

    Raises:
        DataError: if not one step can be made of the dataset, or it differs between ranks.
        TaskError: if it is not map-style.
    """
    num_samples = count_samples(dataset)
    schedule = Schedule(num_samples, batch.global_batch_size, batch.micro_batch_size, data.drop_last)
    if not schedule.steps_per_epoch:
        raise DataError(
            f"the training dataset is too small for one step: it has {num_samples} samples, a step takes "
            f"{batch.global_batch_size}" + (" and drop_last is set." if num_samples else ". Check its path.")
        )
    reader = LaneReader(dataset, collate, seed)
    lanes = lane_ranges(schedule.num_lanes, world.world_size)[world.rank]
    loader = LaneLoader(
        reader,
        schedule,
        choose_order(num_samples, seed=seed, shuffle=data.shuffle),
        lanes,
        num_workers=data.num_workers,
        pin_memory=has_streams(world.device),
    )
    return loader, compare_datasets(reader, num_samples, world)


def count_samples(dataset: Any) -> int:
    """Return the length of a map-style dataset, or raise TaskError where it is none."""
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise TaskError(
            f"a dataset of the task must be map-style: got {type(dataset).__name__}. "
            "Lanes read samples by index, so it needs __len__ and __getitem__."
        )
    return len(dataset)


def compare_datasets(reader: LaneReader, num_samples: int, world: World) -> Fingerprint:
    """Return what a dataset is known by; raise where ranks see other ones.

    A difference would otherwise show as a hang or a wrong model. Collective: every rank must call this.
    """
    local = fingerprint(reader, num_samples)
    for rank, other in enumerate(world.all_gather_object(local)):
        if other != local:
            raise DataError(
                f"ranks {world.rank} and {rank} see different datasets: {local.num_samples} and "
                f"{other.num_samples} samples, digests of three samples {local.samples_digest} and "
                f"{other.samples_digest}. A dataset must be whole on every rank."
            )
    return local
