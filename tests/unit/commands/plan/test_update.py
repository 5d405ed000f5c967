import pytest
import torch
from torch import nn

from lanewise.commands.plan.update import measure_update
from lanewise.config import OptimizerConfig
from lanewise.errors import ConfigError
from tests.distributed.tasks import Language, configure

NUM_LAYERS = 8
NUM_NUMBERS = NUM_LAYERS * (10 * 7 + 10)
STEP_COUNTERS = NUM_LAYERS * 2 * 4


def update(class_path, device_type="cpu", num_parts=1, cut="rows", **init_args):
    config = configure("tests.distributed.tasks.Language", num_lanes=2, micro_batch_size=4, steps=1)
    section = OptimizerConfig(class_path=class_path, init_args=init_args)
    config = type(config)(**{**vars(config), "optimizer": section})
    model = nn.Sequential(*(nn.Linear(7, 10) for _ in range(NUM_LAYERS)))
    return measure_update(config, Language(), model, None, device_type, num_parts, cut)


def test_the_state_is_what_the_optimizer_makes():
    assert update("torch.optim.SGD", lr=0.1).state_bytes == 0
    assert update("torch.optim.SGD", lr=0.1, momentum=0.9).state_bytes == 4 * NUM_NUMBERS
    assert update("torch.optim.AdamW").state_bytes == 2 * 4 * NUM_NUMBERS + STEP_COUNTERS


def test_a_shard_has_its_rows_alone():
    assert (
        update("torch.optim.AdamW", num_parts=3).state_bytes
        == NUM_LAYERS * 2 * 4 * (4 * 7 + 4) + STEP_COUNTERS
    )


def test_a_process_may_update_whole_parameters_alone():
    numbers = 3 * 10 * 7 + 10  # the first of three processes has three weights and a bias of the eight
    assert update("torch.optim.AdamW", num_parts=3, cut="whole").state_bytes == 2 * 4 * numbers + 4 * 4
    assert update("torch.optim.AdamW", num_parts=100_000, cut="whole").state_bytes == 2 * 4 * 70 + 4


def test_an_accelerator_updates_all_parameters_at_once():
    one_by_one, at_once = (update("torch.optim.Adam", device).temporary_bytes for device in ("cpu", "xpu"))
    assert 0 < one_by_one < at_once


def test_an_optimizer_that_asks_for_gradients_is_refused():
    with pytest.raises(ConfigError, match=r"cannot tell what torch.optim.LBFGS holds.*Plan with another"):
        update("torch.optim.LBFGS")
    assert torch.is_grad_enabled()
