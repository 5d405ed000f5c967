"""Turns nested values into strict JSON and a flat set of tensors, and back; what is decoded cannot run code.

Checkpoints are written so, and messages between processes. What JSON lacks has one encoding each:

    tensor                     {"$tensor": "optimizer/state/weight/exp_avg"}      its name among the tensors
    complex tensor             {"$complex": "model/weight"}                       as pairs of real numbers
    sharded tensor             {"$shards": [["model/weight@0", 0], ["model/weight@128", 128]]}
                               the name and the first row of each process's part
    nan, inf, -inf             {"$float": "nan"}
    tuple                      {"$tuple": [1, 2]}
    keys that are no text      {"$items": [[30, 1], [80, 1]]}
    collections.Counter        {"$counter": [[30, 1], [80, 1]]}                   MultiStepLR has one

A mapping that has a key of that kind itself is written as `$items`.
"""

import math
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, final

import torch

from lanewise.errors import CheckpointError, LanewiseError
from lanewise.processes.world.shards import HeldTensor, is_cut_by_rows, is_sharded, row_ranges

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls them."""
_TAGS = {"$tensor", "$complex", "$shards", "$float", "$tuple", "$items", "$counter"}


@final
class TensorTable(dict[str, torch.Tensor]):
    """Tensors by name. Tensors that view the same elements of one storage occur once, by their first name.

    Args:
        error: what is raised for a value that cannot be encoded.
        done: what cannot be done with such a value, as the error says it.
    """

    def __init__(self, error: type[LanewiseError] = CheckpointError, done: str = "saved") -> None:
        self._error = error
        self._done = done
        self._first_names: dict[tuple[object, ...], str] = {}
        self._taken: set[str] = set()
        self.held: set[str] = set()
        """The names of tensors that only this process has: its parts of sharded tensors, and held tensors.
        The other tensors are equal on all ranks."""

    def add(self, name: str, tensor: torch.Tensor) -> str:
        """Add a tensor, and return its name in the table."""
        first = self._name(name, tensor)
        self.setdefault(first, tensor)
        return first

    def add_held(self, name: str, tensor: torch.Tensor) -> str:
        """Add a held tensor on the rank that has it; return its name, which every rank knows."""
        self._require_encodable(name, tensor)
        name = self._reserve(name)
        if not tensor.is_meta:
            self.held.add(name)
            self[name] = tensor
        return name

    def add_param_shard(self, name: str, tensor: Any) -> list[list[object]]:
        """Add this process's rows of a sharded tensor; return name and first row of every process's part."""
        if not is_cut_by_rows(tensor):
            raise self.refusal(
                name,
                f"spread over processes as {tensor.placements}, not by rows, as parameters under fsdp are",
            )
        local = tensor.to_local()
        first = self._name(name, local)
        ranges = row_ranges(tensor)
        written = [rows for rows in ranges if rows] or ranges[:1]
        rank = tensor.device_mesh.get_local_rank()
        local_rows = ranges[rank]
        if local_rows or rank == 0:
            self.held.add(f"{first}@{local_rows.start}")
            self.setdefault(f"{first}@{local_rows.start}", local)
        return [[f"{first}@{rows.start}", rows.start] for rows in written]

    def _name(self, name: str, tensor: torch.Tensor) -> str:
        """Return a name that is free, or that of the tensor if it is there."""
        self._require_encodable(name, tensor)
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and view in self._first_names:
            return self._first_names[view]
        self._first_names[view] = self._reserve(name)
        return self._first_names[view]

    def refusal(self, name: str, what: str) -> LanewiseError:
        """Return the error for a value that cannot be encoded.

        Args:
            name: of the value.
            what: what it is.
        """
        return self._error(
            f"{name} cannot be {self._done}: it is {what}. "
            "Tensors, numbers, text, and lists and mappings of them can."
        )

    def _require_encodable(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.dtype not in DTYPES:
            raise self.refusal(name, f"a {tensor.layout} tensor of {tensor.dtype}")

    def _reserve(self, name: str) -> str:
        """Return a name that is free, and take it."""
        while name in self._taken:  # keys may be spelled alike: 1 and "1"
            name += "~"
        self._taken.add(name)
        return name


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """View a complex tensor as pairs of real numbers in an additional dimension, as the format lacks it."""
    return torch.view_as_real(tensor.resolve_conj())


def encode(value: Any, path: str, tensors: TensorTable) -> Any:
    """Return a value that JSON can hold, and add the tensors in it to a table.

    Args:
        value: numbers, text, None, tensors, held tensors, and lists, tuples and mappings of them.
        path: how to name the value: tensors below it get names that begin with it.
        tensors: receives the tensors, as they are.

    Raises:
        LanewiseError: the table's, which names the first value that cannot be encoded.
    """
    if is_sharded(value):
        return {"$shards": tensors.add_param_shard(path, value)}
    add = tensors.add
    if isinstance(value, HeldTensor):
        value, add = value.tensor, tensors.add_held
    if isinstance(value, torch.Tensor) and value.is_complex():
        return {"$complex": add(path, real_view(value))}
    if isinstance(value, torch.Tensor):
        return {"$tensor": add(path, value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Counter):
        return {"$counter": _encode_items(value, path, tensors)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not _TAGS & value.keys():
            return {key: encode(item, f"{path}/{key}", tensors) for key, item in value.items()}
        return {"$items": _encode_items(value, path, tensors)}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    raise tensors.refusal(path, f"a {type(value).__module__}.{type(value).__qualname__}")


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Undo `encode`.

    Raises:
        LookupError: if a tensor is missing or left over, or an encoding is not one of ours.
    """
    decoder = _Decoder(tensors)
    decoded = decoder.decode(value)
    if unused := sorted(tensors.keys() - decoder.used):
        raise LookupError(f"the state does not refer to the tensor {unused[0]:.80}")
    return decoded


