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


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_it_trains_under_that_limit_with_checkpointing(tmp_path, devices):
    option = "--memory.activation_checkpointing={blocks: [1.*]}"
    train(config(tmp_path), option, f"--distributed.devices={devices}").require_success()


def batch_of(run_dir):
    return yaml.safe_load((run_dir / "config.yaml").read_text())["batch"]


def test_a_micro_batch_that_was_found_stays_when_the_run_goes_on(tmp_path):
    path = write_config(tmp_path, batch={"global_batch_size": 8, "micro_batch_size": "auto"})
    done = train(path, "--distributed.devices=2")
    assert done.code == 2
    assert "for 2 devices, each of which needs one. Write batch.micro_batch_size=4" in done.stderr
    train(path, "--train.epochs=1").require_success()
    assert batch_of(tmp_path / "run") == {"global_batch_size": 8, "micro_batch_size": 8}
    done = train(path, "--resume", "--train.epochs=2").require_success()
    assert "auto is" not in done.stdout + done.stderr
    assert batch_of(tmp_path / "run") == {"global_batch_size": 8, "micro_batch_size": 8}


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_found_fits_where_the_process_has_a_limit_of_its_own(tmp_path, devices):
    """Tensors alone would have room for all: it was found, and out of memory in the first step."""
    batch = {"global_batch_size": 32, "micro_batch_size": "auto"}
    train_section = {"max_steps": 2, "run_dir": str(tmp_path / "run")}
    distributed = {"devices": devices}
    path = write_config(tmp_path, "tasks.Greedy", batch=batch, train=train_section, distributed=distributed)
    train(path).require_success()
    assert batch_of(tmp_path / "run")["micro_batch_size"] == 8


def test_verify_refuses_what_another_machine_may_find_otherwise(tmp_path):
    path = write_config(tmp_path, batch={"global_batch_size": 8, "micro_batch_size": "auto"})
    done = lanewise("verify", path)
    assert done.code == 2
    assert "verify needs the number that batch.micro_batch_size stands for: got auto" in done.stderr
