"""Counts the bytes of tensors that are alive, on real tensors as on fake ones."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@final
class LiveStorage(TorchDispatchMode):
    """While it is active, counts each storage that an operation makes, from then until nobody holds it.

    What kernels allocate for themselves, and give back before they return, is not seen, nor what `resize_`
    of a storage frees, by which FSDP frees what it gathered. Enter it inside of a `FakeTensorMode`, if there
    is one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        """The most after any operation, since the beginning or since `take_peak`."""
        self._sizes: dict[int, int] = {}

    def take_peak(self) -> int:
        """Return the peak, and forget it: the next operation sets it anew."""
        peak, self.peak_bytes = self.peak_bytes, 0
        return peak

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were made before."""
        for tensor in tensors:
            self._note(tensor.untyped_storage())

    def note_size(self, storage: torch.UntypedStorage) -> None:
        """Take the size of a storage that may have changed without an operation."""
        key = key_of(storage)
        if key in self._sizes:
            size = storage.nbytes()
            self.live_bytes += size - self._sizes[key]
            self._sizes[key] = size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count what it made, unless that is a view of what is not counted."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor, say: its parts come here
        given = {key_of(storage): storage for storage in _storages_in((args, kwargs))}
        made = function(*args, **(kwargs or {}))
        for storage in given.values():
            self.note_size(storage)
        for storage in _storages_in(made):
            if key_of(storage) not in given:
                self._note(storage)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = key_of(storage)
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key).atexit = False
        self.note_size(storage)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)


def key_of(storage: torch.UntypedStorage) -> int:
    """Return a key that all tensors of one storage share, and no tensors of another living one."""
    return int(storage._cdata)  # noqa: SLF001 - fake storages all have the data pointer 0


def _storages_in(values: Any) -> Iterator[torch.UntypedStorage]:
    return (tensor.untyped_storage() for tensor in tree_leaves(values) if isinstance(tensor, torch.Tensor))
