"""A model of which not even one sample fits into memory, until its blocks run again for their backward."""

import pytest
import yaml

from tests.integration.command import lanewise, train, write_config


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
    assert "in step 1, lane 0, samples [" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_it_trains_under_that_limit_with_checkpointing(tmp_path, devices):
    option = "--memory.activation_checkpointing={blocks: [1.*]}"
    train(config(tmp_path), option, f"--distributed.devices={devices}").require_success()


def test_what_is_found_fits_where_the_process_has_a_limit_of_its_own(tmp_path):
    """Tensors alone would have room for all: it was found, and out of memory in the first step."""
    batch = {"global_batch_size": 32, "micro_batch_size": "auto"}
    train_section = {"max_steps": 2, "run_dir": str(tmp_path / "run")}
    path = write_config(tmp_path, "tasks.Greedy", batch=batch, train=train_section)
    done = lanewise("plan", path, "--largest-micro-batch").require_success()
    assert "a step with micro-batches of 8 takes about" in done.stdout
    *_, lanes, line = done.stdout.splitlines()
    assert lanes == "For 4 lanes, and so at most as many devices:"
    assert yaml.safe_load(line) == {"batch": {"global_batch_size": 32, "micro_batch_size": 8}}
    train(path, "--batch.micro_batch_size=8").require_success()


def test_a_configuration_with_auto_is_an_error_that_names_the_command(tmp_path):
    path = write_config(tmp_path, batch={"global_batch_size": 8, "micro_batch_size": "auto"})
    done = train(path)
    assert done.code == 2
    (error,) = done.errors
    assert error.endswith(
        'batch.micro_batch_size must be a whole number at least 1: got "auto". '
        "Write the number that `lanewise plan CONFIG --largest-micro-batch` prints."
    )
