"""Packs of buffers: remembers their values at the start of a step, detects changes, and puts values back.

[Note: packs of buffers]
A model has many small buffers (a ResNet-50 has 159), and an operation on one of them takes as long as an
operation on all of them in one tensor. So the buffers of one dtype form a pack, which is compared, copied,
averaged and sent as one tensor. A pack is averaged as soon as one of its buffers changed. This keeps the
unchanged buffers to the last bit: float64 represents the products of a float32 value and a number of samples,
and their sums, exactly. float64 and complex buffers, and large ones, which are often constant, are packs of
their own.

[Note: large buffers that lanes only read]
Once a step has shown that no lane changes such a pack, it costs the CPU next to nothing: the start is a lazy
copy, which shares the buffer's memory until one of both is opened for writing, in whatever way (in place,
through `data`, by a kernel). That one gets memory of its own then, so equal addresses say that nobody wrote,
but for who had the bare address before, as an array of NumPy.
From the first such lane on, its values are copied and compared as those of other packs (decision 24).
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import nn

from lanewise.errors import MOST_SHOWN, TaskError
from lanewise.processes.device.tensor_bytes import checksums
from lanewise.processes.world.shards import is_sharded

CHANGED, RESHAPED = 1.0, 2.0
"""The value that a lane reports for a pack whose values changed, and for one with a buffer of another form.
For an unchanged pack it reports 0."""

Form = tuple[torch.Size, torch.dtype]
"""Shape and dtype of a buffer, which must be the same in all lanes."""

_MOST_ELEMENTS = 2**14
"""The most elements that a buffer in a shared pack may have."""
_WIDE_DTYPES = (torch.float64, torch.complex64, torch.complex128)
_MAKE_HOOKS = ("torch.", "transformers.", "lanewise.")
"""Packages that make hooks, or take them away, in a forward: FSDP, and models that return hidden states."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

Kind: TypeAlias = tuple[int, torch.dtype]
"""The number of elements of a pack, and their dtype."""


class PackSnapshot(NamedTuple):
    """The buffers of a pack after the forward of a lane."""

    change: float | torch.Tensor
    """0, CHANGED or RESHAPED; on an accelerator a tensor, which may not be computed yet."""
    values: torch.Tensor | None
    """A flat copy of the buffers; None where it is certain that none changed."""
    forms: Sequence[Form | None]
    """The form of each buffer; None for a buffer that is None."""


class BufferPlace(NamedTuple):
    """The place of a buffer: `module._buffers[key]`."""

    name: str
    module: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor | None:
        """The buffer."""
        return self.module._buffers[self.key]


