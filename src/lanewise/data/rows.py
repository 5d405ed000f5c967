"""Rows of a table: a sequence of dicts, and the columns as tensors."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final, overload

import numpy as np
import numpy.typing as npt
import torch

from lanewise.data.sequences import Ragged
from lanewise.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


@final
class Rows(Sequence[dict[str, Any]]):
    """Rows of a table, as dicts from column to value, which are made when they are asked for.

    A number, a bool, a text or bytes becomes Python's own type, a list of numbers a tensor, a list of such
    lists a list of tensors, a null None, and anything else, such as a struct, what pyarrow converts it to.

    Args:
        pieces: the rows, in pieces of any length; they are copied.
        schema: the columns, with their types.
        numbers: [num_rows], with the columns that the pieces lack as fields; None if they lack none.
    """

    def __init__(
        self,
        pieces: Sequence["pa.RecordBatch"],
        schema: "pa.Schema",
        numbers: npt.NDArray[np.void] | None = None,
    ) -> None:
        import pyarrow as pa  # noqa: PLC0415 - of an extra

        self._others: pa.RecordBatch = (
            pa.concat_batches(pieces) if pieces else pa.RecordBatch.from_pylist([], schema)
        )
        self._schema = schema
        self._numbers = np.empty(self._others.num_rows, []) if numbers is None else numbers

    @property
    def columns(self) -> "Columns":
        """The columns by name, each as a tensor where it can be."""
        return Columns(self._others, self._numbers, self._schema.names)

    def take(self, indices: Iterable[int]) -> "Rows":
        """Return some of the rows, in this order."""
        chosen = list(indices)
        pieces = [self._others.slice(index, 1) for index in chosen] if self._others.num_columns else []
        return Rows(pieces or [self._others.slice(0, 0)], self._schema, self._numbers[chosen])

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> "Rows": ...
    def __getitem__(self, index: int | slice) -> "dict[str, Any] | Rows":
        chosen = range(len(self))[index]
        if isinstance(chosen, range):
            return self.take(chosen)
        numbers = dict(zip(self._numbers.dtype.names or (), self._numbers[chosen].item(), strict=True))
        return {
            name: numbers[name] if name in numbers else _item(self._others.column(name)[chosen], name)
            for name in self._schema.names
        }


@final
class Columns(Mapping[str, Any]):
    """Columns by name. Each is made when it is asked for, and has memory of its own.

    Numbers and bools become a tensor [num_rows], lists of a fixed length a tensor [num_rows, length], other
    lists of numbers `Ragged`, and anything else a list, in which a null is None.

    Args:
        others: columns as pyarrow has them.
        numbers: [num_rows], with the other columns as fields.
        names: the names of all columns, in their order.

    Raises:
        DataError: if a column is asked for that has a null among its numbers or lists.
    """

    def __init__(self, others: "pa.RecordBatch", numbers: npt.NDArray[np.void], names: Sequence[str]) -> None:
        self._others = others
        self._numbers = numbers
        self._names = names

    def __getitem__(self, name: str) -> Any:
        if name in (self._numbers.dtype.names or ()):
            return torch.from_numpy(self._numbers[name].copy())
        column = self._others.column(name)
        return _tensors(column, name) if _is_numeric(column.type) else column.to_pylist()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def is_number(kind: "pa.DataType") -> bool:
    """Tell whether values are numbers or bools."""
    from pyarrow import types  # noqa: PLC0415 - of an extra

    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_numeric(kind: "pa.DataType") -> bool:
    """Tell whether values are numbers or bools, or lists of such, or lists of lists of such."""
    from pyarrow import types  # noqa: PLC0415 - of an extra

    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    return is_number(kind)


def _tensors(values: "pa.Array", column: str) -> torch.Tensor | Ragged:
    """Copy numbers, or lists of numbers, to tensors.

    Raises:
        DataError: if there is a null.
    """
    import pyarrow as pa  # noqa: PLC0415 - of an extra

    if values.null_count:
        raise DataError(
            f"Column {column!r} has nulls in these rows ({values.null_count}), and a tensor has none. Fill "
            "them when the files are written, leave the column out, or collate the rows as dicts, where a "
            "null is None."
        )
    if isinstance(values, pa.ListArray | pa.LargeListArray):
        offsets = values.offsets.to_numpy()
        inner = values.values.slice(offsets[0], offsets[-1] - offsets[0])
        starts = torch.from_numpy(np.subtract(offsets, offsets[0], dtype=np.int64))
        return Ragged(_tensors(inner, column), starts)
    if isinstance(values, pa.FixedSizeListArray):
        flat = _tensors(values.flatten(), column)
        assert isinstance(flat, torch.Tensor)
        return flat.reshape(len(values), values.type.list_size, *flat.shape[1:])
    return torch.from_numpy(np.array(values.to_numpy(zero_copy_only=False)))


def _item(value: "pa.Scalar", column: str) -> Any:
    """Return one value of a row."""
    if not value.is_valid or not _is_numeric(value.type) or not hasattr(value, "values"):
        return value.as_py()
    values = value.values
    if hasattr(values.type, "value_type"):
        return [_item(inner, column) for inner in values]
    return values.to_pylist() if values.null_count else _tensors(values, column)
