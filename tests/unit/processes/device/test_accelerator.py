"""How devices of every type are used, on an accelerator that only notes what is asked of it."""

import resource
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from lanewise.processes.device import accelerator

CPU = torch.device("cpu")


class FakeStream:
    """A stream that notes what is waited for."""

    def __init__(self, device, notes, name="new"):
        self.device = torch.device(device)
        self.name = name
        self._notes = notes

    def wait_stream(self, other):
        self._notes.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def build_for(monkeypatch):
    """Pretend that torch was built for an accelerator with these functions; return what it notes."""

    def build(device_type: str, **functions) -> list[str]:
        notes: list[str] = []
        state = SimpleNamespace(index=0, stream=FakeStream(f"{device_type}:0", notes, "default"))

        @contextmanager
        def device_index(index):
            before, state.index = state.index, state.index if index is None else index
            yield
            state.index = before

        def set_stream(stream):
            notes.append(f"on {stream.name}")
            state.stream = stream

        module = SimpleNamespace(**functions)
        monkeypatch.setattr(torch, "get_device_module", lambda _device: module)
        fakes = {
            "current_accelerator": lambda: torch.device(device_type),
            "current_device_index": lambda: state.index,
            "set_device_index": lambda device: notes.append(f"use {device}"),
            "device_index": device_index,
            "current_stream": lambda _device: state.stream,
            "set_stream": set_stream,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.accelerator, name, fake)
        return notes

    caches = (accelerator.built_for, accelerator.has_streams, accelerator._side_stream)
    for one in caches:
        one.cache_clear()
    yield build
    for one in caches:
        one.cache_clear()


def test_the_cpu_is_always_in_use():
    accelerator.set_current_device(CPU)
    assert not accelerator.has_streams(CPU)
    assert accelerator.new_stream(CPU) is None
    assert accelerator.float64_device(CPU) == CPU
    with accelerator.side_stream(CPU), accelerator.on_stream(None):
        tensor = torch.ones(3)
    assert accelerator.start_copy_to_host(tensor)() is tensor


def test_the_current_device_of_a_thread(build_for):
    notes = build_for("xpu")
    accelerator.set_current_device(torch.device("xpu:1"))
    assert notes == ["use xpu:1"]


def test_an_accelerator_has_streams_if_its_module_has_them(build_for):
    build_for("xpu", Stream=object)
    assert accelerator.has_streams(torch.device("xpu:0"))
    build_for("mps")
    assert not accelerator.has_streams(torch.device("mps:0"))
    assert accelerator.new_stream(torch.device("mps:0")) is None


def test_float64_is_computed_where_it_exists(build_for):
    assert accelerator.float64_device(torch.device("mps:0")) == CPU
    assert accelerator.float64_device(torch.device("cuda:1")) == torch.device("cuda:1")


def test_the_name_of_a_device(build_for):
    build_for("xpu", get_device_name=lambda device: f"Model of {device}")
    assert accelerator.device_name(torch.device("xpu:0")) == "Model of xpu:0"
    build_for("mps")
    assert accelerator.device_name(torch.device("mps:0")) == "mps"


def test_the_most_memory_that_was_held(build_for):
    of_host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert accelerator.peak_bytes(CPU) >= of_host
    build_for("xpu", max_memory_allocated=lambda device: 100 + device.index)
    assert accelerator.peak_bytes(torch.device("xpu:7")) == 107
    build_for("mps")
    assert accelerator.peak_bytes(torch.device("mps:0")) >= of_host


@pytest.mark.parametrize("is_initialized", [False, True])
def test_an_accelerator_has_a_generator_where_it_is_in_use_and_is_never_woken(build_for, is_initialized):
    state = torch.tensor([1], dtype=torch.uint8)
    build_for(
        "cuda",
        is_initialized=lambda: is_initialized,
        get_rng_state=lambda: state,
    )
    assert (accelerator.module_in_use() is not None) == is_initialized
    assert accelerator.generator_state() is (state if is_initialized else None)


@pytest.mark.parametrize(("is_available", "is_in_bad_fork"), [(True, False), (True, True), (False, False)])
def test_an_accelerator_that_does_not_tell_whether_it_is_in_use(build_for, is_available, is_in_bad_fork):
    build_for("mps", is_available=lambda: is_available, _is_in_bad_fork=lambda: is_in_bad_fork)
    assert (accelerator.module_in_use() is not None) == (is_available and not is_in_bad_fork)


def test_the_generator_is_that_of_the_current_device(build_for):
    states = []
    build_for("cuda", is_initialized=lambda: True, set_rng_state=states.append)
    accelerator.set_generator_state(torch.full((1,), 7.0))
    assert states == [torch.full((1,), 7.0)]


def test_a_side_stream_waits_for_what_was_enqueued_and_can_be_entered_twice(build_for, monkeypatch):
    notes = build_for("xpu", Stream=object)
    monkeypatch.setattr(torch, "Stream", lambda device: FakeStream(device, notes, "side"))
    device = torch.device("xpu:0")
    with accelerator.side_stream(device), accelerator.side_stream(device):
        notes.append("work")
    assert notes == [
        "side waits for default",
        "on side",
        "side waits for side",
        "on side",
        "work",
        "on side",
        "on default",
    ]


def test_the_stream_is_put_back_after_an_error(build_for):
    notes = build_for("xpu", Stream=object)
    with pytest.raises(ZeroDivisionError), accelerator.on_stream(FakeStream("xpu:0", notes)):
        _ = 1 / 0
    assert notes == ["on new", "on default"]


def test_moments_of_the_host(monkeypatch):
    now = iter([5.0, 7.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    assert accelerator.seconds_between(accelerator.moment(CPU), accelerator.moment(CPU)) == 2.5


def test_moments_of_a_device(build_for, monkeypatch):
    notes = build_for("xpu", Stream=object)

    class FakeEvent:
        def __init__(self, device, *, enable_timing):
            assert device == torch.device("xpu:0")
            assert enable_timing

        def record(self, stream):
            notes.append(f"record on {stream.name}")

        def synchronize(self):
            notes.append("wait")

        def elapsed_time(self, _end):
            return 1500.0  # milliseconds

    monkeypatch.setattr(torch, "Event", FakeEvent)
    device = torch.device("xpu:0")
    start, end = accelerator.moment(device), accelerator.moment(device)
    assert notes == ["record on default"] * 2
    assert accelerator.seconds_between(start, end) == 1.5
    assert notes[2:] == ["wait"]
