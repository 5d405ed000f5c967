"""Gives results of fake tensors the sizes that real ones have, where torch's fake kernels make them smaller.

oneDNN's LSTM keeps a workspace for its backward, for which the fake kernel returns a tensor without elements;
the mean of `mse_loss` keeps the memory of the losses that it was taken of. Of all operators that torch tests,
only such small results are too small. So an operator with a new result of no or one element, from larger
tensors, runs once on real ones.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lanewise.processes.device.free_memory import free_bytes
from lanewise.processes.device.live_storage import key_of

_CPU = torch.device("cpu")
_WORKSPACE = 16
"""How many times as large as all that is known of an operator its workspace may be; an LSTM's was up to 15
times as large."""


@final
class RealSizes(TorchDispatchMode):
    """While it is active, small results of operators on fake tensors get the sizes of real ones.

    Enter it inside of a `FakeTensorMode`, and inside of it what looks at the sizes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.not_counted: set[str] = set()
        """Operators that could not be run, or need more memory than is free."""
        self._sizes: dict[tuple[object, ...], Sequence[int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and make what is too small as large as it would be."""
        made = function(*args, **(kwargs or {}))
        results = _fakes_in(made)
        if not any(map(_is_small, results)):
            return made
        given = _fakes_in((args, kwargs))
        earlier = {key_of(fake.untyped_storage()) for fake in given}
        are_new = [key_of(result.untyped_storage()) not in earlier for result in results]
        if any(are_new) and not all(map(_is_small, given)):
            sizes = self._sizes_of(function, (args, kwargs or {}), [*given, *results])
            for result, is_new, size in zip(results, are_new, sizes, strict=False):
                if is_new and _is_small(result):
                    result.untyped_storage().resize_(size)
        return made

    def _sizes_of(self, function: Any, inputs: Any, known: Sequence[torch.Tensor]) -> Sequence[int]:
        """Return the bytes of each tensor that an operator makes; none if that cannot be found out."""
        described = tree_map_only(FakeTensor, lambda fake: (fake.size(), fake.stride(), fake.dtype), inputs)
        key = (function, torch.is_grad_enabled(), repr(described))
        if key not in self._sizes:
            self._sizes[key] = ()
            sizes = [fake.untyped_storage().nbytes() for fake in known]
            needed, free = sum(sizes) * (2 if all(sizes) else 1 + _WORKSPACE), free_bytes(_CPU, 1)
            try:
                if free is not None and needed > free:
                    raise MemoryError
                self._sizes[key] = _run_real(function, inputs)
            except Exception:  # noqa: BLE001 - it may be the user's
                self.not_counted.add(str(function))
        return self._sizes[key]


def _run_real(function: Any, inputs: Any) -> Sequence[int]:
    with unset_fake_temporarily():
        args, kwargs = tree_map_only(FakeTensor, _real, inputs)
        made = function(*args, **kwargs)
        return [
            leaf.untyped_storage().nbytes() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)
        ]


def _real(fake: torch.Tensor) -> torch.Tensor:
    """Make a real tensor of zeros like a fake one, whose elements may share memory, as expanded ones do."""
    steps = (max(0, size - 1) * stride for size, stride in zip(fake.size(), fake.stride(), strict=True))
    return torch.zeros(1 + sum(steps), dtype=fake.dtype).as_strided(fake.size(), fake.stride())


def _fakes_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, FakeTensor)]


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() <= tensor.element_size()
