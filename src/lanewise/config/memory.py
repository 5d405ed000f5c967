"""The sections `memory` and `compile`: what is traded for memory, and what for speed."""

from typing import ClassVar, Literal

from lanewise.config.check import Section


class ActivationCheckpointingConfig(Section):
    """Which parts of a model keep only their inputs, and run again for their backward: memory for time."""

    TEXT_KEY: ClassVar = "blocks"

    blocks: Literal["auto"] | tuple[str, ...] = "auto"
    """auto: the modules that a list of modules repeats, as fsdp finds them; or names of classes or modules,
    such as [Block] or [encoder.layers.*]."""
    offload: bool = False
    """Whether the inputs are kept in host memory; needs an accelerator."""


class MemoryConfig(Section):
    """What is traded for memory; no result changes."""

    activation_checkpointing: ActivationCheckpointingConfig | None = None
    """Blocks that run again for their backward; unset: none. It may be `auto` alone."""


class CompileConfig(Section):
    """What torch.compile makes faster. It rounds differently from eager; random numbers are the same."""

    TEXT_KEY: ClassVar = "blocks"

    blocks: Literal["auto", "whole"] = "auto"
    """auto: the modules that a list of modules repeats, of which each class compiles once; whole: the
    model's forward."""
    dynamic: bool | None = None
    """Whether a kernel is made for all shapes; unset: in exact one for each shape, in close as torch
    chooses."""
