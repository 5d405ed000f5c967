"""A block that keeps only its inputs: its forward runs again when the backward comes to it.

This is activation checkpointing (Chen et al., "Training Deep Nets with Sublinear Memory Cost",
https://arxiv.org/abs/1604.06174), by torch's own `checkpoint`. The second run has the random numbers and the
buffers of the first one, so that gradients are the same bytes.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError, checkpoint

from lanewise.data.digest import digest
from lanewise.errors import TaskError, text_of
from lanewise.lanes import PROGRESS
from lanewise.processes.device.random_state import kept_random_state, take_random_state

# The backwards of replicas run in threads, one for each device, and the generators are the process's.
_one_at_a_time = threading.RLock()

_REMEDY = "or name other blocks in memory.activation_checkpointing.blocks"
_TOLERANCE = 1e-2
"""How much norms of both runs may differ where the device adds in any order: some roundings of 16 bits."""

_Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
_Fingerprint: TypeAlias = Sequence[str | float]
"""What is remembered of values: digests and norms."""


@final
@dataclass(eq=False)
class Checkpointed:
    """Replaces the `forward` of a block. A copy of the model has copies of it."""

    name: str
    module: nn.Module
    forward: Callable[..., Any]
    """What the module's forward was."""
    offload: bool
    """Whether the inputs are kept in the memory of the host."""
    compares: bool = True
    """Whether what both runs get and return is compared."""

    def compare(self, *, is_on: bool) -> None:
        """Say whether both runs are compared from here on."""
        self.compares = is_on

    @_disable_dynamo  # is torch.compiler.disable, which would take seconds here, at its first call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; where gradients are recorded, keep only its inputs."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        call = _Call(self, (args, kwargs), spec)
        with saved_tensors_hooks(_to_host, _to_device) if self.offload else nullcontext():
            return checkpoint(
                call.run,
                *leaves,  # torch notices if these are changed in place; it would not with keywords
                use_reentrant=False,
                early_stop=False,  # else what follows the last saved tensor would not run
                preserve_rng_state=False,  # the second run sets it by itself
            )

    def __str__(self) -> str:
        return f"{self.name}, a {type(self.module).__name__},"


def compare_runs(modules: Iterable[nn.Module], *, is_on: bool) -> None:
    """Say whether all blocks in some modules compare their two runs, which takes time."""
    for root in modules:
        for module in root.modules():
            if isinstance(module.forward, Checkpointed):
                module.forward.compare(is_on=is_on)


