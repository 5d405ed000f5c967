"""What the command line says of mistakes: all of them, in one line each, and nothing is left running."""

import pytest

from lanewise.lanes import FeistelShuffle
from tests.integration.command import (
    Done,
    Warm,
    lanewise,
    train,
    wait_for,
    write_config,
)
from tests.slow import slow

EITHER = pytest.mark.parametrize("devices", [1, 2])


def refuses(done: Done, *mistakes: str) -> None:
    """Check that a command ended over these mistakes, each of which names a part of its line."""
    assert done.code == 2, done.stderr
    assert len(done.errors) == len(mistakes), done.stderr
    for line, mistake in zip(done.errors, mistakes, strict=True):
        assert mistake in line
    assert "Traceback" not in done.stdout + done.stderr
    assert done.leftover == []


@pytest.mark.parametrize(
    ("overrides", "mistakes"),
    [
        (["--trian.epochs", "3"], ["trian is not a key of the configuration. Did you mean train?"]),
        (["--train.epoch=3"], ["train.epoch is not a key of train. Did you mean train.epochs?"]),
        (["--train.epochs", "three"], ["train.epochs must be a whole number"]),
        (
            ["--batch.micro_batch_size", "3"],
            ["multiple of batch.micro_batch_size: got 8 and 3. Use global_batch_size=9 or 6"],
        ),
        (["--distributed.devices", "5"], ["got 5 devices and 4 lanes"]),
        (
            ["--train.epoch", "3", "--data.order", "maybe", "--batch.micro_batch_size", "0"],
            [
                "train.epoch is not",
                "batch.micro_batch_size must be at least 1",
                "data.order must be shuffled, sequential",
            ],
        ),
    ],
    ids=["section", "key", "type", "micro-batch", "devices", "several"],
)
def test_a_mistake_in_the_structure_is_refused(tmp_path, overrides, mistakes):
    done = train(write_config(tmp_path), *overrides)
    assert len(done.errors) == len(mistakes)
    for mistake in mistakes:
        assert any(mistake in line for line in done.errors), done.stderr
    refuses(done, *[""] * len(mistakes))
    assert not (tmp_path / "run").exists()


def test_a_missing_configuration_names_the_file_that_was_probably_meant(tmp_path):
    path = write_config(tmp_path)
    refuses(train(path.with_name("confg.yaml")), f"{path.with_name('confg.yaml')} does not exist")


def test_an_unknown_command_is_refused():
    refuses(lanewise("trian"), "trian is not a command of lanewise")


@EITHER
def test_mistakes_in_the_classes_are_all_shown(tmp_path, devices):
    done = train(
        write_config(tmp_path, distributed={"devices": devices}),
        *("--task.class_path", "no_such_module.Line"),
        *("--optimizer.init_args.lr", "fast", "--optimizer.init_args.momentun", "0.9"),
        *("--scheduler.class_path", "torch.optim.lr_scheduler.CosineAnnealing"),
    )
    refuses(
        done,
        "task.class_path: there is no module no_such_module.",
        'optimizer.init_args.lr must be float | torch.Tensor: got "fast"',
        "optimizer.init_args.momentun is not an argument of torch.optim.SGD. "
        "Did you mean optimizer.init_args.momentum?",
        "Did you mean torch.optim.lr_scheduler.CosineAnnealingLR?",
    )
    assert not (tmp_path / "run").exists()


def test_a_module_that_fails_while_it_is_imported_is_named_with_file_and_line(tmp_path):
    module = tmp_path / "broken.py"
    module.write_text("import torch\n\nSCALE = torch.ones(3) @ torch.ones(4)\n")
    path = write_config(tmp_path, search_path=str(tmp_path), task="broken.Digits")
    done = train(path)
    refuses(done, "task.class_path: importing broken failed with RuntimeError")
    assert f"{module}, line 3" in done.stderr


@EITHER
def test_gpus_that_are_not_there_are_refused(tmp_path, devices):
    path = write_config(tmp_path, distributed={"devices": devices, "device_type": "cuda"})
    refuses(
        train(path, variables={"CUDA_VISIBLE_DEVICES": ""}), "of the type cuda, but torch finds none here"
    )


@EITHER
@pytest.mark.parametrize(
    ("task", "overrides", "mistake"),
    [
        ("tasks.Line", ["--task.init_args.num_samples", 0], "it has 0 samples"),
        ("tasks.Detached", [], "the loss of Detached has no gradient"),
    ],
)
def test_what_training_cannot_work_with_is_refused(tmp_path, devices, task, overrides, mistake):
    path = write_config(tmp_path, task, distributed={"devices": devices})
    done = train(path, *overrides)
    refuses(done, mistake)
    assert done.stderr.count(mistake) == 1


