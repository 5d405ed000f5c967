"""Refuses what all processes should keep alike, once in a step, and do not."""

from collections.abc import Mapping

import torch
from torch import nn

from lanewise.errors import TaskError
from lanewise.processes.device.tensor_bytes import checksums, placed_checksum
from lanewise.processes.world.shards import is_sharded
from lanewise.processes.world.world import World


def require_equal_state(model: nn.Module, world: World, step: int) -> None:
    """Compare buffers and frozen parameters between processes; parts of sharded ones are left out.

    Collective: every rank must call this.

    Args:
        model: the module of this process.
        world: the processes.
        step: the last step that was taken.

    Raises:
        TaskError: on every rank, if one differs; names it.
    """
    named = {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and not is_sharded(parameter):
            named[f"parameter {name}"] = parameter
    require_equal(named, world, step)


def require_equal(named: Mapping[str, torch.Tensor | None], world: World, step: int) -> None:
    """Compare tensors by name between processes; `require_equal_state` has the rest.

    Collective: every rank must call this.
    """
    if world.world_size == 1:
        return
    dense = {name: one for name, one in named.items() if one is not None and one.layout is torch.strided}
    own = dict(zip(dense, checksums(dense.values(), placed_checksum), strict=True))
    first, *others = world.all_gather_tree(own)
    for rank, theirs in enumerate(others, 1):
        if different := [name for name in [*first, *theirs] if first.get(name) != theirs.get(name)]:
            raise TaskError(
                f"{different[0]} differs between ranks 0 and {rank} after step {step + 1}: code that runs "
                "once in a step (before_update, after_update, a hook, your own loop) or a lane wrote it: "
                "every process must do the same. Compute it from what the lanes gather and add up, or from "
                "what all processes have; not from the rank, the time, or what this process's lanes alone "
                "have seen (docs/losses.md)."
            )
