"""Keeps the gradients of fp16 in its range: a power of two by which every lane's loss sum is multiplied."""

import math
from typing import Any, final

import torch

from lanewise.processes.device.accelerator import start_copy_to_host

_INITIAL_SCALE = 2.0**16
_STEPS_BEFORE_GROWTH = 2000


@final
class LossScale:
    """The dynamic loss scale of mixed-precision training (Micikevicius et al., ICLR 2018), for sums of lanes.

    Halved when a gradient overflows, whose step is skipped; doubled after 2,000 steps in a row without one,
    as in torch's GradScaler. It is not that class, which divides and steps for each optimizer by itself: here
    a gradient is divided once, by scale and weight. All ranks see the same reduced gradients, so they scale
    alike.

    A sum over thousands of tokens overflows fp16 where their mean would not. So the scale begins lower by
    2^-k, about the number of units in a global batch, fixed by the first lane of the first step.
    """

    def __init__(self) -> None:
        self._scale = _INITIAL_SCALE
        self._good_steps = 0
        self._unit = 0.0
        self.skipped_steps = 0
        """Steps that were skipped because a gradient overflowed."""

    @property
    def has_unit(self) -> bool:
        """Whether `set_unit` was called."""
        return self._unit > 0

    def set_unit(self, num_units: float) -> None:
        """Fix 2^-k, from about as many units as a global batch has."""
        self._unit = 2.0 ** -math.ceil(math.log2(max(num_units, 1.0)))

    @property
    def factor(self) -> float:
        """The factor of a lane's loss sum, by which gradients must be divided."""
        return self._scale * self._unit

    def fits(self, norm: torch.Tensor | None) -> bool:
        """Tell whether a gradient of this norm is in the range of fp16, and adapt the scale. Waits for it."""
        assert norm is not None
        is_finite = math.isfinite(start_copy_to_host(norm)())
        self.update(is_finite=is_finite)
        return is_finite

    def update(self, *, is_finite: bool) -> None:
        """Adapt the scale to whether the gradients of a step were finite."""
        self._good_steps = self._good_steps + 1 if is_finite else 0
        if not is_finite:
            self._scale /= 2
            self.skipped_steps += 1
        elif self._good_steps == _STEPS_BEFORE_GROWTH:
            self._scale *= 2
            self._good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {name.lstrip("_"): value for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        for name in vars(self):
            setattr(self, name, state[name.lstrip("_")])
