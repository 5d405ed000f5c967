"""What must hold among the keys of `distributed`."""

from dataclasses import fields

import pytest

from lanewise.config import DistributedConfig, FSDPConfig
from lanewise.config.check import read_section
from lanewise.errors import ConfigError


def mistakes_of(build) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        build()
    return caught.value.mistakes


def test_single_reduces_one_device():
    (mistake,) = mistakes_of(lambda: DistributedConfig(devices=2, reducer="single"))
    assert mistake.startswith("distributed.reducer single needs distributed.devices 1: got 2 devices.")
    DistributedConfig(devices=1, reducer="single")
    DistributedConfig(reducer="single")


def test_fsdp_needs_several_processes():
    (mistake,) = mistakes_of(lambda: DistributedConfig(devices=1, reducer="fsdp"))
    assert "got distributed.devices 1. Use more devices" in mistake
    DistributedConfig(devices=2, reducer="fsdp")
    DistributedConfig(reducer="fsdp")  # torchrun says how many
    # It was refused, although the hosts together have several.
    DistributedConfig(devices=1, reducer="fsdp", launcher="ssh", hosts=("a", "b"))


@pytest.mark.parametrize("launcher", ["local", "slurm", "ray", "kubernetes"])
def test_who_lets_hosts_come_and_go_is_named(launcher):
    mistakes = mistakes_of(lambda: DistributedConfig(min_nodes=2, launcher=launcher))
    (mistake,) = (mistake for mistake in mistakes if "min_nodes" in mistake)
    assert f"got {launcher}. Leave it out: torchrun" in mistake
    assert "--requeue" in mistake


def test_sync_batch_norm_depends_on_the_hosts_that_come_and_go():
    hosts = {"launcher": "ssh", "hosts": ("a", "b")}
    (mistake,) = mistakes_of(lambda: DistributedConfig(min_nodes=1, sync_batch_norm=True, **hosts))
    assert mistake.startswith("distributed.sync_batch_norm depends on the number of processes")


@pytest.mark.parametrize(("key", "value"), [("param_dtype", "bf16"), ("cpu_offload", True)])
def test_what_fsdp_can_do_in_close_only(key, value):
    fsdp = FSDPConfig(**{key: value})
    (mistake,) = mistakes_of(lambda: DistributedConfig(reducer="fsdp", equality="exact", fsdp=fsdp))
    assert mistake.startswith(f"distributed.fsdp.{key}")
    assert "distributed.equality=close" in mistake
    DistributedConfig(reducer="fsdp", fsdp=fsdp)
    DistributedConfig(reducer="ddp", equality="exact", fsdp=fsdp)  # ddp does not look at it


def test_offloading_needs_gpus():
    fsdp = FSDPConfig(cpu_offload=True)
    (mistake,) = mistakes_of(lambda: DistributedConfig(reducer="fsdp", device_type="cpu", fsdp=fsdp))
    assert mistake.startswith("distributed.fsdp.cpu_offload needs GPUs")


def test_nccl_needs_gpus():
    (mistake,) = mistakes_of(lambda: DistributedConfig(device_type="cpu", backend="nccl"))
    assert "distributed.backend=gloo" in mistake
    DistributedConfig(device_type="auto", backend="nccl")


GPUS, SHARED_GPU, CPUS = ("cuda:0", "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cpu")


@pytest.mark.parametrize(
    ("devices", "num_devices", "names"),
    [(None, None, ()), (1, 1, ()), (3, 3, ()), *((names, 2, names) for names in (GPUS, SHARED_GPU, CPUS))],
)
def test_devices_are_a_number_or_names(devices, num_devices, names):
    config = DistributedConfig(devices=devices)
    assert config.num_devices == num_devices
    assert config.device_names == names


def test_devices_are_read_from_a_list():
    assert read_section(DistributedConfig, {"devices": list(SHARED_GPU)}).device_names == SHARED_GPU


@pytest.mark.parametrize("device_type", ["auto", "cuda", "cpu"])
def test_numbers_in_a_list_are_those_of_devices_of_the_type(device_type):
    config = read_section(DistributedConfig, {"devices": [0, 2], "device_type": device_type})
    assert config.devices == (0, 2)
    assert (config.num_devices, config.device_names) == (2, (f"{device_type}:0", f"{device_type}:2"))
    with pytest.raises(ConfigError, match=r"distributed.devices.0 must be at least 0: got -1"):
        read_section(DistributedConfig, {"devices": [-1]}, "distributed")


@pytest.mark.parametrize(
    "devices",
    [
        (),
        (0, "cuda:1"),
        ("GPU:0",),
        ("cuda",),
        ("cuda:",),
        ("cuda:-1",),
        ("cuda:10000000",),
        ("cuda:x",),
        ("cuda:0", "xpu:0"),
        ("cpu:0",),
        ("0", "1"),
        ("cpu", "cuda:0"),
    ],
)
def test_names_of_devices_that_are_wrong_or_of_two_types(devices):
    (mistake,) = mistakes_of(lambda: DistributedConfig(devices=devices))
    assert mistake == (
        "distributed.devices must be a number, or a list of devices of one type: "
        f"got [{', '.join(map(str, devices))}]. Write [cuda:0, cuda:1], or [cpu, cpu]."
    )


