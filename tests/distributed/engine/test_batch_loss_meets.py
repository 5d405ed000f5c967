"""Losses of a whole step together with what else a run has: resume, checkpointing, compile, verify."""

from dataclasses import replace

import pytest

from lanewise.config import ActivationCheckpointingConfig, CompileConfig, MemoryConfig
from tests.distributed.commands.test_verify import _fast_processes, verify  # noqa: F401 - a fixture
from tests.distributed.contrastive import ByRows, Contrastive, Keeps, nt_xent
from tests.distributed.engine.test_batch_loss import configured, run
from tests.distributed.engine.test_several_losses import TwoLosses, Unknown
from tests.distributed.reduce.test_reducers import train_part
from tests.distributed.tasks import configure
from tests.slow import slow


@pytest.mark.parametrize("task", [Contrastive, pytest.param(ByRows, marks=pytest.mark.slow)])
def test_it_goes_on_under_other_reducers_from_the_middle_of_an_epoch(tmp_path, task):
    arguments = {"task": task, "loss": "clip", "norm": False}
    whole, _ = run(configured("single", 1, **arguments))
    parts = [("ddp", 3, 2), ("fsdp", 2, 3), ("balanced_data_parallel", 2, 4), ("single", 1, 5)]
    for reducer, num_devices, last_step in parts:
        config = configured(reducer, num_devices, **arguments)
        found = run(config, train_part, str(tmp_path), last_step)
    assert found == whole


@pytest.mark.parametrize(
    ("reducer", "num_devices", "task"),
    [
        ("ddp", 3, Contrastive),
        *slow(
            ("ddp", 3, ByRows),
            *((*layout, task) for layout in (("single", 1), ("fsdp", 2)) for task in (ByRows, Contrastive)),
        ),
    ],
)
def test_activation_checkpointing_changes_no_byte(task, reducer, num_devices):
    section = ActivationCheckpointingConfig(blocks=("Linear",))
    arguments = {"task": task, "loss": "clip", "norm": False}
    config = configured(reducer, num_devices, **arguments)
    expected = run(configured("single", 1, **arguments))
    assert run(replace(config, memory=MemoryConfig(activation_checkpointing=section))) == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("task", [Contrastive, ByRows])
def test_compiled_models_leave_the_same_bytes(task):
    found = []
    for layout in (("single", 1), ("ddp", 2), ("ddp", 3)):
        config = configured(*layout, task=task, loss="clip", norm=False, num_samples=48)
        found.append(run(replace(config, compile=CompileConfig(blocks="whole"))))
    assert found[1:] == found[:1] * 2


@pytest.mark.parametrize(
    ("task", "arguments"),
    [
        (ByRows, {"loss": "clip"}),
        *slow((Contrastive, {"loss": nt_xent.__name__, "norm": True}), (TwoLosses, {}), (Unknown, {})),
    ],
)
def test_verify_finds_nothing(task, arguments):
    report = verify(configure(task, num_lanes=5, **arguments), 3, resumes=True)
    assert (report.is_verified, list(report.findings)) == (True, [])


@pytest.mark.slow
def test_verify_names_what_changes_from_one_forward_to_the_next():
    report = verify(configure(Keeps, num_lanes=5), 2)
    assert not report.is_verified
    assert any("calls" in finding.evidence for finding in report.findings)
