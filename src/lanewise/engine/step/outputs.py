"""What the lanes of a step returned, as one batch on every process, with the samples in lane order."""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lanewise.engine.step.rows import gather_rows, row_bytes
from lanewise.errors import MOST_SHOWN, TaskError
from lanewise.processes.device.nested import map_leaves, structure, tensors_in
from lanewise.processes.world.world import World

_NONE, _UNEQUAL = 0, -1
"""Signatures of a process without samples, and of one whose own lanes differ."""


@dataclass(frozen=True)
class LaneOutputs:
    """What a lane returned for its samples: a tensor, or several in nested containers."""

    lane: int
    num_samples: int
    values: Any
    """Each tensor has the samples as its first dimension."""

    @property
    def form(self) -> str:
        """What must be equal in all lanes: everything but the number of samples."""
        return f"{structure(self.values)} of {', '.join(map(self._describe, tensors_in(self.values)))}"

    def _describe(self, tensor: torch.Tensor) -> str:
        is_right = tensor.shape[:1] == (self.num_samples,)
        shape = [
            "samples" if is_right else f"{size} of {self.num_samples} samples" for size in tensor.shape[:1]
        ]
        shape += [str(size) for size in tensor.shape[1:]]
        trained = " with a gradient" if tensor.requires_grad else ""
        return f"[{', '.join(shape)}] {str(tensor.dtype).removeprefix('torch.')}{trained}"

    @property
    def fits(self) -> bool:
        """Whether each tensor has an entry for each sample."""
        return all(tensor.shape[:1] == (self.num_samples,) for tensor in tensors_in(self.values))


class BatchOutputs(NamedTuple):
    """The outputs of all lanes of a step."""

    values: Any
    """What each lane returned, with the samples of all lanes in lane order, and without a graph. None where
    this process has nothing that tells what others return."""
    rows: Mapping[int, slice]
    """Which samples are of which lane; lanes without samples are not there."""
    num_samples: int
    num_gradients: int
    """How many numbers a loss gives gradients for; known to every process, as is their type."""
    gradient_dtype: torch.dtype

    def with_gradients(self) -> list[torch.Tensor]:
        """Return the tensors for which the loss gives gradients."""
        return [tensor for tensor in tensors_in(self.values) if tensor.requires_grad]

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return flat gradients as those of `with_gradients`."""
        reals = [as_real(tensor.detach()) for tensor in self.with_gradients()]
        parts = flat.split([real.numel() for real in reals]) if reals else ()
        parts = [part.view(real.shape).to(real.dtype) for part, real in zip(parts, reals, strict=True)]
        return [
            torch.complex(*part.unbind(-1)) if tensor.is_complex() else part
            for part, tensor in zip(parts, self.with_gradients(), strict=True)
        ]


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of real numbers as it is, and a complex one as pairs of real numbers."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


class _Header(NamedTuple):
    """What each process says of its lanes before their outputs travel."""

    signature: int
    row_bytes: int
    """Bytes of one sample's outputs."""
    num_gradients: int
    """How many numbers of one sample's outputs have a gradient; negative if one of them is float64."""
    rows: list[tuple[int, int]]
    """The number of each lane that has samples, and how many it has."""

    def encode(self, most_lanes: int) -> torch.Tensor:
        flat = [number for row in self.rows for number in row] + [-1] * 2 * (most_lanes - len(self.rows))
        return torch.tensor([*self[:3], *flat], dtype=torch.int64)

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> "_Header":
        signature, row_bytes, num_gradients, *flat = numbers
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return cls(signature, row_bytes, num_gradients, [(lane, size) for lane, size in pairs if lane >= 0])


