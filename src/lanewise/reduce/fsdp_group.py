"""Access to torch's private FSDP object for the parameters that are gathered together."""

from collections.abc import Sequence
from typing import Any

import torch


def param_group_of(sharded: Any) -> Any:
    """Return the FSDP parameter group of a module; None if the module has no parameter of its own."""
    return sharded._get_fsdp_state()._fsdp_param_group  # noqa: SLF001


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
