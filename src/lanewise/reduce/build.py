"""Chooses the reducer, after making sure that all ranks start from the same model."""

import hashlib
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lanewise.config import DistributedConfig
from lanewise.errors import ConfigError, TaskError, WorldError
from lanewise.lanes import Placement
from lanewise.processes.device.choice import choose_devices
from lanewise.processes.device.tensor_bytes import tensor_bytes
from lanewise.processes.world.world import World
from lanewise.reduce.ddp import DDPReducer
from lanewise.reduce.fsdp import FSDPReducer
from lanewise.reduce.reducer import Reducer
from lanewise.reduce.replicas import ReplicaReducer
from lanewise.reduce.single import SingleReducer

_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
"""Names of classes, of torch or of others who name theirs alike."""


def build_reducer(
    model: nn.Module,
    placement: Placement,
    world: World,
    config: DistributedConfig,
    *,
    on_bucket: Callable[[], None] = lambda: None,
) -> Reducer:
    """Build the reducer.

    Collective: every rank must call this.

    Args:
        model: the user's module, on the CPU; it is moved to this process's device.
        placement: which process carries which lanes.
        world: the processes.
        config: the reducer, the grade and the devices.
        on_bucket: called inside a backward when the gradients of a bucket are complete and begin to travel;
            under fsdp, called after each lane's backward.

    Raises:
        ConfigError: if the machine lacks a device, or the reducer does not work here.
        TaskError: if the model is distributed already, no parameter is trainable, a parameter is expanded or
            has no shape yet, or the reducer or its compression does not support the model or its hooks.
        WorldError: if the ranks built different models.
    """
    require_plain(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TaskError("the model has no trainable parameter: build_model returned nothing to train.")
    _require_shapes(model)
    _require_own_elements(model)
    if config.reducer not in ("single", "ddp"):
        _require_no_hooks(model, config.reducer)
    if config.reducer == "fsdp":
        if world.world_size == 1:
            raise ConfigError(
                "distributed.reducer fsdp shares the weights among processes: got one process. "
                "Use more devices, or distributed.reducer=single."
            )
        if config.equality == "exact" and world.device.type == "cpu":
            _require_equal_updates(model)
        _compare_ranks(model, world)
        return FSDPReducer(model, placement, world, config.fsdp, config.equality, on_backward=on_bucket)
    model.to(world.device)
    if config.is_one_process:
        assert config.reducer.endswith("data_parallel"), config.reducer
        names = choose_devices(config.device_type, config.num_devices or 1, config.device_names)
        balanced = config.reducer == "balanced_data_parallel"
        devices = [torch.device(name) for name in names]
        return ReplicaReducer(model, placement.num_lanes, devices, config.equality, balanced=balanced)
    if world.world_size == 1:
        assert config.reducer in ("single", "ddp"), config.reducer
        return SingleReducer(model, placement.num_lanes, config.equality)
    assert config.reducer == "ddp", config.reducer
    _compare_ranks(model, world)
    return DDPReducer(model, placement, world, config.equality, config.compression, on_bucket=on_bucket)


def require_plain(model: nn.Module) -> None:
    """Raise TaskError if the model, or a module in it, is wrapped to be distributed in another way."""
    for name, module in model.named_modules():
        wrapper = next((base.__name__ for base in type(module).__mro__ if base.__name__ in _WRAPPERS), None)
        if wrapper:
            raise TaskError(
                f"{f'module {name} of the model' if name else 'the model'} is distributed by {wrapper}, and "
                "lanewise distributes it too. Give the plain module instead, without the wrapper: "
                "distributed.reducer says how it is distributed."
            )


def _require_shapes(model: nn.Module) -> None:
    """Raise TaskError if a lazy module has not seen an input yet: its parameters cannot be compared."""
    lazy = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if is_lazy(tensor)]
    if lazy:
        raise TaskError(
            f"the model has parameters or buffers without a shape: {', '.join(lazy)}. Modules like "
            "nn.LazyLinear take it from their first input: run the model once on a small one, of zeros, "
            "where it is built (build_model)."
        )


def _require_own_elements(model: nn.Module) -> None:
    """Raise TaskError if elements of a parameter share one number in memory: no optimizer can update it."""
    for name, parameter in model.named_parameters():
        steps = zip(parameter.shape, parameter.stride(), strict=True)
        if parameter.requires_grad and any(size > 1 and not stride for size, stride in steps):
            raise TaskError(
                f"parameter {name} is expanded: its shape is {tuple(parameter.shape)}, its strides are "
                f"{parameter.stride()}, so several elements are one number in memory, which no optimizer can "
                "update. Make the small tensor the parameter and expand it in the forward, or clone it."
            )


def _require_no_hooks(model: nn.Module, reducer: str) -> None:
    """Raise TaskError if a parameter has a hook: the reducer computes the gradients of its copies instead."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # noqa: SLF001
            raise TaskError(
                f"parameter {name} has a hook for its gradient, which {reducer} would not call: it trains "
                "copies or parts of the parameters. Use distributed.reducer=ddp, or leave the hook out."
            )


def _require_equal_updates(model: nn.Module) -> None:
    """Raise TaskError if a CPU would update a shard otherwise than that part of the whole tensor."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_floating_point() and parameter.element_size() < 4:
            raise TaskError(
                f"distributed.reducer fsdp is not exact on a CPU with parameters of {parameter.dtype}: got "
                f"{name}. torch's optimizers round the last elements of such a tensor differently, and a "
                "shard ends elsewhere. Keep parameters in float32 and set precision=bf16, or use "
                "distributed.reducer=ddp or distributed.equality=close."
            )


def _compare_ranks(model: nn.Module, world: World) -> None:
    """Raise WorldError if a parameter or buffer, or its requires_grad, differs between ranks. Collective."""
    state = [*model.named_parameters(), *model.named_buffers()]
    digests = {name: _digest(tensor) for name, tensor in state}
    for rank, others in enumerate(world.all_gather_tree(digests)):
        if others == digests:
            continue
        name = next(name for name in [*digests, *others] if digests.get(name) != others.get(name))
        raise WorldError(
            f"ranks {world.rank} and {rank} built different models: {name} differs. "
            "Build it where every rank has equal random state, in Task.build_model or after Lanes was made, "
            "and let it not depend on the rank, the time, or files that differ between machines."
        )


def _digest(tensor: torch.Tensor) -> str:
    told = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode())
    told.update(tensor_bytes(tensor))
    return told.hexdigest()