@final
class BufferPack:
    """Several buffers that are handled as one flat tensor. See [Note: packs of buffers].

    A forward may replace or resize their tensors.

    Args:
        places: the places of several buffers of one dtype on one device, or of a single buffer, which may be
            None.
    """

    def __init__(self, places: Sequence[BufferPlace]) -> None:
        self.places = places
        self.names = [place.name for place in places]
        self._tensors: list[torch.Tensor | None] = [None] * len(places)
        self._shares: bool | None = None
        """Whether the start shares the buffer's memory; None before it is known that no lane changes it."""
        self.start: torch.Tensor | None = None
        """The values at the start of the step, flat; None where the only buffer was None."""
        self.note_start()
        self.is_large = len(places) == 1 and self.kind[0] > _MOST_ELEMENTS
        """Whether it costs something to copy it in each lane; see `end_step`."""

    @property
    def has_its_forms(self) -> bool:
        """Whether the buffers have the shapes and dtypes that they had at the start of the step."""
        return forms_of(self._now()) == self.forms

    def note_start(self) -> None:
        """Remember the modules' present values as the start of a step; their forms must not have changed."""
        for number, (tensor, (_, module, key)) in enumerate(zip(self._now(), self.places, strict=True)):
            if tensor is not self._tensors[number]:
                self._tensors[number] = module._buffers[key] = _writable(tensor)
        tensors = [tensor.detach() for tensor in self._tensors if tensor is not None]
        if self._shares:
            shared = _lazy_copy(tensors[0])
            self._shares = shared is not None
            self._set_start(shared, self.forms)
        if self._shares:
            return
        if self.start is None:
            start = _flatten(tensors).clone() if tensors else None
            self._set_start(start, forms_of(self._tensors))
        else:
            torch.cat([tensor.flatten() for tensor in tensors], out=self.start)

    def follow(self, other: "BufferPack") -> None:
        """Copy the start of the step from the same pack of another replica, also into the modules."""
        self._tensors = self._now()
        self.begin_with(other.start, other.forms)
        self.reset()

    def begin_with(self, start: torch.Tensor | None, forms: Sequence[Form | None]) -> None:
        """Remember given values and forms as the start of a step; the values may be on another device."""
        if start is not None and self.start is not None and forms == self.forms:
            self.start.copy_(start.flatten())
        else:
            device = None if self._tensors[0] is None else self._tensors[0].device
            self._set_start(None if start is None else start.to(device, copy=True).flatten(), forms)

    def reset(self) -> None:
        """Put the values and forms at the start of the step back into the modules."""
        if self._shares and self._is_untouched:
            return
        tensors = []
        for number, (_, module, key) in enumerate(self.places):
            tensor = self._tensors[number]
            form = self.forms[number]
            if form is None:
                tensor = None
            elif tensor is None or (tensor.shape, tensor.dtype) != form:
                tensor = self._starts[number].to(form[1], copy=True)
            self._tensors[number] = module._buffers[key] = tensor
            tensors += [] if tensor is None else [tensor]
        if tensors:
            torch._foreach_copy_(tensors, self._starts)  # one call instead of many

    def snapshot(self) -> PackSnapshot:
        """Compare the buffers with the start of the step; return a copy too, unless surely none changed."""
        if self._shares:
            if self._is_untouched:
                return PackSnapshot(0.0, None, self.forms)
            self._shares = False
        now = self._now()
        forms, tensors = forms_of(now), [tensor for tensor in now if tensor is not None]
        flat = _flatten(tensors).detach() if tensors else None
        change: float | torch.Tensor = RESHAPED
        if forms == self.forms:
            if flat is None or self.start is None or (flat.is_cpu and torch.equal(flat, self.start)):
                return PackSnapshot(0.0, None, forms)
            change = CHANGED if flat.is_cpu else (flat != self.start).any()
        return PackSnapshot(change, flat.clone() if flat is not None and len(tensors) == 1 else flat, forms)

    def end_step(self, *, is_changed: bool) -> None:
        """Learn whether a lane changed a large one, and let go of shared memory before others write."""
        if self._shares is None:
            self._shares = not is_changed
        if self._shares:
            self._set_start(None, self.forms)

    @property
    def _is_untouched(self) -> bool:
        """Whether the buffer still shares the memory of the start, so that surely nobody wrote it."""
        if self.start is None:  # between two steps
            return True
        (now,) = self._now()
        return now is not None and now is self._tensors[0] and _address(now) == _address(self.start)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the views of a flat tensor that are the buffers."""
        shapes = [form[0] for form in self.forms if form is not None]
        parts = flat.split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _now(self) -> list[torch.Tensor | None]:
        """Return the tensors that the modules hold now."""
        return [module._buffers[key] for _, module, key in self.places]

    def _set_start(self, start: torch.Tensor | None, forms: Sequence[Form | None]) -> None:
        self.start = start
        self.forms = forms
        self.kind = kind_of(forms)
        self._starts = [] if start is None else self.split(start)


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor lies; unlike `data_ptr` this does not open it for writing."""
    address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined] # noqa: SLF001
    return address


def _lazy_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a flat copy that shares memory until one of the two is written; None where there is no such."""
    if type(tensor) is not torch.Tensor or not tensor.is_cpu or not tensor.is_contiguous():
        return None
    try:
        return torch._lazy_clone(tensor).flatten()  # noqa: SLF001
    except RuntimeError:  # memory that is not torch's, as of NumPy's
        return None


def _writable(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a buffer, copied if it is expanded, so that each element has its own memory."""
    if tensor is not None and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        return tensor.contiguous()
    return tensor


def kind_of(forms: Sequence[Form | None]) -> Kind:
    """Return how many elements buffers with such forms have, and their common dtype."""
    present = [form for form in forms if form is not None]
    dtypes = [dtype for _, dtype in present] or [torch.bool]
    return sum(shape.numel() for shape, _ in present), reduce(torch.promote_types, dtypes)


def forms_of(tensors: Sequence[torch.Tensor | None]) -> list[Form | None]:
    """Return the form of each buffer; None for a buffer that is None."""
    return [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors]


def as_meta(forms: Sequence[Form | None]) -> list[torch.Tensor | None]:
    """Return tensors with these forms and without values, which can be sent to other processes."""
    return [None if form is None else torch.empty(form[0], dtype=form[1], device="meta") for form in forms]


