"""Each kind of state that user's code may change, at each place: same bytes on any N, or an error by name.

A further kind is a task in kinds.py and a row here. What only `lanewise verify` names is in mistakes.py.
"""

import re
import traceback
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from lanewise.config import CheckpointConfig, DistributedConfig, EveryConfig
from lanewise.engine.engine import Engine
from lanewise.engine.run.build import build_run
from lanewise.engine.run.resume import resume_run
from lanewise.engine.run.saving import Saving
from lanewise.processes.device.determinism import set_determinism
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.dir import RunDir
from lanewise.testing import run_distributed
from tests.distributed import kinds
from tests.distributed.tasks import configure, state_bytes, train
from tests.unit.engine.own_loop.test_lanes import make_lanes

_CHANGED = "changed in the forward or the loss of lane"
_KEPT = "changed in the forward, loss or backward of lanes, and lane"
_KINDS = {
    kinds.Plain: None,
    kinds.TeacherInForward: f"parameter teacher.weight {_CHANGED}",
    kinds.TeacherThroughData: f"parameter teacher.weight {_CHANGED}",
    kinds.TeacherReplaced: f"parameter teacher.weight {_CHANGED}",
    kinds.TeacherThatIsCopied: f"parameter teacher.weight {_CHANGED}",
    kinds.TeacherInLoss: f"parameter teacher.weight {_CHANGED}",
    kinds.TeacherInTask: f"parameter task.teacher.weight {_CHANGED}",
    kinds.TeacherInList: f"parameter task.teachers.0.weight {_CHANGED}",
    kinds.LimitedNorm: f"parameter rows.weight {_CHANGED}",
    kinds.ClippedInBackward: "parameter student.weight changed in the backward of lane",
    kinds.Criterion: "depends on task.criterion.weight, which needs a gradient and is in no model",
    kinds.Temperature: "depends on a tensor of shape (), which needs a gradient and is in no model",
    kinds.TemperatureOfAll: "depends on a tensor of shape (), which needs a gradient and is in no model",
    kinds.CentreInTask: f"task.criterion.centre {_KEPT}",
    kinds.CentreOfWholeStep: None,
    kinds.TeacherWithStatistics: None,
    kinds.OldWeightNorm: None,
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
    kinds.QueueByRows: "task.queue changed in the row_loss of QueueByRows, and lane",
    kinds.ChannelsLast: None,
    kinds.CountInTask: f"task.calls {_KEPT}",
    kinds.CountInModel: f"model.calls {_KEPT}",
    kinds.CountInHolder: f"task.held.state.calls {_KEPT}",
    kinds.CountInVariable: f"CALLS.0 {_KEPT}",
    kinds.CountInBackward: f"task.calls {_KEPT}",
    kinds.LastOutputs: f"task.last {_KEPT}",
    kinds.OwnGenerator: f"task.rng {_KEPT}",
    kinds.Harmless: None,
    kinds.HarmlessUpdate: None,
    kinds.LoggingUpdate: None,
    kinds.CountInDataset: None,
    kinds.FrozenTeacher: None,
}
"""For each task the error that ends it; None: it leaves the same bytes."""
_KEPT_BY_ALL = (
    kinds.CountInUpdate,
    kinds.TeacherOfUpdate,
    kinds.AnnealedDropout,
    kinds.SmoothedLabels,
    kinds.PatienceOfUpdate,
)
"""They leave the same bytes too, but no checkpoint has what they keep: see test_verify_kinds.py."""
_TOLD = _KINDS | dict.fromkeys(_KEPT_BY_ALL)
_FOUND_BY_RUNNING_AGAIN = f"{_KEPT}|changed in the row_loss"
_DRAWS = "drew random numbers from "
_NO_HOOKS = {kinds.ClippedInBackward: "parameter student.weight has a hook for its gradient, which "}
_UNDER_FSDP = _NO_HOOKS | {kinds.TeacherOfUpdate: "a DTensor, which cannot be mixed with plain tensors"}
_UNDER_REPLICAS = _NO_HOOKS | {
    kinds.NoiseInBackward: _DRAWS,
    kinds.NoiseInHook: _DRAWS,
    kinds.ForgetfulCheckpoint: _DRAWS,
    kinds.NoiseInBackwardOfAll: _DRAWS,
    kinds.NoiseInBackwardByRows: _DRAWS,
    kinds.NoiseInBackwardOfTerms: _DRAWS,
}
"""What one backward of several lanes cannot give."""


