"""Finds the blocks of a model, which are gathered, checkpointed or compiled one at a time.

What fsdp cannot gather block by block is refused here too.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from lanewise.config.check import suggest
from lanewise.errors import ConfigError, TaskError

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
"""Classes that only hold modules, and compute nothing by themselves."""


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by name, the modules that a model repeats, such as the layers of a transformer.

    They are the modules with child modules whose class comes several times in one list or sequence; of those
    inside each other, the outermost.
    """
    return dict(_repeated(model, ""))


def named_blocks(model: nn.Module, patterns: Sequence[str], key: str) -> dict[str, nn.Module]:
    """Return, by name, the modules of a model that the user names.

    Args:
        model: the user's module, which is not a block itself.
        patterns: names of classes, or of modules as `named_modules` has them; `*` stands for any text.
        key: of the configuration, for errors.

    Raises:
        ConfigError: if nothing has such a name.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matching = {
            name: module
            for name, module in modules.items()
            if fnmatchcase(type(module).__name__, pattern) or fnmatchcase(name, pattern)
        }
        if not matching:
            classes = sorted({type(module).__name__ for module in modules.values()})
            raise ConfigError(
                f"{key} names {pattern}, and the model has no module of that class or name in it. "
                f"{suggest(pattern, classes)}"
            )
        found |= matching
    return {name: module for name, module in modules.items() if name in found}


def find_blocks(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Find the blocks that fsdp gathers one at a time; a block inside another one comes first.

    Args:
        model: the user's module.
        names: see `named_blocks`; if empty, the blocks are those of `repeated_blocks`.

    Raises:
        ConfigError: if the model has no module of such a name.
        TaskError: if a block shares a parameter with a module outside, or a parameter cannot be sharded.
    """
    found = named_blocks(model, names, "distributed.fsdp.blocks") if names else repeated_blocks(model)
    blocks = [module for module in found.values() if any(True for _ in module.parameters())]
    _require_no_shared_parameters(model, blocks)
    _require_shardable(model, blocks)
    return blocks[::-1]


def require_no_batch_norm(model: nn.Module, dtype: str) -> None:
    """Raise TaskError if the model has BatchNorm, whose float32 statistics do not fit to 16-bit weights."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 - of all dimensions
            raise TaskError(
                f"{name} is a {type(module).__name__}, whose weights cannot be gathered in {dtype}: its "
                "statistics are float32. Use distributed.fsdp.param_dtype=float32."
            )


def _repeated(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)  # a forward may use one entry of a dict
    num_of_class = Counter(type(child) for child in module.children())
    for name, child in module.named_children():
        has_parts = any(True for _ in child.children()) and type(child) not in CONTAINERS
        if is_list and has_parts and num_of_class[type(child)] > 1:
            yield prefix + name, child
        else:
            yield from _repeated(child, f"{prefix}{name}.")


def _require_no_shared_parameters(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise TaskError if a block shares a parameter: it would be gathered for one of its users only."""
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


def _require_shardable(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise TaskError if FSDP cannot shard a parameter; its own assertions would give no remedy."""
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
            (first, first_name), (second, second_name) = list(dtypes.items())[:2]
            raise TaskError(
                f"fsdp gathers parameters of one dtype together: in {type(module).__name__} {first_name} is "
                f"{first} and {second_name} is {second}. Give them one dtype, or name further blocks: "
                "distributed.fsdp.blocks."
            )
