"""Small results of operators on fake tensors, as large as on real ones."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lanewise.commands.plan import real_sizes
from lanewise.commands.plan.real_sizes import RealSizes
from lanewise.processes.device.live_storage import LiveStorage


def lstm() -> None:
    nn.LSTM(8, 16, num_layers=2)(torch.zeros(30, 4, 8))[0].sum().backward()


def loss() -> None:
    expanded = torch.zeros(30, 1).expand(30, 4)
    F.mse_loss(torch.zeros(30, 4, requires_grad=True) * 2, expanded).backward()


def peak_of(run: Callable[[], None], *, is_fake: bool) -> tuple[int, set[str]]:
    with FakeTensorMode() if is_fake else nullcontext(), RealSizes() as sizes, LiveStorage() as live:
        run()
    return live.peak_bytes, sizes.not_counted


@pytest.mark.parametrize("run", [lstm, loss])
def test_fake_tensors_take_as_much_as_real_ones(run):
    (fake, not_counted), (real, _) = (peak_of(run, is_fake=is_fake) for is_fake in (True, False))
    assert fake == pytest.approx(real, rel=1e-3)
    assert not not_counted


def test_an_operator_runs_once_for_each_of_its_shapes(monkeypatch):
    ran = []
    run_real = real_sizes._run_real
    monkeypatch.setattr(real_sizes, "_run_real", lambda *given: ran.append(given) or run_real(*given))
    with FakeTensorMode(), RealSizes():
        for size in (10, 10, 20, 20):
            F.mse_loss(torch.zeros(size), torch.zeros(size))
    assert len(ran) == 2


@pytest.mark.parametrize("free", [10**5, 10])
def test_what_does_not_fit_is_not_tried_but_named(monkeypatch, free):
    monkeypatch.setattr(real_sizes, "free_bytes", lambda *_: free)
    assert "aten.mkldnn_rnn_layer.default" in peak_of(lstm, is_fake=True)[1]
    assert ("aten.mse_loss.default" in peak_of(loss, is_fake=True)[1]) == (free == 10)


def test_an_operator_that_fails_on_real_tensors_is_named(monkeypatch):
    def refuse(*_: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(real_sizes, "_run_real", refuse)
    assert peak_of(loss, is_fake=True)[1] == {"aten.mse_loss.default"}