@final
class _Decoder:
    """Decodes one state, and makes no tensor of it twice."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._joined: dict[tuple[str, ...], torch.Tensor] = {}
        """Sharded tensors that were put together again, by the names of their parts."""
        self.used: set[str] = set()
        """The names of tensors that the state refers to."""

    def decode(self, value: Any) -> Any:
        """Decode one value, and what is in it."""
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value), None)
        if tag not in _TAGS or len(value) != 1:
            return {key: self.decode(item) for key, item in value.items()}
        content = value[tag]
        try:
            if tag == "$tensor":
                return self._take(content)
            if tag == "$complex":
                return torch.view_as_complex(self._take(content))
            if tag == "$shards":
                return self._join([(name, start) for name, start in content])
            if tag == "$float":
                return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content]
            if tag == "$tuple":
                return tuple(self.decode(content))
            items = {self.decode(key): self.decode(item) for key, item in content}
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise LookupError(f"it holds {value!r:.80}, which is not a known encoding") from error
        return Counter(items) if tag == "$counter" else items

    def _take(self, name: str) -> torch.Tensor:
        self.used.add(name)
        return self._tensors[name]

    def _join(self, parts: list[tuple[str, int]]) -> torch.Tensor:
        """Put the parts of a sharded tensor together again: once, however often it is named."""
        names = tuple(name for name, _ in parts)
        if names not in self._joined:
            if len(set(names)) < len(names) or self.used & set(names):
                raise ValueError("some rows occur twice")
            tensors = [self._take(name) for name in names]
            starts = list(accumulate((len(tensor) for tensor in tensors), initial=0))
            if [start for _, start in parts] != starts[:-1]:
                raise ValueError("rows are missing")
            self._joined[names] = torch.cat(tensors)
        return self._joined[names]


def _encode_items(value: Mapping[Any, Any], path: str, tensors: TensorTable) -> list[list[Any]]:
    return [
        [encode(key, f"{path}/(key)", tensors), encode(item, f"{path}/{key}", tensors)]
        for key, item in value.items()
    ]