@pytest.mark.parametrize(
    ("sections", "mistake"),
    [
        ({"task": "tasks.NoTask"}, "task.class_path must name a lanewise.Task: tasks.NoTask is not one"),
        (
            {"optimizer": {"class_path": "torch.nn.Identity"}},
            "optimizer.class_path must name a torch.optim.Optimizer",
        ),
    ],
)
def test_a_class_of_another_kind_is_refused(tmp_path, sections, mistake):
    refuses(train(write_config(tmp_path, **sections)), mistake)


def test_another_dataset_on_each_rank_is_refused(tmp_path):
    done = train(write_config(tmp_path, "tasks.OwnDataOnEachRank"), "--distributed.devices", 2)
    refuses(done, "see different datasets")


@EITHER
def test_a_loss_that_is_not_finite_is_traced_to_its_samples(tmp_path, devices):
    done = train(write_config(tmp_path, "tasks.NanAtSample13"), "--distributed.devices", devices)
    position = FeistelShuffle(22, seed=0).indices(0, 0, 22).tolist().index(13)
    first = position - position % 2  # micro-batches of 2
    samples = FeistelShuffle(22, seed=0).indices(0, first, first + 2).tolist()
    assert done.code == 1
    (error,) = done.errors
    assert error.startswith(
        f"error: the loss is not finite in step {position // 8 + 1} (epoch 1), so the weights"
    )
    assert f"lane {position % 8 // 2}: loss nan, samples {samples}" in done.stderr
    assert done.stderr.count("is not finite") == 1
    assert "Traceback" not in done.stderr
    assert done.leftover == []


def test_a_run_dir_that_holds_a_run_is_refused_and_left_as_it_was(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text('{"step": 0}\n')
    refuses(train(write_config(tmp_path)), f"run_dir {run_dir} holds a run already")
    assert {path.name for path in run_dir.iterdir()} <= {"metrics.jsonl", ".lock"}
    assert (run_dir / "metrics.jsonl").read_text() == '{"step": 0}\n'


def test_a_run_dir_that_is_in_use_is_refused_and_the_first_run_goes_on(tmp_path):
    path = write_config(tmp_path, "tasks.Stuck")
    with Warm("train", path) as first:
        wait_for((tmp_path / "run" / ".lock").exists)
        refuses(train(path), f"run_dir {tmp_path / 'run'} is in use by process ")
        assert first.poll() is None


def test_the_same_command_works_in_the_same_run_dir_once_it_is_corrected(tmp_path):
    path = write_config(tmp_path, distributed={"devices": 2})
    refuses(train(path, "--optimizer.init_args.lr", "fast"), "lr must be")
    refuses(train(path, "--task.init_args.num_samples", 0), "it has 0 samples")
    train(path).require_success()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 6


WORLD = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
"""What torchrun tells rank 0 of two processes on one machine."""


def test_devices_that_contradict_torchrun_are_refused(tmp_path):
    path = write_config(tmp_path, distributed={"devices": 3})
    done = train(path, variables=WORLD)
    refuses(done, "distributed.devices contradicts the launcher: got 3, and 2 processes were started")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("reducer", ["data_parallel", *slow("balanced_data_parallel")])
def test_one_process_for_all_devices_is_refused_among_several(tmp_path, reducer):
    path = write_config(tmp_path, distributed={"devices": ["cpu", "cpu"], "reducer": reducer})
    done = train(path, variables={**WORLD, "LOCAL_WORLD_SIZE": "1"})
    refuses(done, f"{reducer} drives all its devices from one process: got 2 processes. Start one, or use")


@pytest.mark.parametrize("reducer", ["data_parallel", "balanced_data_parallel", "fsdp"])
def test_several_devices_train_as_one_device_does(tmp_path, reducer):
    models = []
    for name, distributed in (("one", {}), ("two", {"devices": ["cpu", "cpu"], "reducer": reducer})):
        folder = tmp_path / name
        folder.mkdir()
        path = write_config(folder, distributed=distributed)
        done = train(path).require_success()
        models.append((folder / "run" / "model.safetensors").read_bytes())
    assert models[0] == models[1]
    assert f"reducer {reducer} (exact)" in done.stdout + done.stderr


def test_fsdp_is_refused_in_one_process(tmp_path):
    done = train(write_config(tmp_path, distributed={"reducer": "fsdp"}))
    refuses(done, "distributed.reducer fsdp shares the weights among processes: got one process. Use more")


def test_blocks_that_the_model_does_not_have_are_refused(tmp_path):
    fsdp = {"reducer": "fsdp", "devices": ["cpu", "cpu"], "fsdp": {"blocks": ["Lineer"]}}
    done = train(write_config(tmp_path, distributed=fsdp))
    refuses(
        done, "distributed.fsdp.blocks names Lineer, and the model has no module of that class or name in it."
    )


def test_a_world_that_is_described_in_part_is_refused(tmp_path):
    done = train(write_config(tmp_path), variables={"RANK": "0", "WORLD_SIZE": "2"})
    assert done.code == 1
    assert len(done.errors) == 1
    assert "without LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT." in done.errors[0]
