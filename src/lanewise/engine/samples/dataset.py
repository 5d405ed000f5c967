"""Builds the loader of a process's lanes, after counting the dataset and comparing it between ranks.

It also finds what training and evaluation share and must not: samples of a split, or a stream's position.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, Subset

from lanewise.config import ORDERS, BatchConfig, DataConfig
from lanewise.config.check import nearest
from lanewise.data import (
    FileDataset,
    Fingerprint,
    LaneLoader,
    LaneReader,
    StreamReader,
    digest,
    fingerprint,
    read_first,
)
from lanewise.data.source import SourceReader
from lanewise.errors import ConfigError, DataError, TaskError, noting
from lanewise.lanes import BlockedOrder, OrderInputs, Placement, SampleOrder, Schedule
from lanewise.processes.device.accelerator import has_streams
from lanewise.processes.world.world import World
from lanewise.task import Task

logger = logging.getLogger(__name__)


Collate = Callable[[Any], Any]
Tables = Mapping[str, Callable[[], Any]]

_READ_FACTOR = 1.15
"""Warn where the bytes read exceed this multiple of the files. Lanes read their first and last block in part,
so a multiple of slightly more than 1 is normal."""


@dataclass(frozen=True)
class OrderChoice:
    """The choice of an order, made before the samples are known."""

    make: Callable[[OrderInputs], SampleOrder]
    spec: Mapping[str, Any]
    """The class of the order and its arguments except the inputs, as read back from JSON: part of the run's
    identity."""

    @classmethod
    def of(cls, make: "str | Callable[[OrderInputs], SampleOrder]") -> "OrderChoice":
        """Choose an order by name, by class, or by a `functools.partial` of a class with further arguments.

        Raises:
            ConfigError: if there is no order of that name.
        """
        chosen: Any = make
        if isinstance(make, str):
            if make not in ORDERS:
                near = nearest(make, ORDERS, cutoff=0.6)
                raise ConfigError(
                    f"order must be one of {', '.join(ORDERS)}, or a SampleOrder: got {make}."
                    + (f" Did you mean {near}?" if near else "")
                )
            chosen = resolve_name(ORDERS[make])
        named = chosen.func if isinstance(chosen, partial) else chosen
        known = {resolve_name(class_path): class_path for class_path in ORDERS.values()}
        class_path = known.get(named, f"{named.__module__}.{named.__qualname__}")
        arguments = chosen.keywords if isinstance(chosen, partial) else {}
        spec = json.loads(json.dumps({"class_path": class_path, "init_args": arguments}, default=str))
        return cls(chosen, spec)


def build_loader(
    reader: LaneReader,
    batch: BatchConfig,
    data: DataConfig,
    world: World,
    placement: Placement,
    *,
    order: OrderChoice | None = None,
    tables: Tables = MappingProxyType({}),
) -> LaneLoader:
    """Build the loader that reads the samples of this process's lanes. Collective: every rank must call this.

    Args:
        reader: reads the dataset, which is map-style, and equal on every rank.
        batch: sizes of the micro-batch and the global batch.
        data: loading, and whether to drop the partial last step.
        world: the processes.
        placement: which process carries which lanes.
        order: the order of the samples; None: the default order for the dataset.
        tables: functions that return the tables which an order may need, by name; see `OrderInputs`.

    Raises:
        ConfigError: if an argument of the order is out of its range.
        DataError: if the dataset is too small for one step, differs between ranks, or lacks a table that the
            order needs.
        TaskError: if the dataset is not map-style.
    """
    dataset: Any = reader.dataset
    num_samples = count_samples(dataset)
    choice = order or OrderChoice.of("blocked" if hasattr(dataset, "block_sizes") else "shuffled")
    schedule = Schedule(num_samples, batch.global_batch_size, batch.micro_batch_size, data.drop_last)
    if not schedule.steps_per_epoch:
        raise DataError(
            f"the training dataset is too small for one step: it has {num_samples} samples, a step takes "
            f"{batch.global_batch_size}" + (" and drop_last is set." if num_samples else ". Check its path.")
        )
    inputs = OrderInputs(schedule, reader.seed, {"block_sizes": _require_block_sizes(dataset), **tables})
    samples = choice.make(inputs)
    found = compare_datasets(reader, num_samples, world, inputs.used)
    if world.rank == 0:
        _describe(dataset, samples, data.num_workers, placement)
        if num_samples < batch.global_batch_size:
            logger.warning(
                "the training dataset has %d samples, less than batch.global_batch_size %d: an epoch is one "
                "step of all of them",
                num_samples,
                batch.global_batch_size,
            )
        if data.drop_last and (left_out := num_samples % batch.global_batch_size):
            # A DataLoader's leaves out less than a micro-batch.
            logger.info("drop_last leaves %d of %d samples out of each epoch", left_out, num_samples)
    return LaneLoader(
        reader,
        samples,
        placement.own,
        identity={**found._asdict(), "order": choice.spec, "drop_last": data.drop_last},
        num_workers=data.num_workers,
        pin_memory=data.pin_memory and has_streams(world.device),
    )


def _describe(dataset: Any, order: SampleOrder, num_workers: int, placement: Placement) -> None:
    """Log the cost of the order if blocks are read more than once or loader workers are idle."""
    if order.reads_blocks and num_workers > placement.most:
        logger.info("%d of %d loader workers are used: one for each lane", placement.most, num_workers)
    if not getattr(dataset, "reads_from_start", False):
        return
    if not order.reads_blocks:
        logger.warning(
            "%s takes rows from all over the files, which can only be read from the start of a block: each "
            "process reads nearly all files, and repeatedly if their rows don't fit into memory_mib. "
            "data.order blocked reads each block once.",
            type(order).__name__,
        )
    elif isinstance(order, BlockedOrder) and (factor := order.read_factor(placement.ranges)) > _READ_FACTOR:
        logger.warning(
            "the processes together read %.1f times the size of the files, as %d blocks of rows are few for "
            "%d lanes: a block that two processes share is read by both. Write more and smaller blocks.",
            factor,
            order.num_blocks,
            order.schedule.num_lanes,
        )


def eval_datasets_of(task: Task) -> Mapping[str, Dataset[Any]]:
    """Return a task's eval datasets; raise TaskError if they have no names."""
    datasets: object = task.eval_datasets()
    if not isinstance(datasets, Mapping):
        raise TaskError(
            f"{type(task).__name__}.eval_datasets must return datasets by name: got a "
            f'{type(datasets).__name__}. Return a dict, such as {{"held_out": dataset}}.'
        )
    return datasets


