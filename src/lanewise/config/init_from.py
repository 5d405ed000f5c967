"""The section `train.init_from`: the weights with which a run begins, in place of new ones."""

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar

from lanewise.config.check import A_PATH, Section, expand_user, show


def _prefixes_are_text(prefixes: Mapping[str, Any]) -> Iterator[str]:
    if any(not isinstance(new, str) for new in prefixes.values()):
        yield (
            f"train.init_from.prefixes must give a text for each text: got {show(dict(prefixes))}. "
            "Write {module.: ''} to remove module. from the names of the file."
        )


class InitFromConfig(Section):
    """The weights with which a run begins, in place of new ones. It may be its path alone."""

    TEXT_KEY: ClassVar = "path"
    RULES = (_prefixes_are_text,)

    path: Annotated[str, A_PATH]
    """A .safetensors file; a file of torch.save with a state dict; or the folder of a run, for its trained
    model (the moving average with `train.ema_decay`), whose best one is `RUN_DIR/best.safetensors`. Relative
    to the working directory; ~ is the user's folder."""
    leave_out: tuple[str, ...] = ()
    """Names of parameters and buffers that stay new, with `*` for any text: [head.*]."""
    prefixes: Mapping[str, Any] = field(default_factory=dict)
    """What stands in the model for the beginning of a name in the file: {module.: ''}, or {'': encoder.}
    where the file is a part of the model. The longest beginning that fits counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "path", expand_user(self.path))
