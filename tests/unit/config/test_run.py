"""The tree of the configuration and the mistakes that only several fields together make."""

import dataclasses

import pytest

from lanewise.config import (
    BatchConfig,
    ClassConfig,
    DataConfig,
    DistributedConfig,
    FSDPConfig,
    OptimizerConfig,
    OrderConfig,
    RunConfig,
    TrainConfig,
)
from lanewise.config.check import read_section
from lanewise.errors import ConfigError


def run_config(**changes: object) -> RunConfig:
    sections: dict[str, object] = {
        "task": ClassConfig(class_path="my_project.Mnist"),
        "batch": BatchConfig(global_batch_size=256, micro_batch_size=32),
        "train": TrainConfig(run_dir="runs/mnist", epochs=3),
        "optimizer": OptimizerConfig(class_path="torch.optim.AdamW"),
    }
    return RunConfig(**{**sections, **changes})


def mistakes_of(build) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        build()
    return caught.value.mistakes


def test_the_number_of_lanes_is_derived():
    assert BatchConfig(global_batch_size=256, micro_batch_size=32).num_lanes == 8


def test_a_missing_micro_batch_is_named():
    with pytest.raises(ConfigError) as caught:
        read_section(BatchConfig, {"global_batch_size": 256})
    assert str(caught.value) == (
        "micro_batch_size is missing: need a whole number at least 1. Add the key micro_batch_size."
    )


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "nearest"),
    [(250, 32, "256 or 224"), (225, 32, "224 or 256"), (3, 8, "8"), (9, 8, "8 or 16")],
)
def test_the_global_batch_is_whole_micro_batches(global_batch_size, micro_batch_size, nearest):
    (mistake,) = mistakes_of(
        lambda: BatchConfig(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size)
    )
    assert mistake == (
        f"batch.global_batch_size must be a multiple of batch.micro_batch_size: "
        f"got {global_batch_size} and {micro_batch_size}. "
        f"Use global_batch_size={nearest}, or another micro_batch_size."
    )


def test_a_run_has_an_end():
    (mistake,) = mistakes_of(lambda: TrainConfig(run_dir="r"))
    assert mistake == (
        "train.epochs or train.max_steps must be given: got null for both. "
        "Set one, or both: whichever comes first ends the run."
    )
    TrainConfig(run_dir="r", epochs=1)
    TrainConfig(run_dir="r", max_steps=1)
    TrainConfig(run_dir="r", epochs=1, max_steps=1)


@pytest.mark.parametrize("devices", [None, 1, 8])
def test_devices_up_to_the_number_of_lanes(devices):
    assert run_config(distributed=DistributedConfig(devices=devices)).distributed.devices == devices


def test_more_devices_than_lanes():
    (mistake,) = mistakes_of(lambda: run_config(distributed=DistributedConfig(devices=9)))
    assert "got 9 devices and 8 lanes" in mistake
    assert "Use at most 8 devices, a larger global_batch_size or a smaller" in mistake


@pytest.mark.parametrize(
    "hosts", [{"launcher": "ssh", "hosts": ("a", "b", "c:1", "d")}, {"launcher": "slurm", "nodes": 3}]
)
def test_more_devices_than_lanes_on_all_hosts_together(hosts):
    """Only those of one host were counted: fewer devices on each were no remedy, and the run started."""
    (mistake,) = mistakes_of(lambda: run_config(distributed=DistributedConfig(devices=3, **hosts)))
    assert "got 3 hosts x 3 devices and 8 lanes" in mistake
    assert "Use at most 8 devices in all, a larger global_batch_size" in mistake
    run_config(distributed=DistributedConfig(devices=2, **hosts))


def test_weights_in_bf16_need_the_precision():
    distributed = DistributedConfig(reducer="fsdp", fsdp=FSDPConfig(param_dtype="bf16"))
    (mistake,) = mistakes_of(lambda: run_config(distributed=distributed))
    assert "needs precision bf16: got precision float32" in mistake
    run_config(distributed=distributed, precision="bf16")
    run_config(distributed=DistributedConfig(fsdp=FSDPConfig(param_dtype="bf16")))


def test_named_devices_are_counted_where_a_number_would_be():
    (mistake,) = mistakes_of(lambda: run_config(distributed=DistributedConfig(devices=("cpu",) * 10)))
    assert "got 10 devices and 8 lanes" in mistake


REQUIRED = {
    "task": {"class_path": "my_project.Mnist"},
    "batch": {"global_batch_size": 256, "micro_batch_size": 32},
    "train": {"run_dir": "runs/mnist", "epochs": 3},
    "optimizer": {"class_path": "torch.optim.AdamW"},
}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "must be at least 1: got 0."),
        (-1, "must be at least 1: got -1."),
        (
            "often",
            'must be a whole number: got "often", which is text. Write a whole number.',
        ),
    ],
)
def test_a_bad_interval_of_metrics_is_one_mistake(value, said):
    (mistake,) = mistakes_of(lambda: read_section(RunConfig, {**REQUIRED, "log": {"every_steps": value}}))
    assert mistake == f"log.every_steps {said}"