def count_samples(dataset: Any) -> int:
    """Return the length of a dataset; raise TaskError if it is not map-style, or too long."""
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise TaskError(
            f"a dataset of the task must be map-style: got {type(dataset).__name__}. "
            "Lanes read samples by index from 0 on, so it needs __len__ and __getitem__(index)."
        )
    try:
        return len(dataset)
    except OverflowError as error:
        raise TaskError(
            f"{type(dataset).__name__}.__len__ must return 2**63 - 1 samples at most: {error}. Return "
            "how many samples an epoch has."
        ) from error


def compare_datasets(
    reader: LaneReader, num_samples: int, world: World, tables: Mapping[str, Any] = MappingProxyType({})
) -> Fingerprint:
    """Return the fingerprint of a dataset; raise DataError if it differs between ranks.

    A difference would otherwise show as a hang or a wrong model. Collective: every rank must call this.

    Args:
        reader: reads the dataset.
        num_samples: the length of the dataset.
        world: the processes.
        tables: the tables from which the order was made, by name.
    """
    local = fingerprint(reader, num_samples)._replace(tables_digest=digest(tables) if tables else "")
    of = "the files" if isinstance(reader.dataset, FileDataset) else "three samples"
    of_tables = f" and of {', '.join(tables)}" if tables else ""
    for rank, other in enumerate(Fingerprint(*told) for told in world.all_gather_tree(local)):
        if other != local:
            raise DataError(
                f"ranks {world.rank} and {rank} see different datasets: {local.num_samples} and "
                f"{other.num_samples} samples, digests of {of}{of_tables} "
                f"{_digests(local)} and {_digests(other)}. A dataset must be whole on every rank."
            )
    return local


def _digests(found: Fingerprint) -> str:
    return f"{found.samples_digest} {found.tables_digest}".strip()


