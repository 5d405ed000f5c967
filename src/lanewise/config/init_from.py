"""The section `train.init_from`: the weights with which a run begins, in place of new ones."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar

from lanewise.config.check import A_PATH, Section


class InitFromConfig(Section):
    """The weights with which a run begins, in place of new ones. It may be its path alone."""

    TEXT_KEY: ClassVar = "path"

    path: Annotated[str, A_PATH]
    """A .safetensors file; a file of torch.save with a state dict; or the folder of a run, for its best model
    where it keeps one, else its last (the moving average with `train.ema_decay`). Relative to the working
    directory; ~ is the user's folder."""
    leave_out: tuple[str, ...] = ()
    """Names of parameters and buffers that stay new, with `*` for any text: [head.*]."""
    prefixes: Mapping[str, Any] = field(default_factory=dict)
    """What stands in the model for the beginning of a name in the file: {module.: ''}, or {'': encoder.}
    where the file is a part of the model. The longest beginning that fits counts."""
