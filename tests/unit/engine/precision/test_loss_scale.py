"""The dynamic loss scale of fp16: where it begins, and when it is halved and doubled."""

import json
import math

import pytest
import torch

from lanewise.engine.precision import LossScale

INITIAL = 2.0**16


def scale_with_unit(num_units: float = 1) -> LossScale:
    scale = LossScale()
    scale.set_unit(num_units)
    return scale


def take_good_steps(scale: LossScale, num_steps: int) -> None:
    for _ in range(num_steps):
        scale.update(is_finite=True)


def test_it_has_no_unit_until_one_is_set():
    scale = LossScale()
    assert not scale.has_unit
    scale.set_unit(5)
    assert scale.has_unit


@pytest.mark.parametrize(
    ("num_units", "unit"),
    [(0, 1), (0.5, 1), (1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048), (1e6, 2**20)],
)
def test_it_begins_lower_by_the_next_power_of_two_above_the_units(num_units, unit):
    assert scale_with_unit(num_units).factor == INITIAL / unit


def test_an_overflow_halves_it_and_is_counted():
    scale = scale_with_unit(8)
    for num_skipped in (1, 2, 3):
        scale.update(is_finite=False)
        assert scale.factor == INITIAL / 8 / 2**num_skipped
        assert scale.skipped_steps == num_skipped
    scale.update(is_finite=True)
    assert scale.skipped_steps == 3


def test_two_thousand_good_steps_in_a_row_double_it():
    scale = scale_with_unit()
    take_good_steps(scale, 1999)
    assert scale.factor == INITIAL
    take_good_steps(scale, 1)
    assert scale.factor == INITIAL * 2
    take_good_steps(scale, 1999)
    assert scale.factor == INITIAL * 2
    take_good_steps(scale, 1)
    assert scale.factor == INITIAL * 4
    assert scale.skipped_steps == 0


def test_an_overflow_begins_the_row_anew():
    scale = scale_with_unit()
    take_good_steps(scale, 1999)
    scale.update(is_finite=False)
    take_good_steps(scale, 1999)
    assert scale.factor == INITIAL / 2
    take_good_steps(scale, 1)
    assert scale.factor == INITIAL


def test_it_goes_on_from_its_state_as_if_never_stopped():
    scale = scale_with_unit(100)
    scale.update(is_finite=False)
    take_good_steps(scale, 1500)
    other = LossScale()
    other.load_state_dict(json.loads(json.dumps(scale.state_dict())))
    assert other.has_unit
    for each in (scale, other):
        take_good_steps(each, 500)
        assert each.factor == INITIAL / 128  # halved once, doubled once
        assert each.skipped_steps == 1


def test_it_scales_as_torchs_grad_scaler_does():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))  # it makes its tensors when it is first asked for something
    scale = scale_with_unit()
    overflows = {0, 1, 3, 2004}  # the last one follows at once on 2,000 good steps
    for step in range(2010):
        parameter.grad = torch.full((1,), math.inf if step in overflows else 1.0)
        scaler.unscale_(optimizer)
        scaler.update()
        scale.update(is_finite=step not in overflows)
        assert scale.factor == scaler.get_scale(), step
    assert scale.factor == INITIAL / 2**3
    assert scale.skipped_steps == len(overflows)
