"""What trains a model: its optimizer with a schedule, clipping and an average."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from lanewise.engine.step.lane_error import explain_memory
from lanewise.engine.step.metrics import Gradient
from lanewise.errors import ConfigError, LanewiseError, text_of


@dataclass(frozen=True)
class Training:
    """The model and what trains it."""

    model: nn.Module
    """The user's module, on the device of this process."""
    optimizer: Optimizer
    scheduler: LRScheduler | None
    """Stepped after every `steps_per_value` optimizer steps."""
    before_update: Callable[[Gradient], None] | None = None
    """What the task does to each gradient that may be used, before it is clipped; None: nothing."""
    after_update: Callable[[Gradient], None] | None = None
    """What the task does in each step that updated, when its gradient is forgotten; None: nothing."""
    average: AveragedModel | None = None
    """The exponential moving average of the weights, which is evaluated; None: the model is evaluated."""
    closure: bool = False
    """`optimizer.closure`: whether a step gets a closure besides the gradient."""
    max_grad_norm: float | None = None
    """The norm to which the gradient is clipped; None: it is not clipped."""
    steps_per_value: int = 1
    """How many steps a value of the scheduler is for: one, or those of an epoch."""

    @property
    def evaluated_model(self) -> nn.Module:
        """The module to evaluate, and to keep if it is the best."""
        return self.model if self.average is None else self.average.module

    @cached_property
    def gradient_changes(self) -> Sequence[Callable[[Gradient], None]]:
        """What is done to the gradient of a step, in this order."""
        changes = (self.before_update, self._change), (self.max_grad_norm, self._clip)
        return [change for setting, change in changes if setting is not None]

    def _change(self, gradient: Gradient) -> None:
        """Let the task change a gradient that may be used."""
        if gradient.allows_update:
            assert self.before_update is not None
            self.before_update(gradient)

    def _clip(self, gradient: Gradient) -> None:
        """Clip by the norm: that of the step, or a new one where the task may have changed the gradient."""
        parameters, norm, most = list(self.model.parameters()), gradient.norm, self.max_grad_norm
        assert norm is not None
        assert most is not None
        if self.before_update is not None:
            norm = nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])
        nn.utils.clip_grads_with_norm_(parameters, most, norm)


def explain(error: Exception, optimizer: Optimizer, *, has_closure: bool = False) -> None:
    """Say in words of the configuration what an optimizer lacks, where its error tells.

    Raises:
        ConfigError: if the optimizer needs a closure, or cannot update sharded parameters.
        TaskError: if there is no memory left for what it keeps.
    """
    if isinstance(error, LanewiseError):  # in a pass over the lanes
        return
    name, said = type(optimizer).__name__, text_of(error)
    explain_memory(
        error,
        f"the update by {name}",
        "Share out what it keeps of each parameter: distributed.shard_optimizer=true, or "
        "distributed.reducer=fsdp; or use an optimizer that keeps less.",
    )
    if not has_closure and re.search("closure", said, re.IGNORECASE):
        raise ConfigError(
            f"optimizer.class_path: {name} needs a closure: {said}. Set optimizer.closure=true."
        ) from error
    if re.search("DTensor|sharding", said, re.IGNORECASE):
        raise ConfigError(
            f"optimizer.class_path: {name} cannot update parameters that are sharded by "
            f"distributed.reducer fsdp: {said.splitlines()[0]}. Use another optimizer; or "
            "distributed.reducer=ddp, where shard_optimizer=true shares out whole parameters."
        ) from error
