"""The devices and the backend of a run, on machines with and without an accelerator."""

import pytest
import torch

from lanewise.errors import ConfigError
from lanewise.processes.device.choice import (
    accelerator_type,
    choose_backend,
    choose_devices,
    count_accelerators,
)


@pytest.fixture
def has(monkeypatch):
    """Pretend that the machine has so many devices of a type, none of which may be touched."""

    def pretend(count: int, device_type: str = "cuda") -> None:
        def touch(*_args):
            raise AssertionError("a device was touched")

        there = torch.device(device_type) if device_type != "cpu" else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: there)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        for name in ("current_device_index", "current_stream", "set_device_index", "synchronize"):
            monkeypatch.setattr(torch.accelerator, name, touch)
        monkeypatch.setattr(torch.cuda, "_lazy_init", touch)

    return pretend


@pytest.mark.parametrize(
    ("count", "device_type", "num_devices", "chosen"),
    [
        (0, "auto", 1, ["cpu"]),
        (0, "auto", 2, ["cpu", "cpu"]),
        (0, "cpu", 1, ["cpu"]),
        (4, "auto", 1, ["cuda:0"]),
        (4, "auto", 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (4, "cuda", 2, ["cuda:0", "cuda:1"]),
        (4, "cpu", 2, ["cpu", "cpu"]),
    ],
)
def test_what_is_chosen(has, count, device_type, num_devices, chosen):
    has(count)
    assert choose_devices(device_type, num_devices) == chosen


@pytest.mark.parametrize("device_type", ["xpu", "mps", "hpu"])
@pytest.mark.parametrize("asked", ["auto", None])
def test_whatever_torch_reports_is_an_accelerator(has, device_type, asked):
    has(2, device_type)
    assert choose_devices(asked or device_type, 2) == [f"{device_type}:0", f"{device_type}:1"]
    assert choose_devices("auto", 2, [f"{device_type}:1", f"{device_type}:0"])[0] == f"{device_type}:1"
    assert choose_devices("cpu", 2) == ["cpu", "cpu"]


def test_devices_are_counted_by_type(has):
    has(3, "xpu")
    assert accelerator_type() == "xpu"
    assert [count_accelerators(one) for one in ("auto", "xpu", "cuda", "cpu")] == [3, 3, 0, 0]
    has(0, "cuda")  # a torch that was built for GPUs, on a machine without one
    assert accelerator_type() is None
    assert count_accelerators() == 0
    has(0, "cpu")
    assert accelerator_type() is None
    assert count_accelerators() == 0


@pytest.mark.parametrize("device_type", ["auto", "cuda"])
@pytest.mark.parametrize(("count", "are"), [(1, "is 1"), (2, "are 2")])
def test_more_devices_than_there_are(has, count, are, device_type):
    has(count)
    with pytest.raises(ConfigError) as caught:
        choose_devices(device_type, 3)
    (mistake,) = caught.value.mistakes
    assert mistake == (
        f"distributed.devices asks for more cuda devices than this machine has: got 3, there {are}. "
        f"Use --distributed.devices {count}, or --distributed.device_type cpu."
    )


@pytest.mark.parametrize("built_for", ["cuda", "cpu"])
def test_an_accelerator_where_there_is_none(has, built_for):
    has(0, built_for)
    with pytest.raises(ConfigError) as caught:
        choose_devices("cuda", 2)
    (mistake,) = caught.value.mistakes
    assert mistake == (
        "distributed asks for devices of the type cuda, but torch finds none here: there is only the CPU. "
        "Use --distributed.device_type cpu."
    )


@pytest.mark.parametrize(("device_type", "names"), [("cuda", ()), ("auto", ("cuda:0", "cuda:1"))])
def test_an_accelerator_of_another_type(has, device_type, names):
    has(2, "xpu")
    with pytest.raises(ConfigError) as caught:
        choose_devices(device_type, 2, names)
    (mistake,) = caught.value.mistakes
    assert mistake == (
        "distributed asks for devices of the type cuda, but torch finds none here: "
        "there are 2 of the type xpu. Use --distributed.device_type xpu."
    )


@pytest.mark.parametrize("names", [["cuda:1", "cuda:0"], ["cuda:0", "cuda:0"], ["cpu", "cpu"]])
def test_named_devices_are_taken(has, names):
    has(2)
    assert choose_devices("auto", 2, names) == names


def test_numbered_devices_are_those_of_the_accelerator(has):
    has(3, "xpu")
    assert choose_devices("auto", 2, ["auto:2", "auto:0"]) == ["xpu:2", "xpu:0"]
    with pytest.raises(ConfigError, match="names xpu:3, which this machine lacks"):
        choose_devices("auto", 1, ["auto:3"])


@pytest.mark.parametrize(("count", "device_type"), [(0, "auto"), (2, "cpu")])
def test_numbered_devices_on_the_cpu_are_an_error_with_the_remedy(has, count, device_type):
    has(count)
    with pytest.raises(ConfigError) as caught:
        choose_devices(device_type, 2, [f"{device_type}:0", f"{device_type}:1"])
    (mistake,) = caught.value.mistakes
    assert mistake == (
        "distributed.devices numbers the devices of an accelerator: got [0, 1], and this run is for the CPU. "
        "Use --distributed.devices 2, for as many processes."
    )


def test_a_named_device_that_is_not_there(has):
    has(2)
    with pytest.raises(ConfigError, match="names cuda:2, which this machine lacks: there are 2"):
        choose_devices("auto", 2, ["cuda:0", "cuda:2"])


@pytest.mark.parametrize(
    ("backend", "devices", "chosen"),
    [
        ("auto", ["cpu", "cpu"], "gloo"),
        ("gloo", ["cpu", "cpu"], "gloo"),
        ("auto", ["cuda:0", "cuda:1"], "nccl"),
        ("gloo", ["cuda:0", "cuda:1"], "gloo"),
        ("nccl", ["cuda:0", "cuda:1"], "nccl"),
        ("auto", ["cuda:0", "cuda:0"], "gloo"),
        ("auto", ["xpu:0", "xpu:1"], "xccl"),
    ],
)
def test_the_backend_is_the_one_that_torch_has_for_the_devices(backend, devices, chosen):
    assert choose_backend(backend, devices, 2) == chosen
    assert choose_backend(backend, devices[:1], 1) in (chosen, "nccl")


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cpu"), ("nccl", "xpu:0"), ("gloo", "mps:0")])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backend_that_does_not_serve_the_devices(backend, device, world_size):
    with pytest.raises(ConfigError) as caught:
        choose_backend(backend, [device], world_size)
    (mistake,) = caught.value.mistakes
    assert mistake == (
        f"distributed.backend {backend} cannot be used with devices of the type {device.partition(':')[0]}. "
        "Use --distributed.backend auto."
    )


@pytest.mark.parametrize("device_type", ["mps", "mtia"])  # torch names gloo for mps, and none for mtia
def test_one_process_needs_no_backend_and_several_need_one(device_type):
    choose_backend("auto", [f"{device_type}:0"], 1)
    with pytest.raises(ConfigError) as caught:
        choose_backend("auto", [f"{device_type}:0"], 2)  # on two machines
    (mistake,) = caught.value.mistakes
    assert mistake == (
        f"torch has no backend that connects processes on {device_type} devices: got 2 processes. "
        "Use one process, or --distributed.device_type cpu."
    )


def test_processes_that_share_a_device_need_gloo():
    with pytest.raises(ConfigError) as caught:
        choose_backend("auto", ["xpu:0", "xpu:0"], 2)
    (mistake,) = caught.value.mistakes
    assert mistake == (
        "torch has no backend that connects processes on xpu devices, several on one: got 2 processes. "
        "Use one process for each device, or --distributed.device_type cpu."
    )