def _require_block_sizes(dataset: Any) -> Callable[[], Any]:
    """Return a function that returns how many samples each block of a dataset has.

    If the dataset has no blocks, calling the function raises DataError.
    """

    def raise_error() -> Any:
        raise DataError(
            f"data.order blocked needs a dataset in blocks: {type(dataset).__name__} has no block_sizes(), "
            "which returns how many consecutive samples each block holds. Use the order shuffled."
        )

    return getattr(dataset, "block_sizes", raise_error)


_RARE = 1e-3
"""The probability below which it is no accident that a second split has samples of the first one alone."""


def require_apart(training: SourceReader, evaluated: Sequence[SourceReader]) -> None:
    """Make sure that the training dataset and those to evaluate on can be read side by side.

    Raises:
        DataError: if two Subsets of equal data were split in two ways, so that samples are in both.
        TaskError: if a stream that is read for two of the datasets keeps its position in itself.
    """
    for other in evaluated:
        _require_other_samples(training, other)
    seen = set()
    for reader in chain.from_iterable(source.streams() for source in (training, *evaluated)):
        stream = reader.dataset
        if id(stream) in seen and _keeps_its_position(reader):
            name = type(stream).__name__
            raise TaskError(
                f"a {name} is read for two datasets, or twice in one, and keeps its position in itself: "
                "whoever reads it moves the other to another sample. Let each call of __iter__ or iter_lane "
                "return an iterator with a position, and a state_dict, of its own; or make a stream for each."
            )
        seen.add(id(stream))


def _keeps_its_position(reader: StreamReader) -> bool:
    """Tell whether a stream that is opened a second time moves what is read of its first opening."""
    index = (0, read_first(reader).turn.lane)
    first, second = reader.anew(reader.lanes), reader.anew(reader.lanes)
    read = [opened[index] for opened in (first, first, second, first, second, second)]
    return digest(read[3].data, read[3].state) != digest(read[5].data, read[5].state)


def _require_other_samples(training: SourceReader, evaluated: SourceReader) -> None:
    """Raise DataError if both read Subsets of equal data, and some of their indices are equal.

    A Subset of the other one is what somebody means to evaluate on, or to train on. So is a part of what is
    trained on that two splits would hardly give, and any part of all data.
    """
    (base, trained), (other, chosen) = _indices(training.dataset), _indices(evaluated.dataset)
    if not (trained and chosen):
        return
    common = np.intersect1d(trained[-1], chosen[-1])
    is_meant = any(np.array_equal(indices, trained[-1]) for indices in chosen) or any(
        np.array_equal(indices, chosen[-1]) for indices in trained
    )
    num_trained, num_chosen = np.unique(trained[-1]).size, np.unique(chosen[-1]).size
    if common.size == num_chosen and not is_meant:
        is_meant = num_trained == len(base) or (num_trained / len(base)) ** num_chosen < _RARE
    if not common.size or is_meant:
        return
    readers = [LaneReader(data, list, training.seed, missing=training.missing) for data in (base, other)]
    looked_at = [index.item() for index in common[[0, common.size // 2, -1]]]
    with noting(lambda: f"when samples {looked_at} were read, to see whether two Subsets are of equal data"):
        digests = [digest(*(reader.read(0, (index,)) for index in looked_at)) for reader in readers]
    if digests[0] == digests[1]:
        raise DataError(
            f"{common.size} of {len(chosen[-1])} samples of the eval dataset {evaluated.eval_dataset} are "
            f"trained on, such as sample {looked_at[0]}: it and the training dataset are Subsets of equal "
            "data, and their indices meet. If train_dataset and eval_datasets both split it, they must split "
            "it alike: random_split(data, lengths, generator=torch.Generator().manual_seed(0)). Or split it "
            "once, where the task is made. A Subset of the training Subset may be evaluated on."
        )


def _indices(dataset: Any) -> tuple[Any, list[npt.NDArray[Any]]]:
    """Return the data of which a dataset is a Subset, and which indices each Subset takes of it.

    The last one is the dataset itself; there is none where it is no Subset.
    """
    if not isinstance(dataset, Subset):
        return dataset, []
    base, outer = _indices(dataset.dataset)
    own = np.asarray(dataset.indices)
    return base, [*outer, outer[-1][own] if outer else own]
