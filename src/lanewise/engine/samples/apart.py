"""Finds what training and evaluation share and must not: samples of a split, or the position of a stream."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Subset

from lanewise.data import LaneReader, StreamReader, digest, read_first
from lanewise.data.source import SourceReader
from lanewise.errors import DataError, TaskError, noting

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
