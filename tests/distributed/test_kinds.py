"""Each kind of state that user's code may change, at each place: same bytes on any N, or an error by name.

A further kind is a task in kinds.py and a row here. What only `lanewise verify` names is in mistakes.py.
"""

from dataclasses import replace
from functools import cache, partial

import pytest

from lanewise.config import DistributedConfig
from lanewise.testing import run_distributed
from tests.distributed import kinds
from tests.distributed.tasks import configure, train

_CHANGED = "changed in the forward or the loss of lane"
_KINDS = {
    kinds.Plain: None,
    kinds.TeacherInForward: f"parameter teacher.weight {_CHANGED}",
    kinds.TeacherThroughData: f"parameter teacher.weight {_CHANGED}",
    kinds.TeacherReplaced: f"parameter teacher.weight {_CHANGED}",
    kinds.TeacherThatIsCopied: f"parameter teacher.weight {_CHANGED}",
    kinds.TeacherInLoss: f"parameter teacher.weight {_CHANGED}",
    kinds.TeacherInTask: f"parameter task.teacher.weight {_CHANGED}",
    kinds.LimitedNorm: f"parameter rows.weight {_CHANGED}",
    kinds.ClippedInBackward: "parameter student.weight changed in the backward of lane",
    kinds.Criterion: "depends on task.criterion.weight, which needs a gradient and is in no model",
    kinds.Temperature: "depends on a tensor of shape (), which needs a gradient and is in no model",
    kinds.FrozenCriterion: None,
    kinds.Forces: None,
    kinds.Statistics: None,
    kinds.StatisticsInLoss: None,
    kinds.LabelCounts: "integer buffer counts differs between the lanes of step 1",
    kinds.NoiseInBackward: None,
    kinds.NoiseInHook: None,
    kinds.ForgetfulCheckpoint: None,
    kinds.CarefulCheckpoint: None,
    kinds.NoiseInBackwardOfAll: None,
    kinds.NoiseInBackwardByRows: None,
    kinds.NoiseInBackwardOfTerms: None,
    kinds.QueueInLoss: None,
    kinds.ChannelsLast: None,
}
"""For each task the error that ends it; None: it leaves the same bytes."""
_DRAWS = "drew random numbers from "
_NO_HOOKS = {kinds.ClippedInBackward: "parameter student.weight has a hook for its gradient, which "}
_UNDER_REPLICAS = _NO_HOOKS | {
    kinds.NoiseInBackward: _DRAWS,
    kinds.NoiseInHook: _DRAWS,
    kinds.ForgetfulCheckpoint: _DRAWS,
    kinds.NoiseInBackwardOfAll: _DRAWS,
    kinds.NoiseInBackwardByRows: _DRAWS,
    kinds.NoiseInBackwardOfTerms: _DRAWS,
}
"""What one backward of several lanes cannot give."""


def outcome(task, reducer, num_devices, **options):
    """Train, and return the bytes and losses, or the error."""
    section = DistributedConfig(reducer=reducer, devices=num_devices, device_type="cpu", equality="exact")
    config = configure(task, num_lanes=4, steps=6, **{"optimizer": "torch.optim.SGD", "lr": 0.1, **options})
    config = replace(config, distributed=section)
    try:
        first, *others = run_distributed(train, section.num_processes or 1, config)
    except RuntimeError as error:
        return str(error)
    assert all(one == first for one in others)
    return first


alone = cache(partial(outcome, reducer="ddp", num_devices=1))


def check(task, error, found):
    if error is None:
        assert found == alone(task)
    else:
        assert isinstance(found, str), "nothing was said"
        assert error in found


def name_of(value):
    return getattr(value, "__name__", "")


EACH = pytest.mark.parametrize(("task", "error"), _KINDS.items(), ids=name_of)


@EACH
@pytest.mark.parametrize("num_devices", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_on_several_processes_it_is_the_same_or_an_error(task, error, num_devices):
    assert isinstance(alone(task), str) == (error is not None), alone(task)
    check(task, error, outcome(task, "ddp", num_devices))


@EACH
@pytest.mark.slow
@pytest.mark.parametrize("reducer", ["fsdp", "data_parallel", "balanced_data_parallel"])
def test_under_each_reducer_it_is_the_same_or_an_error(task, error, reducer):
    others = _NO_HOOKS if reducer == "fsdp" else _UNDER_REPLICAS
    check(task, others.get(task, error), outcome(task, reducer, 2))


@pytest.mark.parametrize("reducer", ["data_parallel", "balanced_data_parallel"])
def test_a_shared_backward_that_draws_is_an_error(reducer):
    check(kinds.NoiseInHook, _DRAWS, outcome(kinds.NoiseInHook, reducer, 2))
    check(kinds.CarefulCheckpoint, None, outcome(kinds.CarefulCheckpoint, reducer, 2))


def test_an_optimizer_may_change_weights_that_it_does_not_train():
    options = {"optimizer": f"{kinds.__name__}.ShrinkingOptimizer"}
    results = [outcome(kinds.Plain, "ddp", num_devices, **options) for num_devices in (1, 2, 3)]
    assert results == [results[0]] * 3
