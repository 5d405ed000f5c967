"""What a pass over a loader read, and how one process reads the samples of several.

Whatever reads a sample or collates a batch begins with the same random numbers each time: what it draws does
not depend on the process.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch.utils.data import Subset

SEED = 1234
MOST_DIGESTS = 10_000
"""Samples of a pass over a loader that are identified by their content as well."""


def digest(value: Any) -> str:
    """Return a hash of what a sample, or a state of random numbers, consists of."""
    found = hashlib.blake2b(digest_size=12)
    for name, leaf in leaves(value):
        found.update(name.encode())
        if isinstance(leaf, torch.Tensor):
            found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            elements = leaf.detach().cpu().contiguous().reshape(-1)
            found.update(elements.view(torch.uint8).numpy().tobytes())
        else:
            found.update(pickle.dumps(leaf))
    return found.hexdigest()


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what a nested value consists of, each with its name."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {part.name: getattr(value, part.name) for part in fields(value)}
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from leaves(part, f"{name}[{number}]")
    else:
        yield name, value


def rows_of(value: Any, dimension: int) -> list[str]:
    """Identify what enters a module by row, or by another dimension, in which all of its tensors are cut."""
    tensors = [leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor) and leaf.dim() > dimension]
    size = tensors[0].shape[dimension] if tensors else 0
    cut = [tensor for tensor in tensors if tensor.shape[dimension] == size]
    return [digest([tensor.select(dimension, number) for tensor in cut]) for number in range(size)]


def random_states() -> list[Any]:
    """Return the states of the generators that programs share on the CPU."""
    numpy = sys.modules.get("numpy")
    return [torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()]


@contextmanager
def same_draws() -> Iterator[None]:
    """Let a block draw the same numbers each time, and leave the generators as they were."""
    numpy = sys.modules.get("numpy")
    of_torch, of_python, of_numpy = random_states()
    torch.default_generator.manual_seed(SEED)
    random.seed(SEED)
    if numpy:
        numpy.random.seed(SEED)
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        if numpy and of_numpy:
            numpy.random.set_state(of_numpy)


@final
class SameDraws:
    """A dataset of which each sample is read with the same random numbers, whoever reads it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        with same_draws():
            return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        # pickle asks for the dataset before there is one; samples are read one by one
        if name in ("dataset", "__getitems__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


@dataclass
class Collate:
    """Collates with the same random numbers each time; where it draws, what each of several ranks read."""

    collate: Callable[[Any], Any]
    num_parts: int
    """How many ranks read what is collated; 1 but where one process reads what several did."""
    unmatched: Path
    """A file that says that what was drawn depends on the number of processes."""

    def __call__(self, samples: Any) -> Any:
        """Collate a batch."""
        with same_draws():
            before = digest(random_states()) if self.num_parts > 1 else ""
            batch = self.collate(samples)
            if self.num_parts == 1 or digest(random_states()) == before:
                return batch
        size, rest = divmod(len(samples), self.num_parts)
        parts = []
        for begin in range(0, len(samples), size) if size and not rest else ():
            with same_draws():
                parts.append(self.collate(samples[begin : begin + size]))
        joined = None
        with suppress(TypeError, KeyError, ValueError, RuntimeError):  # it is not made of its parts alone
            joined = join(parts) if parts else None
        if joined is None:
            self.unmatched.touch()
            return batch
        return joined


def join(parts: list[Any]) -> Any:
    """Concatenate batches of the same form; None where they cannot be."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        is_possible = first.dim() and all(part.shape[1:] == first.shape[1:] for part in parts)
        return torch.cat(parts) if is_possible else None
    if isinstance(first, Mapping):
        joined = {key: join([part[key] for part in parts]) for key in first}
        is_possible = all(value is not None for value in joined.values())
        return type(first)(joined) if is_possible else None  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)):
        columns = [join(list(column)) for column in zip(*parts, strict=True)]
        return None if any(column is None for column in columns) else type(first)(columns)
    return None


def counts_of(batch: Any) -> dict[str, int]:
    """Count what a mean over a batch may be divided by: rows, targets, what is no padding."""
    found: dict[str, int] = {}
    for name, leaf in leaves(batch):
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            continue
        found.setdefault("samples", len(leaf))
        found[f"{name} that are not 0"] = int((leaf != 0).sum())
        if not leaf.is_floating_point():
            found[f"{name} that are not -100"] = int((leaf != -100).sum())
            rest = leaf[:, 1:] if leaf.dim() > 1 else leaf
            found[f"{name} that are not -100, but for the first of each row"] = int((rest != -100).sum())
    return found


@dataclass
class LoaderPass:
    """A pass over a loader."""

    dataset: Any
    is_stream: bool
    first_update: int
    """The number of updates before it."""
    num_batches: int = 0
    """How many the loader has; 0 where it does not know."""
    indices: list[Any] = field(default_factory=list)
    """Those of each batch that was asked for, as the loader's sampler gave them."""
    counts: list[dict[str, int]] = field(default_factory=list)
    """What `counts_of` says of the first batches that were given out."""
    num_taken: int = 0
    is_ended: bool = False
    reshuffles: bool = False
    """Whether its sampler shuffles anew where it is told the epoch, by `set_epoch`."""
    is_training: bool = False
    """Whether a backward followed one of its batches."""
    _places: dict[Any, Any] = field(default_factory=dict)

    def resolve(self, index: Any) -> Any:
        """Return the place of a sample in the dataset that subsets choose from."""
        dataset = self.dataset
        while isinstance(dataset, Subset):
            index, dataset = dataset.indices[index], dataset.dataset
        return int(index) if hasattr(index, "__index__") else repr(index)

    @property
    def whole_dataset(self) -> Any:
        """The dataset that subsets choose from."""
        dataset = self.dataset
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        return dataset

    def places(self, *, is_by_content: bool) -> Mapping[Any, Any]:
        """Return the index of each sample by its place in the whole dataset, or by its content."""
        if not self._places:
            identify = self.digest if is_by_content else self.resolve
            self._places = {identify(index): index for index in range(len(self.dataset))}
        return self._places

    def look_like(self) -> list[Any]:
        """Describe the dataset, so that it can be told from others: class, length, and some samples."""
        dataset = self.whole_dataset
        length = len(dataset) if hasattr(dataset, "__len__") else -1
        places = sorted({0, length // 2, length - 1}) if length > 0 else []
        return [type(dataset).__name__, length, *(digest(SameDraws(dataset)[place]) for place in places)]

    def digest(self, index: Any) -> str:
        """Identify a sample by its content."""
        return digest(SameDraws(self.dataset)[index])

    def note(self) -> dict[str, Any]:
        """Return what is known of this pass."""
        noted = {
            "is_training": self.is_training,
            "is_ended": self.is_ended,
            "is_stream": self.is_stream,
            "is_evaluation": self.is_ended and not self.is_training and not self.is_stream,
            "reshuffles": self.reshuffles,
            "first_update": self.first_update,
            "counts": self.counts,
        }
        if self.is_stream:
            return noted
        taken = [list(batch) for batch in self.indices[: self.num_taken]]
        num_digests = 0 if sum(map(len, taken)) > MOST_DIGESTS else len(taken)
        return {
            **noted,
            "dataset": self.look_like(),
            "length": len(self.dataset) if hasattr(self.dataset, "__len__") else -1,
            "samples": [[self.resolve(index) for index in batch] for batch in taken],
            "digests": [[self.digest(index) for index in batch] for batch in taken[:num_digests]],
        }