def config_of(task, reducer, num_devices, **options):
    section = DistributedConfig(reducer=reducer, devices=num_devices, device_type="cpu", equality="exact")
    config = configure(task, num_lanes=4, steps=6, **{"optimizer": "torch.optim.SGD", "lr": 0.1, **options})
    return replace(config, distributed=section)


def outcome(task, reducer, num_devices, **options):
    """Train, and return the bytes and losses, or the error."""
    config = config_of(task, reducer, num_devices, **options)
    try:
        first, *others = run_distributed(train, config.distributed.num_processes or 1, config)
    except RuntimeError as error:
        return str(error)
    assert all(one == first for one in others)
    return first


def train_each(world, configs):
    """Train in one run after another; return the bytes and losses of each, or its error."""
    found = []
    for config in configs:
        try:
            found.append(train(world, config))
        except Exception:  # noqa: BLE001 - the others are trained in any case
            found.append(traceback.format_exc())
    return found


@cache
def outcomes(tasks, num_devices):
    """Train several tasks in one world, which takes less time than a world for each."""
    configs = [config_of(task, "ddp", num_devices) for task in tasks]
    first, *others = run_distributed(train_each, num_devices, configs)
    assert all(one == first for one in others)
    return dict(zip(tasks, first, strict=True))


def alone(task):
    return outcomes(tuple(_TOLD), 1)[task]


RIGHT = tuple(task for task, error in _KINDS.items() if error is None)


def check(task, error, found):
    if error is None:
        assert found == alone(task)
    else:
        assert isinstance(found, str), "nothing was said"
        assert error in found


def name_of(value):
    return getattr(value, "__name__", "")


EACH = pytest.mark.parametrize(("task", "error"), _TOLD.items(), ids=name_of)


