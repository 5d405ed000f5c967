"""Compiles the user's modules before a reducer wraps them, so that no graph contains the reducer."""

import logging
from types import MethodType
from typing import Any, final

import torch
from torch import nn

from lanewise.config import CompileConfig
from lanewise.errors import ConfigError, TaskError
from lanewise.reduce.blocks import repeated_blocks

logger = logging.getLogger(__name__)


def compile_forwards(model: nn.Module, config: CompileConfig) -> nn.Module:
    """Let torch.compile compile the forwards of a model, or of its blocks, when they are first called.

    Compiled and eager modules draw the same random numbers: inductor calls torch's own generator. Blocks of
    one class are compiled together, once for each shape.

    Args:
        model: changed in place; names of parameters and buffers stay, and a copy of it is compiled as well.
        config: what to compile, and for which shapes.

    Returns:
        The model.

    Raises:
        ConfigError: if the model repeats no block.
    """
    from torch._inductor import config as inductor  # noqa: PLC0415 - takes a second

    inductor.fallback_random = True
    modules = [model] if config.blocks == "whole" else list(repeated_blocks(model).values())
    if not modules:
        raise ConfigError(
            "compile.blocks is auto, and the model repeats no block: no list or sequence in it has several "
            "modules of one class with parts. Use compile.blocks=whole."
        )
    for module in modules:
        if "forward" in vars(module):
            raise TaskError(
                f"a {type(module).__name__} has a forward that was set on the object, which compile would "
                "leave out. Let its class have it, or call torch.compile in build_model."
            )
    kinds: set[type[Any]] = set(map(type, modules))
    compiled = {kind: torch.compile(kind.forward, dynamic=config.dynamic) for kind in kinds}
    for module in modules:
        module.forward = MethodType(compiled[type(module)], module)  # so that a copy calls itself
    return model


@final
class CompilationLog:
    """Logs graph breaks and recompilations of torch.compile."""

    def __init__(self) -> None:
        self._breaks: set[str] = set()
        self._recompilations: set[str | None] = set()

    def tell(self) -> None:
        """Log what is new since the last call."""
        from torch._dynamo.utils import counters, get_compilation_metrics  # noqa: PLC0415 - as above

        for reason in counters["graph_break"].keys() - self._breaks:
            self._breaks.add(reason)
            logger.warning("torch.compile breaks the graph: %s", _first_lines(reason))
        recompilations = {
            metrics.compile_id: metrics  # torch keeps the last 64
            for metrics in get_compilation_metrics()
            if metrics.recompile_reason and metrics.compile_id not in self._recompilations
        }
        self._recompilations |= recompilations.keys()
        if recompilations:
            last = list(recompilations.values())[-1]
            logger.info(
                "torch.compile has recompiled %d time%s, the last time %s, since %s",
                len(self._recompilations),
                "s" * (len(self._recompilations) > 1),
                last.co_name,
                _first_lines(last.recompile_reason or ""),
            )


def _first_lines(text: str) -> str:
    """Return the beginning of a long explanation, on one line."""
    return " ".join(text.split("Developer debug context", maxsplit=1)[0].split())
