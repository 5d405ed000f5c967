"""A model of which not even one sample fits into memory, until its blocks run again for their backward."""

import pytest

from tests.integration.command import train, write_config


def config(folder):
    train_section = {"max_steps": 1, "run_dir": str(folder / "run")}
    batch = {"global_batch_size": 2, "micro_batch_size": 1}
    return write_config(folder, "tasks.Deep", batch=batch, train=train_section)


def test_out_of_memory_is_one_error_that_names_the_lane_and_what_to_do(tmp_path):
    done = train(config(tmp_path))
    assert done.code == 2
    (error,) = done.errors
    assert "out of memory with a micro-batch of 1 sample ([0] [1, 1], [1] [1, 1])" in error
    assert "memory.activation_checkpointing=auto" in error
    assert "in step 0, lane 0, samples [" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("devices", [1, 2])
def test_it_trains_under_that_limit_with_checkpointing(tmp_path, devices):
    option = "--memory.activation_checkpointing={blocks: [1.*]}"
    train(config(tmp_path), option, f"--distributed.devices={devices}").require_success()