def test_metrics_have_a_line_every_ten_steps_by_default():
    assert read_section(RunConfig, REQUIRED).log.every_steps == 10


def test_callbacks_are_a_list_of_classes():
    sections = [{"class_path": "mine.First"}, {"class_path": "mine.Second", "init_args": {"size": 3}}]
    assert read_section(RunConfig, {**REQUIRED, "callbacks": sections}) == run_config(
        callbacks=(
            ClassConfig(class_path="mine.First"),
            ClassConfig(class_path="mine.Second", init_args={"size": 3}),
        )
    )
    assert read_section(RunConfig, REQUIRED).callbacks == ()


def test_a_class_without_arguments_may_be_given_alone():
    """--callbacks mine.First was told to write [mine.First], which was refused as well."""
    config = read_section(RunConfig, {**REQUIRED, "callbacks": ["mine.First"], "task": "mine.Task"})
    assert (config.callbacks, config.task) == (
        (ClassConfig(class_path="mine.First"),),
        ClassConfig(class_path="mine.Task"),
    )


def test_every_mistake_of_the_callbacks_is_told_with_the_number_of_its_section():
    sections = [
        {"class_path": 3},
        {"class_path": "mine.First"},
        {"init_arg": {}, "class_path": "mine.Second"},
        {},
        "mine.Third",  # no mistake: a class alone
        4,
    ]
    mistakes = mistakes_of(lambda: read_section(RunConfig, {**REQUIRED, "callbacks": sections}))
    assert [mistake.split()[0] for mistake in mistakes] == [
        "callbacks.0.class_path",
        "callbacks.2.init_arg",
        "callbacks.3.class_path",
        "callbacks.5",
    ]


def test_an_invalid_section_cannot_be_made_in_python():
    (mistake,) = mistakes_of(lambda: BatchConfig(global_batch_size=0, micro_batch_size=1))
    assert mistake.startswith("global_batch_size must be at least 1: got 0.")
    assert len(mistakes_of(lambda: TrainConfig(run_dir=3, epochs=0, seed=-1))) == 3


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_seeds_that_every_generator_takes(seed):
    assert TrainConfig(run_dir="r", epochs=1, seed=seed).seed == seed


def test_a_seed_beyond_63_bits():
    (mistake,) = mistakes_of(lambda: TrainConfig(run_dir="r", epochs=1, seed=2**63))
    assert mistake.startswith(f"seed must be less than {2**63}")


@pytest.mark.parametrize("norm", [0, -1.0, float("nan")])
def test_a_gradient_norm_is_positive(norm):
    (mistake,) = mistakes_of(lambda: TrainConfig(run_dir="r", epochs=1, max_grad_norm=norm))
    assert mistake.startswith("max_grad_norm must be greater than 0")


def test_sections_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        run_config().batch.micro_batch_size = 1


@pytest.mark.parametrize(
    "order", ["bucketed", {"class_path": "bucketed"}, OrderConfig(class_path="bucketed")]
)
def test_an_order_is_named_or_a_class(order):
    assert DataConfig(order=order).order == OrderConfig(class_path="lanewise.lanes.BucketedOrder")


def test_an_order_may_be_the_users():
    order = DataConfig(order={"class_path": "mine.Order", "init_args": {"size": 3}}).order
    assert (order.class_path, order.init_args) == ("mine.Order", {"size": 3})


@pytest.mark.parametrize(
    ("order", "mistake"),
    [
        (
            "buckets",
            "data.order must be .*, or the class_path of a .*SampleOrder: got buckets. Did you mean bucketed",
        ),
        ({"name": "bucketed"}, "order.name is not a key of order"),
        (3, "order must be a section with the keys class_path, init_args: got 3"),
    ],
)
def test_what_is_no_order_is_refused(order, mistake):
    with pytest.raises(ConfigError, match=mistake):
        DataConfig(order=order)


def test_defaults():
    config = run_config()
    assert config.scheduler is None
    assert config.callbacks == ()
    assert config.data.num_workers == 0
    assert config.data.order is None
    assert not config.data.drop_last
    assert config.distributed == DistributedConfig(
        devices=None, reducer="ddp", equality="close", device_type="auto", backend="auto", threads=1
    )


@pytest.mark.parametrize(
    ("num_devices", "drop_last", "remedy"),
    [
        (3, True, "and distributed.devices 3. Use a number of devices that divides the lanes."),
        (4, False, "got data.drop_last false. Use data.drop_last=true."),
        (None, False, "got data.drop_last false. Use data.drop_last=true."),
    ],
)
def test_synchronised_processes_run_equally_many_lanes(num_devices, drop_last, remedy):
    distributed = DistributedConfig(sync_batch_norm=True, devices=num_devices)
    data = DataConfig(drop_last=drop_last)
    (mistake,) = mistakes_of(lambda: run_config(distributed=distributed, data=data))
    assert mistake.endswith(remedy)
    run_config(
        distributed=DistributedConfig(sync_batch_norm=True, devices=4), data=DataConfig(drop_last=True)
    )
