"""Names the lane in errors of the user's code, and explains those of torch whose remedy is known."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from lanewise.data import LaneBatch
from lanewise.errors import LanewiseError, TaskError, note_place, text_of


def note_lane(error: BaseException, batch: LaneBatch) -> None:
    """Add a note to an error of the user's code, once: the lane in which it arose.

    Raises:
        TaskError: in place of an error of torch whose remedy is known, or of a SystemExit.
    """
    if batch.place in getattr(error, "__notes__", ()):
        return
    if explained := _explain(error, batch):
        explained.add_note(batch.place)
        raise explained from error
    note_place(error, batch.place)


@contextmanager
def named_lane(batch: LaneBatch) -> Iterator[None]:
    """Call `note_lane` for errors in the block."""
    try:
        yield
    except BaseException as error:
        note_lane(error, batch)
        raise


def explain_memory(error: BaseException, what: str, remedy: str) -> None:
    """Say what there was no memory for, and what to do, if that is what an error of torch says.

    Raises:
        TaskError: in place of the error.
    """
    if not isinstance(error, LanewiseError) and is_out_of_memory(error):
        raise TaskError(f"out of memory for {what}. {remedy} The error was {_said(error)}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error, or the cause that it explains, says that there is no memory left."""
    if isinstance(error, LanewiseError) and error.__cause__ is not None:
        error = error.__cause__
    if type(error) in (RuntimeError, torch.AcceleratorError):
        return re.search(_NO_MEMORY, text_of(error)) is not None
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError | torch.OutOfMemoryError)


_NO_MEMORY = r"\bDefaultCPUAllocator: |\b(error: |backend )out of memory"
"""Matches messages without an error type of their own: torch's for the CPU and for mps, and CUDA's own."""

_BATCH_OF_ONE = (
    "BatchNorm cannot normalise this lane's micro-batch: a partial last step may leave a lane with one "
    "sample. Set data.drop_last (drop_last of lanes.steps), or use another micro_batch_size."
)
_TOO_MANY_SHAPES = (
    "In exact, torch.compile makes a kernel for each shape that it meets, and there are more shapes than "
    "torch._dynamo.config.recompile_limit. Pad the batches to fewer shapes, or raise the limit."
)
_NO_GRADIENT = (
    "An evaluation runs without gradients. Where forward or loss differentiates by its input, compute that "
    "within torch.enable_grad(), and detach the result."
)
_REMEDIES = {
    "builtins.ValueError": ("Expected more than 1 value per channel when training", _BATCH_OF_ONE),
    "torch._dynamo.exc.FailOnRecompileLimitHit": ("", _TOO_MANY_SHAPES),
}
"""For types of torch's errors: the beginning of the message, and an explanation with a remedy."""


def remedy_for(error: BaseException) -> str:
    """Return an explanation of an error of torch, with a remedy; empty where none is known."""
    begin, remedy = _REMEDIES.get(f"{type(error).__module__}.{type(error).__qualname__}", ("", ""))
    return remedy if text_of(error).startswith(begin) else ""


def _explain(error: BaseException, batch: LaneBatch) -> TaskError | None:
    """Return a TaskError that explains an error of torch, with a remedy; None where no remedy is known."""
    if isinstance(error, LanewiseError):  # its message may quote torch's
        return None
    if remedy := remedy_for(error):
        return TaskError(f"{text_of(error)}. {remedy}")
    if not torch.is_grad_enabled() and re.search("(not|n't) require grad", text_of(error)):
        return TaskError(f"{text_of(error)}. {_NO_GRADIENT}")
    if not is_out_of_memory(error):
        return None
    return TaskError(
        f"out of memory with a micro-batch of {batch.num_samples} sample"
        f"{'s' * (batch.num_samples != 1)} ({_shapes_of(batch.data)}). "
        "Let a lane need less: memory.activation_checkpointing=auto, precision=bf16, or a smaller "
        "batch.micro_batch_size, which makes more lanes and so another model; or share the weights "
        f"out: distributed.reducer=fsdp. The error was {_said(error)}"
    )


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error)}".splitlines()[0].removesuffix(": ")


def _shapes_of(data: Any) -> str:
    """Name the tensors of a batch with their shapes."""
    leaves, _ = tree_flatten_with_path(data)
    named = [f"{keystr(path)} {list(leaf.shape)}" for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
    return ", ".join(named).strip() or "no tensors"