def gather_outputs(local: Sequence[LaneOutputs], step: int, world: World, most_lanes: int) -> BatchOutputs:
    """Gather the outputs of all lanes of a step. Collective: every rank must call this.

    Nothing but a header travels where they do not fit together.

    Args:
        local: of this process's lanes, in lane order. Where none has samples, the first one tells the form.
        step: for errors.
        world: the processes.
        most_lanes: the largest number of lanes that any process carries.

    Raises:
        TaskError: on every rank, if an output does not have an entry for each sample of its lane, or differs
            between lanes in anything but the number of samples.
    """
    local = [of_lane for of_lane in local if of_lane.num_samples] or local[:1]
    forms = {of_lane.form if of_lane.fits else None for of_lane in local}
    rows = [(of_lane.lane, of_lane.num_samples) for of_lane in local if of_lane.num_samples]
    own = _Header(_signature(forms), 0, 0, rows)
    if own.signature > 0:
        row_bytes, num_gradients = _sizes(local[0])
        own = own._replace(row_bytes=row_bytes, num_gradients=num_gradients)
    gathered = world.start_all_gather_to_host(own.encode(most_lanes).to(world.device))()
    headers = [_Header.decode(numbers) for numbers in gathered.tolist()]
    signatures = {header.signature for header in headers} - {_NONE}
    if len(signatures) > 1 or _UNEQUAL in signatures:
        _refuse(local, step, world)
    starts, start = {}, 0
    for lane, size in (row for header in headers for row in header.rows):
        starts[lane] = slice(start, start + size)
        start += size
    everything = list(_join(local, world.device))
    if world.world_size > 1 and start:
        sizes = [sum(size for _, size in header.rows) for header in headers]
        num_rows = [[size] * len(everything) for size in sizes]
        most_bytes = max(sizes) * max(header.row_bytes for header in headers)
        everything = gather_rows(everything, num_rows, most_bytes, world)
    num_gradients = max((header.num_gradients for header in headers), key=abs) * start
    dtype = torch.float64 if num_gradients < 0 else torch.float32
    if not local:
        return BatchOutputs(None, starts, start, abs(num_gradients), dtype)
    joined = iter(everything)

    values = map_tensors(lambda tensor: next(joined).requires_grad_(tensor.requires_grad), local[0].values)
    return BatchOutputs(values, starts, start, abs(num_gradients), dtype)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """Apply a function to the tensors of what a lane gives to its loss.

    Raises:
        TaskError: if there is an object that is neither a tensor nor a container of them.
    """

    def put(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if isinstance(leaf, MutableMapping):  # with a `.to` of its own, as a tokenizer's BatchEncoding
            made = copy.copy(leaf)
            made.update({key: map_leaves(put, value) for key, value in leaf.items()})
            return made
        raise TaskError(
            f"what a lane gives to its loss has an object of type {type(leaf).__qualname__}, whose samples "
            "cannot be separated. Give tensors whose first dimension is the samples, in lists, tuples, "
            "dicts or dataclasses."
        )

    return map_leaves(put, values)


def _signature(forms: set[str | None]) -> int:
    if not forms:
        return _NONE
    form = forms.pop()
    if forms or form is None:
        return _UNEQUAL
    return int.from_bytes(hashlib.blake2b(form.encode(), digest_size=7).digest(), "big") + 1


def _sizes(outputs: LaneOutputs) -> tuple[int, int]:
    """Return what a header tells of one sample's outputs: its bytes, and how many numbers have a gradient."""
    tensors = list(tensors_in(outputs.values))
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    sign = -1 if any(tensor.dtype in (torch.float64, torch.complex128) for tensor in trained) else 1
    return sum(map(row_bytes, tensors)), sign * sum(as_real(tensor).shape[1:].numel() for tensor in trained)


def _join(local: Sequence[LaneOutputs], device: torch.device) -> Iterator[torch.Tensor]:
    """Yield each tensor of the outputs for the samples of all lanes, contiguous as after an exchange.

    With other strides, as those of channels_last, a loss may add in another order.
    """
    for of_lanes in zip(*(tensors_in(of_lane.values) for of_lane in local), strict=True):
        yield torch.cat([tensor.detach().to(device) for tensor in of_lanes]).contiguous()


def _refuse(local: Sequence[LaneOutputs], step: int, world: World) -> None:
    """Raise TaskError about outputs that do not fit together. Collective."""
    described = [
        f"  lane {lane}: {form}"
        for of_rank in world.all_gather_tree([(of_lane.lane, of_lane.form) for of_lane in local])
        for lane, form in of_rank
    ]
    different = list({line.partition(": ")[2]: line for line in reversed(described)}.values())[::-1]
    listed = "\n".join(different[:MOST_SHOWN])
    raise TaskError(
        f"the outputs of the lanes of step {step + 1} do not make one batch:\n{listed}\n"
        "The first dimension of each output must be the lane's samples, and everything else must be equal in "
        "all lanes: pad to a fixed size."
    )