@EACH
@pytest.mark.parametrize("num_devices", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_on_several_processes_it_is_the_same_or_an_error(task, error, num_devices):
    assert isinstance(alone(task), str) == (error is not None), alone(task)
    right = (*RIGHT, *_KEPT_BY_ALL)
    found = outcomes(right, num_devices)[task] if task in right else outcome(task, "ddp", num_devices)
    check(task, error, found)


def test_a_teacher_that_build_model_puts_into_evaluation_mode_keeps_its_statistics():
    state, _ = alone(kinds.FrozenTeacher)
    assert state["teacher.1.running_mean"] == bytes(12)
    assert state["teacher.1.num_batches_tracked"] == bytes(8)


@EACH
@pytest.mark.slow
@pytest.mark.parametrize("reducer", ["data_parallel", "balanced_data_parallel"])
def test_under_replicas_it_is_the_same_or_an_error(task, error, reducer):
    check(task, _UNDER_REPLICAS.get(task, error), outcome(task, reducer, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "error"),
    # Decision 26: what is kept is found by running again, which under fsdp all processes would have to.
    [(task, error) for task, error in _TOLD.items() if not re.search(_FOUND_BY_RUNNING_AGAIN, error or "")],
    ids=name_of,
)
def test_under_fsdp_it_is_the_same_or_an_error(task, error):
    check(task, _UNDER_FSDP.get(task, error), outcome(task, "fsdp", 2))


@pytest.mark.parametrize("reducer", ["data_parallel", "balanced_data_parallel"])
def test_a_shared_backward_that_draws_is_an_error(reducer):
    check(kinds.NoiseInHook, _DRAWS, outcome(kinds.NoiseInHook, reducer, 2))
    check(kinds.CarefulCheckpoint, None, outcome(kinds.CarefulCheckpoint, reducer, 2))


def test_a_weight_that_is_computed_in_each_forward_is_copied_to_devices():
    """It is kept with its graph between the forwards, of which torch makes no copy."""
    check(kinds.OldWeightNorm, None, outcome(kinds.OldWeightNorm, "data_parallel", 2))


def test_an_optimizer_may_change_weights_that_it_does_not_train():
    options = {"optimizer": f"{kinds.__name__}.ShrinkingOptimizer"}
    results = [outcome(kinds.Plain, "ddp", num_devices, **options) for num_devices in (1, 2, 3)]
    assert results == [results[0]] * 3


def train_with_checkpoints(world, config, folder):
    """Train, or go on, with a checkpoint after every step."""
    set_determinism("exact", threads=1)
    run = build_run(replace(config, checkpoint=CheckpointConfig(every=EveryConfig(steps=1))), world)
    run_dir = RunDir(Path(folder))
    checkpoints = CheckpointFolder(run_dir.checkpoints)
    first_step = resume_run(run, checkpoints, ())
    Engine(run, first_step=first_step, saving=Saving(run, checkpoints)).fit(run_dir)


def saved_with_checkpoints(tmp_path, kind, num_processes):
    config = config_of(kind, "ddp", num_processes)
    return run_distributed(train_with_checkpoints, num_processes, config, str(tmp_path))


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_saves_change_nothing_of_what_is_refused(tmp_path, num_processes):
    """A look that began anew after each save never ended, and said nothing."""
    with pytest.raises(RuntimeError, match=re.escape(f"task.calls {_KEPT} ")):
        saved_with_checkpoints(tmp_path, kinds.CountInTask, num_processes)


def test_what_begins_late_is_refused_in_the_first_step_after_a_resume(tmp_path):
    """Of a run, the first two steps are looked at; this counter begins in the fourth."""
    saved_with_checkpoints(tmp_path, kinds.LateCount, 1)
    (newest, *_) = CheckpointFolder(RunDir(tmp_path).checkpoints).all()
    assert newest.name == "step-000006"
    config = config_of(kinds.LateCount, "ddp", 1)
    config = replace(config, train=replace(config.train, max_steps=9))
    with pytest.raises(RuntimeError, match=re.escape(f"task.calls {_KEPT} 0 of step 7 depends on it")):
        run_distributed(train_with_checkpoints, 1, config, str(tmp_path))


def test_a_buffer_of_the_whole_step_that_lanes_write_late_is_refused_before_a_save(tmp_path):
    with pytest.raises(RuntimeError, match="buffer level differs between ranks 0 and 1 after step 4"):
        saved_with_checkpoints(tmp_path, kinds.WritesLate, 2)


def own_loop(world, kind):
    """Train a kind of task in a loop of one's own; return the bytes of the model, and what the task keeps."""
    set_determinism("exact", threads=1)
    lanes = make_lanes(world, global_batch_size=8)
    task = kind()
    model = lanes.prepare(task.build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = lanes.steps(task.train_dataset())
    for _ in range(2):
        for step in steps:
            if kind is kinds.QueueInLoss:
                step.batch_loss(
                    lambda batch: (task.forward(model, batch), batch[1]),
                    lambda given: task.batch_loss(model, *given),
                )
            else:
                for batch in step:
                    step.backward(task.loss(task.forward(model, batch), batch))
            optimizer.step()
    return state_bytes(model), getattr(task, "queue", torch.zeros(0)).tolist()


def test_in_an_own_loop_every_process_fills_the_same_queue():
    (alone,) = run_distributed(own_loop, 1, kinds.QueueInLoss)
    assert len(alone[1]) == 40
    for num_processes in (2, 3, 4):
        assert run_distributed(own_loop, num_processes, kinds.QueueInLoss) == [alone] * num_processes


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (kinds.TeacherThroughData, f"parameter teacher.weight {_CHANGED}"),
        (kinds.Criterion, r"depends on a parameter of shape \(3, 3\), which needs a gradient"),
        (kinds.Temperature, r"depends on a tensor of shape \(\), which needs a gradient"),
    ],
)
def test_in_an_own_loop_it_is_the_same_error(kind, said):
    with pytest.raises(RuntimeError, match=said):
        run_distributed(own_loop, 2, kind)


def adversaries(world):
    """A GAN: the loss of each model depends on the parameters of the other, which is prepared too."""
    lanes = make_lanes(world, global_batch_size=8)
    torch.manual_seed(0)
    first, second = lanes.prepare(nn.Linear(6, 6)), lanes.prepare(nn.Linear(6, 1))
    for step in lanes.steps(kinds.Points()):
        for points, _ in step.batches(first):
            step.backward(second(first(points)).mean())
        for points, _ in step.batches(second):
            step.backward(second(first(points)).square().mean())
    return step.number


def test_the_other_models_of_a_gan_are_no_foreign_weights():
    assert run_distributed(adversaries, 2) == [2, 2]