@final
class _Call:
    """A call of a block, and the state of the process in which it was made.

    The second run may come more than once: where a graph is retained, or where the block itself takes a
    gradient.

    Args:
        block: the block that is called.
        arguments: its arguments.
        spec: how these are made of their leaves.
    """

    def __init__(self, block: Checkpointed, arguments: _Arguments, spec: TreeSpec) -> None:
        self._block = block
        self._spec = spec
        self._arguments: _Arguments | None = arguments
        """What the first run gets, which may put something into a list or a dict of the caller's."""
        self._compares = block.compares
        self._fingerprints: dict[str, _Fingerprint] = {}
        """What the first run got and returned looks like, by what to say if the second run's differ."""
        self._set_random_state, self._progress = take_random_state(), PROGRESS.get()
        modules = list(block.module.modules())
        self._parameters = [
            (module._parameters, *item) for module in modules for item in module._parameters.items()
        ]
        self._buffers = [
            (module._buffers, name, buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def run(self, *leaves: Any) -> Any:
        """Run the forward, the first time with the caller's own arguments."""
        arguments, self._arguments = self._arguments, None
        args, kwargs = arguments or tree_unflatten(leaves, self._spec)
        with self._first_run() if arguments else self._second_run():
            self._compare(_OTHER_INPUTS, args, kwargs)
            returned = self._block.forward(*args, **kwargs)
            self._compare(_OTHER_OUTPUTS, args, kwargs, returned)
        return returned

    @contextmanager
    def _first_run(self) -> Iterator[None]:
        """Let torch's errors name the block: those of this run, and of asking for what it saved."""
        pack, unpack = _torchs_hooks()

        def unpack_or_name(holder: Any) -> torch.Tensor:
            try:
                return unpack(holder)
            except CheckpointError as error:
                (said, *_) = text_of(error).removeprefix("torch.utils.checkpoint: ").splitlines()
                raise TaskError(
                    f"{self._block} could not run again for its backward: {said} Activation checkpointing "
                    "needs a forward that depends on its inputs, buffers and random numbers alone: on no "
                    f"cache and no counter. Switch its cache off (use_cache=False), {_REMEDY}."
                ) from error
            except RuntimeError as error:
                if "modified by an inplace operation" not in text_of(error):
                    raise
                raise TaskError(
                    f"an input of {self._block} was changed in place after the block took it, so the block "
                    f"cannot be computed again. Write x = x + y instead of x += y. torch says: {error}"
                ) from error

        with saved_tensors_hooks(pack, unpack_or_name):
            try:
                yield
            except RuntimeError as error:
                if "don't yet support saved tensor hooks" not in text_of(error):
                    raise
                raise TaskError(
                    f"{self._block} takes a gradient by torch.func, which torch refuses in a block that runs "
                    f"again. Use torch.autograd.grad(..., create_graph=True), {_REMEDY}."
                ) from error

    @contextmanager
    def _second_run(self) -> Iterator[None]:
        """Give the block the buffers and random numbers of the first run, and undo what it does to them."""
        self._require_own_weights()
        PROGRESS.set(self._progress)  # in autograd's thread
        with _one_at_a_time, kept_random_state(), self._saving_for_the_first_run():
            self._set_random_state()
            current = [(buffers, name, buffers[name]) for buffers, name, _ in self._buffers]
            try:
                for buffers, name, earlier in self._buffers:
                    buffers[name] = earlier.clone()
                yield
            finally:
                for buffers, name, buffer in current:
                    buffers[name] = buffer

    @contextmanager
    def _saving_for_the_first_run(self) -> Iterator[None]:
        """Save what the backward of the first run needs; the graph of the second run keeps nothing itself."""
        pack, _ = _torchs_hooks()
        saved: list[torch.Tensor] = []

        def save(tensor: torch.Tensor) -> int:
            pack(tensor)
            saved.append(tensor.detach())
            return len(saved) - 1

        def give(number: int) -> torch.Tensor:  # to a gradient that the block itself takes
            if number < len(saved):
                return saved[number]
            raise TaskError(
                f"a loss needs the gradient of what {self._block} computed when it ran again for an earlier "
                "backward: a forward hook, or the block, has put it where what the first run computed is "
                "expected. Empty such a list before each forward of the model, not after the loss, "
                f"{_REMEDY}."
            )

        try:
            with saved_tensors_hooks(save, give):
                yield
        finally:
            saved.clear()

    def _require_own_weights(self) -> None:
        for parameters, name, parameter in self._parameters:
            if parameters.get(name) is not parameter:
                raise TaskError(
                    f"{self._block} has another {name} than in its forward now that it runs again for its "
                    "backward, as under torch.func.functional_call, which puts the module's own weights "
                    f"back when it returns. Write the weights into the module instead, {_REMEDY}."
                )

    def _compare(self, otherwise: str, *values: Any) -> None:
        """Require that values look the same in all runs."""
        if not self._compares:
            return
        found = _fingerprint(values)
        if not _are_equal(self._fingerprints.setdefault(otherwise, found), found):
            raise TaskError(f"{self._block} {otherwise}, {_REMEDY}.")


_OTHER_INPUTS = (
    "was given something else when it ran again for its backward: the block, or what ran after it, changed "
    "an object that it was given. Give the block the tensors instead of the object that holds them, let it "
    "change a copy (copy.copy), switch a cache off (use_cache=False)"
)
_OTHER_OUTPUTS = (
    "returned something else when it ran again for its backward: it depends on more than its inputs, buffers "
    "and random numbers, such as a cache, a counter, or what the model sets before it calls the block. Make "
    "that an argument, switch the cache off (use_cache=False)"
)


def _fingerprint(values: Any) -> _Fingerprint:
    """Return digests of values, and norms of those tensors that the device may not compute equally again."""
    tensors: list[torch.Tensor] = []
    found: list[str | float] = [digest(values, tensors=tensors)]
    with torch.no_grad():
        for tensor in tensors:
            sparse = tensor.to_sparse_coo() if tensor.layout in _SPARSE else None
            # The public methods want them coalesced.
            parts = [tensor] if sparse is None else [sparse._indices(), sparse._values()]  # noqa: SLF001
            repeats = tensor.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
            found += map(digest if repeats else _norm, parts)
    return found


def _norm(tensor: torch.Tensor) -> float:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point():
        tensor = tensor.float()
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return float(torch.linalg.vector_norm(tensor, dtype=dtype))


def _are_equal(first: _Fingerprint, second: _Fingerprint) -> bool:
    return len(first) == len(second) and all(map(_is_equal, first, second))


def _is_equal(first: str | float, second: str | float) -> bool:
    if isinstance(first, str) or isinstance(second, str) or math.isnan(first):
        return str(first) == str(second)
    return math.isclose(first, second, rel_tol=_TOLERANCE)


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _torchs_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Return the hooks that `checkpoint` has just set, for which there is no public name."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001


def _to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.device]:
    """Copy to pinned memory. Copies are enqueued where the device computes, and nobody waits."""
    if tensor.layout is not torch.strided:
        return tensor.to("cpu", copy=True), tensor.device
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
    return host.copy_(tensor, non_blocking=True), tensor.device


def _to_device(kept: tuple[torch.Tensor, torch.device]) -> torch.Tensor:
    host, device = kept
    return host.to(device, non_blocking=True)
