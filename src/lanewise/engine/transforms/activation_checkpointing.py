"""Trades time for memory: keeps only the inputs of each block, and runs the block again for its backward."""

from collections.abc import Sequence
from typing import Literal

from torch import nn

from lanewise.engine.transforms.checkpointed import Checkpointed
from lanewise.errors import ConfigError, TaskError
from lanewise.reduce.blocks import named_blocks, repeated_blocks

_KEY = "memory.activation_checkpointing.blocks"


def checkpoint_activations(
    model: nn.Module, blocks: Literal["auto"] | Sequence[str] = "auto", *, offload: bool = False
) -> nn.Module:
    """Let a model keep less for the backward: only the inputs of each of its blocks.

    The backward runs the block again, with the random numbers and buffers of its first run, so that gradients
    are the same bytes. What the second run changes in buffers is undone. Until the first step of `Lanes` is
    over, the inputs and outputs of both runs are compared; later only the shapes, dtypes and devices of what
    they saved.

    The trainer does this for `memory.activation_checkpointing`. In an own loop, call it before
    `Lanes.prepare`.

    Args:
        model: changed in place; names of parameters and buffers stay.
        blocks: `auto` for the modules that the model repeats, such as the layers of a transformer; or names
            of classes or modules, in which `*` stands for any text.
        offload: whether to keep the inputs in the memory of the host.

    Returns:
        The model.

    Raises:
        ConfigError: if the model has no such block.
        TaskError: if the model is compiled; or, in a backward, if a block cannot run again as it ran.
    """
    if compiled := [name for name, module in model.named_modules() if _is_compiled(module)]:
        raise TaskError(
            f"{compiled[0] or 'the model'} is compiled, and its blocks cannot be checkpointed in there. "
            "Return the plain model from build_model, and set compile: auto."
        )
    found = repeated_blocks(model) if blocks == "auto" else named_blocks(model, blocks, _KEY)
    if not found:
        raise ConfigError(
            f"{_KEY} is auto, and the model repeats no block: no list or sequence in it has several modules "
            "of one class with parts. Name classes or modules to checkpoint, such as [Block] or [layers.*]."
        )
    for name, block in found.items():
        if not any(name.startswith(f"{outer}.") for outer in found):
            block.forward = Checkpointed(name, block, block.forward, offload)
    return model


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None  # noqa: SLF001
