"""Access to torch's private FSDP object for the parameters that are gathered together."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def param_group_of(sharded: Any) -> Any:
    """Return the FSDP parameter group of a module; None if the module has no parameter of its own."""
    return sharded._get_fsdp_state()._fsdp_param_group  # noqa: SLF001


def reshard(modules: Sequence[Any]) -> None:
    """Let go of what is gathered, after forwards without a backward: it would miss the next update."""
    for sharded in modules:
        sharded.reshard()
        # FSDP records the order of blocks for a backward, and clears it only there.
        group = param_group_of(sharded)
        if group is not None:
            group.comm_ctx.post_forward_order.clear()
            group._post_forward_indices.clear()  # noqa: SLF001


@contextmanager
def kept_whole(modules: Sequence[Any]) -> Iterator[None]:
    """Keep all parameters gathered, for forwards of any process. Collective: every rank must enter it.

    Args:
        modules: those that FSDP gathers one at a time, the outermost first.
    """
    _, *blocks = modules
    for block in blocks:
        block.set_reshard_after_forward(False, recurse=False)
    try:
        for sharded in modules:
            sharded.unshard()
        yield
    finally:
        for block in blocks:
            block.set_reshard_after_forward(True, recurse=False)
        reshard(modules)


def gather_before_backward(sharded: Any, outputs: Sequence[torch.Tensor]) -> None:
    """Have a backward gather the weights of a module again when it comes to one of the module's outputs."""
    if not hasattr(sharded, "set_reduce_scatter_unused_params"):  # torch before 2.13 looks into no dataclass
        sharded._get_fsdp_state()._register_pre_backward_hook(list(outputs))  # noqa: SLF001


def send_zeros_for_unused(module: Any) -> None:
    """Make FSDP send zeros for unused parameters, so that all ranks send equal amounts."""
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True)
        return
    # torch before 2.13 omits unused parameters, so ranks would add gradients of different parameters.
    group = param_group_of(module)
    if group is None:
        return
    post_backward = group.post_backward

    def with_zeros(*unused: Any) -> None:
        for parameter in group.fsdp_params:
            gathered = getattr(parameter, "_unsharded_param", None)
            if gathered is not None and gathered.requires_grad and gathered.grad is None:
                gathered.grad = torch.zeros_like(gathered)
        post_backward(*unused)

    group.post_backward = with_zeros
