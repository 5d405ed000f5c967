"""Finds the parts of a model that the reducer fsdp gathers one at a time."""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from lanewise.config.check import suggest
from lanewise.errors import ConfigError, TaskError

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Find the blocks of a model, those inside others first.

    Args:
        model: the user's module.
        names: of classes whose modules are blocks; none: the modules with child modules whose class comes
            several times in one list or sequence, such as the layers of a transformer, and of those inside
            each other the outermost.

    Raises:
        ConfigError: if the model has no module of such a class.
        TaskError: if a block shares a parameter with what is outside of it, or it cannot be sharded.
    """
    found = _named(model, names) if names else list(_repeated(model))
    blocks = [module for module in found if any(True for _ in module.parameters())]
    _require_that_nothing_is_shared(model, blocks)
    _require_what_can_be_sharded(model, blocks)
    return blocks[::-1]


def require_no_batch_norm(model: nn.Module, dtype: str) -> None:
    """Raise TaskError where weights that travel in 16 bits would meet statistics in float32."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 - of all dimensions
            raise TaskError(
                f"{name} is a {type(module).__name__}, whose weights cannot be gathered in {dtype}: its "
                "statistics are float32. Use distributed.fsdp.param_dtype=float32."
            )


def _named(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    there = {type(module).__name__ for module in model.modules() if module is not model}
    for name in names:
        if name not in there:
            raise ConfigError(
                f"distributed.fsdp.blocks names {name}, and the model has no module of that class in it. "
                f"{suggest(name, sorted(there))}"
            )
    return [module for module in model.modules() if type(module).__name__ in names and module is not model]


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)  # of a dict a forward takes one or the other
    num_of_class = Counter(type(child) for child in module.children())
    for child in module.children():
        has_parts = any(True for _ in child.children()) and type(child) not in _CONTAINERS
        if is_list and has_parts and num_of_class[type(child)] > 1:
            yield child
        else:
            yield from _repeated(child)


def _require_that_nothing_is_shared(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise where a parameter of a block is used elsewhere: it would be gathered with one of them only."""
    names = {module: name for name, module in model.named_modules()}
    for block in blocks:
        parameters, inside = set(block.parameters()), set(block.modules())
        for module in names.keys() - inside:
            for key, parameter in module.named_parameters(recurse=False):
                if parameter in parameters:
                    name = ".".join(filter(None, (names[module], key)))
                    raise TaskError(
                        f"{name} is also a parameter of {names[block]}, so fsdp cannot gather that block by "
                        "itself. Name blocks that share no parameters: distributed.fsdp.blocks."
                    )


def _require_what_can_be_sharded(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise what FSDP's assertions would say in other words, of a block or of what is in none."""
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise TaskError(f"parameter {name} is a scalar, which fsdp cannot shard. Give it the shape (1,).")
        if parameter.is_complex():
            raise TaskError(
                f"parameter {name} is {parameter.dtype}, and fsdp shards real parameters only. Use another "
                "distributed.reducer, such as ddp, or view_as_complex in the forward."
            )
        if not parameter.is_contiguous():
            raise TaskError(
                f"parameter {name} is not contiguous (channels_last, or a view), so fsdp cannot shard it. "
                "Make it contiguous in build_model."
            )
    taken: set[nn.Parameter] = set()
    for module in [*blocks[::-1], model]:
        dtypes: dict[torch.dtype, str] = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter not in taken:
                dtypes.setdefault(parameter.dtype, name)
        taken.update(module.parameters())
        if len(dtypes) > 1:
            (first, one), (second, other) = list(dtypes.items())[:2]
            raise TaskError(
                f"fsdp gathers parameters of one dtype together: in {type(module).__name__} {one} is {first} "
                f"and {other} is {second}. Give them one dtype, or name further blocks: "
                "distributed.fsdp.blocks."
            )
