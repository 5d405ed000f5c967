"""The device and the backend of a run, on machines with and without GPUs."""

import pytest
import torch

from lanewise.errors import ConfigError
from lanewise.world.device import choose_devices


@pytest.fixture
def has_gpus(monkeypatch):
    """Pretend that the machine has this many GPUs, none of which may be touched."""

    def pretend(num_gpus: int) -> None:
        def touch(*_args):
            raise AssertionError("a GPU was touched")

        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "_lazy_init", touch)

    return pretend


@pytest.mark.parametrize(
    ("num_gpus", "device_type", "backend", "processes", "chosen"),
    [
        (0, "auto", "auto", 1, (["cpu"], "gloo")),
        (0, "auto", "auto", 2, (["cpu", "cpu"], "gloo")),
        (0, "cpu", "auto", 1, (["cpu"], "gloo")),
        (0, "auto", "gloo", 1, (["cpu"], "gloo")),
        (4, "auto", "auto", 1, (["cuda:0"], "nccl")),
        (4, "auto", "auto", 4, (["cuda:0", "cuda:1", "cuda:2", "cuda:3"], "nccl")),
        (4, "cuda", "auto", 2, (["cuda:0", "cuda:1"], "nccl")),
        (4, "cuda", "gloo", 2, (["cuda:0", "cuda:1"], "gloo")),
        (4, "cuda", "nccl", 1, (["cuda:0"], "nccl")),
        (4, "cpu", "auto", 2, (["cpu", "cpu"], "gloo")),
    ],
)
def test_what_is_chosen(has_gpus, num_gpus, device_type, backend, processes, chosen):
    has_gpus(num_gpus)
    assert choose_devices(device_type, backend, processes) == chosen


@pytest.mark.parametrize("device_type", ["auto", "cuda"])
@pytest.mark.parametrize(("num_gpus", "are"), [(1, "is 1"), (2, "are 2")])
def test_more_processes_than_gpus(has_gpus, num_gpus, are, device_type):
    has_gpus(num_gpus)
    with pytest.raises(ConfigError) as caught:
        choose_devices(device_type, "auto", 3)
    (mistake,) = caught.value.mistakes
    assert mistake == (
        f"distributed.devices asks for more GPUs than this machine has: got 3, there {are}. "
        f"Use --distributed.devices {num_gpus}, or --distributed.device_type cpu."
    )


def test_gpus_where_there_are_none(has_gpus):
    has_gpus(0)
    with pytest.raises(ConfigError, match="this machine has no GPU that torch can use") as caught:
        choose_devices("cuda", "auto", 2)
    assert "--distributed.device_type cpu" in str(caught.value)


def test_nccl_where_there_are_no_gpus(has_gpus):
    has_gpus(0)
    with pytest.raises(ConfigError, match="nccl"):
        choose_devices("auto", "nccl", 2)


@pytest.mark.parametrize(
    ("names", "backend"),
    [(["cuda:1", "cuda:0"], "nccl"), (["cuda:0", "cuda:0"], "gloo"), (["cpu", "cpu"], "gloo")],
)
def test_named_devices_are_taken_and_a_shared_gpu_needs_gloo(has_gpus, names, backend):
    has_gpus(2)
    assert choose_devices("auto", "auto", 2, names) == (names, backend)


def test_a_named_gpu_that_is_not_there(has_gpus):
    has_gpus(2)
    with pytest.raises(ConfigError, match="names cuda:2, which this machine lacks: there are 2"):
        choose_devices("auto", "auto", 2, ["cuda:0", "cuda:2"])
