"""Records every operator of a forward and a backward, to find the first one in which two passes differ."""

import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lanewise.data import digest
from lanewise.processes.device.accelerator import generator_state

_FOREIGN_FOLDERS = tuple(
    f"{folder}/" for folder in (*torch.__path__, sysconfig.get_path("stdlib"), Path(__file__).parents[2])
)


@dataclass(frozen=True)
class Call:
    """One operator that was called."""

    operator: str
    """The name of the operator, such as `aten.mul.Tensor`."""
    place: str
    """The module, and the line of the user's code, or the node of autograd that called it."""
    inputs: str
    """Digest of the arguments before the call."""
    outputs: str
    """Digest of what it returned, and of the arguments that it changed."""
    has_generator: bool
    """Whether one of its arguments is a generator of random numbers, which is then not a default one."""
    random_state: str
    """Digest of the states of torch's default generators before the call."""

    @property
    def is_collective(self) -> bool:
        """Whether it communicates with other processes."""
        return self.operator.startswith(("c10d.", "_c10d_functional."))

    def __str__(self) -> str:
        return f"{self.operator} in {self.place}"


@dataclass(frozen=True)
class Divergence:
    """The first call on which two recordings disagree."""

    call: Call
    has_equal_inputs: bool
    """Whether both calls got equal inputs: then the operator is not deterministic. Otherwise a value enters
    here that no recorded operator made."""
    has_equal_random_state: bool
    """Whether torch's default generators were in the same state before it."""


def first_divergence(calls: Sequence[Call], others: Sequence[Call]) -> Divergence | None:
    """Return the first call in which two recordings of the same computation differ, or None."""
    for mine, theirs in zip_longest(calls, others):
        if mine is None or theirs is None:
            return Divergence(mine or theirs, has_equal_inputs=False, has_equal_random_state=True)
        has_equal_inputs = (mine.operator, mine.inputs) == (theirs.operator, theirs.inputs)
        has_equal_random_state = mine.random_state == theirs.random_state
        if not has_equal_inputs or not has_equal_random_state or mine.outputs != theirs.outputs:
            return Divergence(mine, has_equal_inputs, has_equal_random_state)
    return None


@contextmanager
def recording(model: nn.Module) -> Iterator[list[Call]]:
    """Record what is called, forward and backward; yields the list that fills up.

    Args:
        model: its modules give the operators a place.
    """
    calls: list[Call] = []
    modules: list[str] = []

    def leave(*_: object) -> None:
        modules.pop()

    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    # Otherwise the digest of a new tensor would depend on what lay in memory. Takes effect in `exact` only.
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    with ExitStack() as stack:
        stack.callback(setattr, torch.utils.deterministic, "fill_uninitialized_memory", filled)
        for name, module in model.named_modules():
            stack.enter_context(module.register_forward_pre_hook(lambda *_, name=name: modules.append(name)))
            stack.enter_context(module.register_forward_hook(leave, always_call=True))
        stack.enter_context(_Recorder(calls, modules))
        yield calls


@final
class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[Call], modules: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls
        self._modules = modules

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = (list(args), dict(kwargs or {}))
        inputs = digest(given)
        random_state = digest(torch.default_generator.get_state(), generator_state())
        result = func(*args, **(kwargs or {}))
        changed = [given] if func._schema.is_mutable else []  # noqa: SLF001 - the dispatcher's
        has_generator = any(isinstance(value, torch.Generator) for value in (*args, *given[1].values()))
        place = self._place()
        outputs = digest(result, *changed)
        self._calls.append(Call(str(func), place, inputs, outputs, has_generator, random_state))
        return result

    def _place(self) -> str:
        node: Any = torch._C._current_autograd_node()  # noqa: SLF001 - there is no public way to it
        if node is not None:
            return f"the backward of {node.name().removesuffix('0')}"
        module = f"module {self._modules[-1]}" if self._modules and self._modules[-1] else "the model"
        line = _user_line()
        return f"{module}, {line}" if line else module


def _user_line() -> str | None:
    """Return file and line of the innermost frame that is neither torch's, python's nor ours."""
    for frame, line in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if not file.startswith((*_FOREIGN_FOLDERS, "<")):
            return f"{Path(file).name}:{line}"
    return None
