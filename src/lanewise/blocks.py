"""Finds the blocks of a model: the parts that are gathered, checkpointed or compiled one at a time."""

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from lanewise.config.check import suggest
from lanewise.errors import ConfigError

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


def _repeated(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)  # a forward may use one entry of a dict
    num_of_class = Counter(type(child) for child in module.children())
    for name, child in module.named_children():
        has_parts = any(True for _ in child.children()) and type(child) not in CONTAINERS
        if is_list and has_parts and num_of_class[type(child)] > 1:
            yield prefix + name, child
        else:
            yield from _repeated(child, f"{prefix}{name}.")
