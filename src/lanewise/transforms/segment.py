"""A part of a forward of which only the inputs are kept: it runs again when the backward comes to it.

That is activation checkpointing (Chen et al., "Training Deep Nets with Sublinear Memory Cost",
https://arxiv.org/abs/1604.06174), by the hooks through which autograd saves tensors, as torch's own
`checkpoint(use_reentrant=False)` does it. Here a segment may be several modules that somebody else's forward
calls one after the other, and what the second run draws, reads from buffers and writes to them is what the
first one did, so that gradients are the same bytes.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lanewise.errors import TaskError
from lanewise.random_state import kept_random_state, take_random_state
from lanewise.world.shards import gathered

# Backwards of replicas on several devices run in threads, and swap the process's generators.
_one_at_a_time = threading.RLock()

_Outputs: TypeAlias = Sequence[Any]
"""What the calls of a pass returned so far, flattened."""


@final
class Segment:
    """Blocks of which each takes what one before it returned.

    They are called as ever. A call without gradients keeps nothing.

    Args:
        blocks: modules, by name, in the order in which they run. Each gets another `forward`.
        offload: whether to keep the inputs in the memory of the host.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], *, offload: bool) -> None:
        self._names = list(blocks)
        self._offload = offload
        self._pass: _Pass | None = None
        for number, block in enumerate(blocks.values()):
            block.forward = _Checkpointed(self, number, block, block.forward)

    def run(self, block: "_Checkpointed", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block's forward in such a way that its backward will run it again.

        Raises:
            TaskError: if the block does not take what another one of the segment returned.
        """
        if not torch.is_grad_enabled():
            return block.forward(*args, **kwargs)
        if block.number == 0:
            self._pass = _Pass(self._offload)
        elif self._pass is None or not self._pass.leads_to(args, kwargs):
            first, name = self._names[0], self._names[block.number]
            raise TaskError(
                f"{name} does not take what the block before it returned, so it cannot be computed again "
                f"from the inputs of {first}. Use memory.activation_checkpointing.every=1, or name blocks "
                "that are called one after the other."
            )
        current = self._pass
        if block.number == len(self._names) - 1:
            self._pass = None  # its graph holds it, for as long as there is one
        return current.run(block, args, kwargs)


@final
@dataclass(frozen=True)
class _Checkpointed:
    """Stands in place of the `forward` of a block. A copy of the model has copies of it."""

    segment: Segment
    number: int
    """Which of the segment's blocks it is."""
    module: nn.Module
    forward: Callable[..., Any]
    """What the module's forward was."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.segment.run(self, args, kwargs)


@final
class _Pass:
    """One forward through the blocks of a segment, as far as they were called."""

    def __init__(self, offload: bool) -> None:
        self._offload = offload
        self._calls: list[_Call] = []
        self._outputs: list[_Seen] = []
        """Of all calls. Held weakly: to need no memory for them is what this is for."""
        self._forms: list[_Form] = []
        """Of each tensor that autograd saved."""
        self._again: dict[int, torch.Tensor] = {}
        """What autograd saved in the second run, by number, until somebody asks for it."""

    def leads_to(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether a call with these takes what one before returned."""
        return any(self._number_of(leaf) is not None for leaf in tree_leaves((args, kwargs)))

    def run(self, block: _Checkpointed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block; keep of what autograd saves only which one it is."""
        leaves, spec = tree_flatten((args, kwargs))
        kept = list(map(self._keep, leaves))
        self._calls.append(_Call(block, lambda outputs: tree_unflatten([one(outputs) for one in kept], spec)))
        with saved_tensors_hooks(self._pack, self._unpack):
            returned = block.forward(*args, **kwargs)
        self._outputs += map(_Seen.note, tree_leaves(returned))
        return returned

    def _number_of(self, leaf: Any) -> int | None:
        """Return which of the outputs this is; None if it is none of them."""
        return next((number for number, one in enumerate(self._outputs) if one.is_still(leaf)), None)

    def _keep(self, leaf: Any) -> Callable[[_Outputs], Any]:
        """Return what gives an argument again."""
        number = self._number_of(leaf)
        if number is not None:
            return lambda outputs: outputs[number]
        if not isinstance(leaf, torch.Tensor):
            return lambda _: leaf
        kept = _on_host(leaf) if self._offload else _unchanged(leaf)
        return lambda _: kept()

    def _pack(self, tensor: torch.Tensor) -> int:
        self._forms.append(_Form.of(tensor))
        return len(self._forms) - 1

    def _unpack(self, number: int) -> torch.Tensor:
        with _one_at_a_time:
            if number not in self._again:
                self._again = dict(enumerate(self._run_again()))
            return self._again.pop(number)  # autograd asks once, unless it was told to retain the graph

    def _run_again(self) -> list[torch.Tensor]:
        """Compute what autograd saved."""
        saved: list[torch.Tensor] = []

        def save(tensor: torch.Tensor) -> None:
            saved.append(tensor.detach())  # with its graph it would hold itself
            if len(saved) == len(self._forms):
                raise _Enough

        outputs: list[Any] = []
        *others, last = self._calls
        with kept_random_state(), torch.enable_grad(), saved_tensors_hooks(save, _never):
            try:
                for call in others:
                    with gathered(call.block.module):  # the last one's weights are there for its backward
                        outputs += call.run_again(outputs)
                last.run_again(outputs)
            except _Enough:
                pass
        if list(map(_Form.of, saved)) != self._forms:
            raise TaskError(
                f"{type(last.block.module).__name__} computed something else when it ran again for its "
                "backward. Activation checkpointing needs a forward that depends on its inputs, buffers and "
                "random numbers alone: on no cache and no counter. Leave the block out of "
                "memory.activation_checkpointing.blocks, or switch its cache off (use_cache=False)."
            )
        return saved


@final
class _Call:
    """The call of a block, and the state of the process in which it was made.

    Args:
        block: which one.
        give_arguments: gives them again, from the outputs of the calls before.
    """

    def __init__(
        self,
        block: _Checkpointed,
        give_arguments: Callable[[_Outputs], tuple[tuple[Any, ...], dict[str, Any]]],
    ) -> None:
        self.block = block
        self._give_arguments = give_arguments
        self._set_random_state = take_random_state()
        self._buffers = [
            (module._buffers, name, buffer.detach().clone())
            for module in block.module.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._autocast = [
            partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in _device_types()
        ]

    def run_again(self, outputs: _Outputs) -> list[Any]:
        """Make the call once more, and return what it returns, flattened."""
        args, kwargs = self._give_arguments(outputs)
        self._set_random_state()
        with ExitStack() as stack:
            for autocast in self._autocast:
                stack.enter_context(autocast())
            stack.enter_context(self._earlier_buffers())
            return tree_leaves(self.block.forward(*args, **kwargs))

    @contextmanager
    def _earlier_buffers(self) -> Iterator[None]:
        """Let the modules have copies of the buffers as they were, and forget what becomes of these."""
        current = [(buffers, name, buffers[name]) for buffers, name, _ in self._buffers]
        try:
            for buffers, name, earlier in self._buffers:
                buffers[name] = earlier.clone()
            yield
        finally:
            for buffers, name, buffer in current:
                buffers[name] = buffer


class _Form(NamedTuple):
    """What a tensor that autograd saved is like."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]
    storage_offset: int | torch.SymInt

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Form":
        return cls(tensor.shape, tensor.dtype, tensor.device, tensor.stride(), tensor.storage_offset())


class _Seen(NamedTuple):
    """Recognises an output where it is an argument."""

    find: Callable[[], object]
    version: int

    @classmethod
    def note(cls, output: object) -> "_Seen":
        """Note an output, if it is a tensor."""
        if isinstance(output, torch.Tensor):
            return cls(weakref.ref(output), output._version)
        return cls(lambda: None, 0)

    def is_still(self, leaf: Any) -> bool:
        """Tell whether this is that tensor, or another view of it, and nobody wrote to it.

        FSDP gives a block such a view, of which its backward is told.
        """
        output: Any = self.find() if isinstance(leaf, torch.Tensor) else None
        return (
            output is not None
            and leaf.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
            and _Form.of(leaf) == _Form.of(output)
            and leaf.requires_grad == output.requires_grad
            and leaf._version == self.version
        )


class _Enough(BaseException):
    """Ends the second run when all is there that autograd saved in the first one."""


def _never(_: None) -> torch.Tensor:
    raise AssertionError("the graph of a second run has no backward")


def _unchanged(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Keep a tensor, and raise TaskError where it was written to in between."""
    version = tensor._version

    def give() -> torch.Tensor:
        if tensor._version != version:
            raise TaskError(
                f"an input of a checkpointed block, of shape {tuple(tensor.shape)}, was changed in place "
                "after the block took it, so the block cannot be computed again. Write x = x + y instead of "
                "x += y."
            )
        return tensor

    return give


def _on_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Keep a copy in pinned memory. Copies are enqueued where the device computes, and nobody waits."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor.detach(), non_blocking=True)
    device, requires_grad = tensor.device, tensor.requires_grad
    return lambda: host.to(device, non_blocking=True).requires_grad_(requires_grad)


def _device_types() -> list[str]:
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]