@pytest.mark.parametrize(("devices", "device_type"), [(CPUS, "cuda"), (GPUS, "cpu")])
def test_names_of_devices_contradict_their_type(devices, device_type):
    (mistake,) = mistakes_of(lambda: DistributedConfig(devices=devices, device_type=device_type))
    assert mistake == (
        "distributed.device_type contradicts distributed.devices: "
        f"got {device_type} and [{', '.join(devices)}]. Leave device_type out."
    )
    other = {"cuda": "cpu", "cpu": "cuda"}[device_type]
    assert DistributedConfig(devices=devices, device_type=other).device_names == devices


def test_nccl_needs_a_gpu_for_each_process():
    (mistake,) = mistakes_of(lambda: DistributedConfig(devices=SHARED_GPU, backend="nccl"))
    assert mistake == (
        "distributed.backend nccl needs a GPU for each process: got [cuda:0, cuda:0]. "
        "Use distributed.backend=gloo, or other devices."
    )
    DistributedConfig(devices=SHARED_GPU, backend="gloo")
    DistributedConfig(devices=GPUS, backend="nccl")


def test_single_counts_named_devices():
    (mistake,) = mistakes_of(lambda: DistributedConfig(devices=CPUS, reducer="single"))
    assert mistake.startswith("distributed.reducer single needs distributed.devices 1: got 2 devices.")
    DistributedConfig(devices=("cpu",), reducer="single")


@pytest.mark.parametrize("device_type", ["auto", "cpu", "cuda", "xpu", "mps", "privateuseone"])
def test_any_type_of_device_may_be_asked_for(device_type):
    assert read_section(DistributedConfig, {"device_type": device_type}).device_type == device_type
    if device_type not in ("auto", "cpu"):
        names = (f"{device_type}:0", f"{device_type}:10")
        assert DistributedConfig(devices=names, device_type=device_type).device_names == names


@pytest.mark.parametrize("device_type", ["", "cuda:0", "CUDA", "0", "two words"])
def test_a_device_type_is_one_word(device_type):
    (mistake,) = mistakes_of(lambda: DistributedConfig(device_type=device_type))
    assert mistake == (
        "distributed.device_type must be auto, cpu, or a type of accelerator such as cuda or mps: "
        f"got {device_type}. To choose among several devices, list them in distributed.devices."
    )


@pytest.mark.parametrize(
    ("reducer", "remedy"),
    [
        ("fsdp", "by itself. Use distributed.reducer=ddp, or leave shard_optimizer out."),
        ("single", "Use distributed.reducer=ddp, or leave shard_optimizer out."),
        ("data_parallel", "Use distributed.reducer=ddp, or leave shard_optimizer out."),
    ],
)
def test_the_optimizer_is_shared_out_under_ddp(reducer, remedy):
    (mistake,) = mistakes_of(lambda: DistributedConfig(reducer=reducer, shard_optimizer=True))
    assert mistake.startswith(f"distributed.shard_optimizer is for distributed.reducer ddp: got {reducer}, ")
    assert mistake.endswith(remedy)
    DistributedConfig(equality="exact", shard_optimizer=True)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_gradients_travel_compressed_under_ddp_in_close(name):
    (mistake,) = mistakes_of(lambda: DistributedConfig(compression=name, reducer="fsdp"))
    assert mistake.endswith(f"got {name} and fsdp. Use distributed.reducer=ddp, or leave compression out.")
    (mistake,) = mistakes_of(lambda: DistributedConfig(compression=name, equality="exact"))
    assert f"got {name} and distributed.equality exact. Leave compression out, or use" in mistake
    assert DistributedConfig(compression=name, shard_optimizer=True).compression == name


def test_batch_norm_is_synchronised_under_ddp_in_close():
    for reducer in ("single", "data_parallel", "balanced_data_parallel", "fsdp"):
        (mistake,) = mistakes_of(
            lambda reducer=reducer: DistributedConfig(sync_batch_norm=True, reducer=reducer)
        )
        assert mistake.endswith(f"got {reducer}. Use distributed.reducer=ddp, or leave sync_batch_norm out.")
    (mistake,) = mistakes_of(lambda: DistributedConfig(sync_batch_norm=True, equality="exact"))
    assert mistake.startswith("distributed.sync_batch_norm depends on the number of processes")
    assert "Leave sync_batch_norm out: BatchNorm's statistics are merged over the lanes" in mistake
    assert DistributedConfig(sync_batch_norm=True).sync_batch_norm


def test_the_launcher_kubernetes_needs_an_image():
    (mistake,) = mistakes_of(lambda: DistributedConfig(launcher="kubernetes"))
    assert mistake == (
        "distributed.launcher kubernetes needs an image that has lanewise and your code. "
        "Set distributed.kubernetes.image."
    )
    DistributedConfig(launcher="kubernetes", kubernetes={"image": "digits:1"}, nodes=2)
    DistributedConfig()


def test_what_is_for_a_launcher_is_known_of_each_key():
    """A key that was not among these reached the pods of kubernetes, for which it says nothing."""
    names = [field.name for field in fields(DistributedConfig)]
    assert tuple(names[names.index("launcher") :]) == DistributedConfig.OF_LAUNCHERS
    config = DistributedConfig(
        devices=2, equality="exact", launcher="ssh", hosts=("a",), min_nodes=1, host_seconds=5
    )
    assert config.on_this_machine() == DistributedConfig(devices=2, equality="exact")