def _flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors into a flat one; a single tensor may be returned as a view."""
    if len(tensors) == 1:
        return tensors[0].flatten()
    return torch.cat([tensor.flatten() for tensor in tensors])


def find_places(model: nn.Module, names: Collection[str]) -> list[BufferPlace]:
    """Return the places of buffers by their names, or of all buffers below modules.

    Raises:
        TaskError: if there is neither a buffer nor a module with buffers of some name.
    """
    everything = [
        BufferPlace(f"{prefix}.{key}" if prefix else key, module, key)
        for prefix, module in model.named_modules()
        for key in module._buffers
    ]
    found = {
        name: [place for place in everything if f"{place.name}.".startswith(f"{name}.")] for name in names
    }
    if missing := [name for name, places in found.items() if not places]:
        raise TaskError(
            f"step_state names {missing[0]}, and the model has no such buffer, nor a module of this name "
            f"with buffers."
            f" It has {', '.join(place.name for place in everything[:MOST_SHOWN]) or 'no buffer'}."
        )
    return [place for place in everything if any(place in places for places in found.values())]


@contextmanager
def kept_buffers(modules: Collection[nn.Module]) -> Iterator[None]:
    """Run a block, and afterwards put all buffers of the modules back to their values before it."""
    packs = pack_buffers(modules)
    try:
        yield
    finally:
        for pack in packs:
            pack.reset()


@contextmanager
def evaluating(modules: Collection[nn.Module], other: str = "") -> Iterator[None]:
    """Keep an evaluation, or other code so called, from changing the training: put buffers back afterwards.

    Raises:
        TaskError: if it changed or replaced a parameter, or other code left a hook; a forward may do so.
    """
    # Under fsdp other tensors stand for the parameters now and then, whose memory comes and goes.
    is_whole = not any(hasattr(part, "unshard") for root in modules for part in root.modules())
    named, kinds = _parameters_of(modules), _HOOKS if other and is_whole else ()
    before = _state_of(named, modules, kinds, is_whole=is_whole)
    with kept_buffers(modules):
        yield
    now = _state_of(_parameters_of(modules) if is_whole else named, modules, kinds, is_whole=is_whole)
    for key in [*before, *now]:
        if before.get(key) != now.get(key):
            raise TaskError(
                f"{other or 'an evaluation'} changed {key[1]}, differently on each process. Only the "
                "optimizer may change parameters; keep what a forward maintains in a buffer, remove hooks."
            )


def _parameters_of(modules: Collection[nn.Module]) -> list[tuple[int, str, nn.Parameter]]:
    return [(number, *named) for number, root in enumerate(modules) for named in root.named_parameters()]


def _state_of(
    named: Sequence[tuple[int, str, Any]],
    modules: Collection[nn.Module],
    kinds_of_hooks: Sequence[str],
    *,
    is_whole: bool,
) -> dict[tuple[int, str], object]:
    """Return what tells whether parameters and hooks are as they were, without a copy."""
    states: dict[tuple[int, str], object] = {}
    own = (part.to_local() if is_sharded(part) else part for *_, part in named)
    sums = checksums(own) if is_whole else [0] * len(named)
    for (number, name, part), total in zip(named, sums, strict=True):
        states[number, f"parameter {name}"] = id(part), part.requires_grad, part._version, part.dtype, total
    for number, root in enumerate(modules if kinds_of_hooks else ()):
        for name, module in root.named_modules():
            hooks = [hook for kind in kinds_of_hooks for hook in getattr(module, kind).values()]
            own_hooks = [id(hook) for hook in hooks if not f"{hook.__module__}".startswith(_MAKE_HOOKS)]
            states[number, f"the hooks of {name or 'the model'}"] = own_hooks
    return states


def pack_buffers(modules: Collection[nn.Module], left_out: Collection[BufferPlace] = ()) -> list[BufferPack]:
    """Pack the buffers of the modules; if there are several modules, names begin with the module's number.

    Sparse buffers are left out, which have no elements that could be averaged, and those at given places.
    """
    out = {(module, key) for _, module, key in left_out}
    packs: dict[object, list[BufferPlace]] = {}
    for number, root in enumerate(modules):
        for prefix, module in root.named_modules():
            for key, tensor in module._buffers.items():
                name = ".".join(part for part in (prefix, key) if part)
                place = BufferPlace(f"{number}:{name}" if len(modules) > 1 else name, module, key)
                is_packed = tensor is None or tensor.layout is torch.strided
                if is_packed and (module, key) not in out:
                    packs.setdefault(_pack_key(tensor) or place.name, []).append(place)
    return list(map(BufferPack, packs.values()))


def _pack_key(tensor: torch.Tensor | None) -> object:
    """Return the key of the pack to which a buffer belongs; None if the buffer is a pack of its own."""
    if tensor is None or tensor.dtype in _WIDE_DTYPES or tensor.numel() > _MOST_ELEMENTS:
        return None
    return tensor.dtype, tensor.device
