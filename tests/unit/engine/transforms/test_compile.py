"""What is compiled, and what is said of it. Dynamo traces; making kernels would take seconds."""

import copy
import logging
from functools import partial
from types import MethodType

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import nn

from lanewise.config import CompileConfig
from lanewise.engine.transforms import CompilationLog, compile_forwards
from lanewise.errors import ConfigError, TaskError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of dynamo


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs)


class Breaks(Block):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        print(end="")
        return super().forward(inputs)


def model(kind: type[Block] = Block) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(*[kind() for _ in range(3)]))


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    of_torch = torch._dynamo.config.patch(automatic_dynamic_shapes=True)  # other tests leave those of exact
    with torch._inductor.config.patch(fallback_random=False), of_torch:
        yield
    torch._dynamo.reset()


def num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("blocks", ["auto", "whole"])
def test_blocks_of_a_class_are_compiled_once_and_names_stay(blocks):
    plain, compiled = model(), compile_forwards(model(), CompileConfig(blocks=blocks))
    assert list(compiled.state_dict()) == list(plain.state_dict())
    inputs = torch.randn(2, 3)
    assert torch.equal(compiled(inputs), plain(inputs))
    assert num_graphs() == 1
    assert torch._inductor.config.fallback_random


def test_a_copy_runs_its_own_weights():
    compiled = compile_forwards(model(), CompileConfig())
    copied, plain = copy.deepcopy(compiled), model()
    for module in (copied, plain):
        for parameter in module.parameters():
            parameter.data.add_(1)
    inputs = torch.randn(2, 3)
    assert torch.equal(copied(inputs), plain(inputs))
    assert not torch.equal(copied(inputs), compiled(inputs))


@pytest.mark.parametrize(("dynamic", "expected"), [(None, 2), (True, 1), (False, 3)])
def test_kernels_are_for_as_many_shapes_as_the_configuration_says(dynamic, expected):
    compiled = compile_forwards(model(), CompileConfig(dynamic=dynamic))
    for num_samples in (2, 3, 5):
        compiled(torch.randn(num_samples, 3))
    assert num_graphs() == expected


def test_what_recompiles_is_told_with_the_reason(caplog):
    caplog.set_level(logging.INFO)
    compiled, log = compile_forwards(model(), CompileConfig()), CompilationLog()
    compiled(torch.randn(2, 3))
    log.tell()
    assert caplog.messages == []
    compiled(torch.randn(3, 3))
    for _ in range(2):
        log.tell()
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("lanewise")]
    assert message.startswith("torch.compile has recompiled 1 time, the last time forward, since")
    assert "size mismatch at index 0. expected 2, actual 3" in message
    assert "\n" not in message


def test_more_recompilations_than_torch_remembers_are_all_counted(caplog):
    caplog.set_level(logging.INFO)
    compiled, log = compile_forwards(model(), CompileConfig(dynamic=False)), CompilationLog()
    torch._dynamo.utils.set_compilation_metrics_limit(2)
    try:
        for num_samples in range(2, 7):
            compiled(torch.randn(num_samples, 3))
            log.tell()
    finally:
        torch._dynamo.utils.set_compilation_metrics_limit(64)
    assert "recompiled 4 times" in caplog.text


def test_a_graph_break_is_told_once(caplog):
    compiled, log = compile_forwards(model(Breaks), CompileConfig()), CompilationLog()
    compiled(torch.randn(2, 3))
    for _ in range(2):
        log.tell()
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("lanewise")]
    assert message.startswith("torch.compile breaks the graph: ")
    assert "print" in message
    assert "\n" not in message


def test_what_cannot_be_compiled_says_why():
    with pytest.raises(ConfigError, match=r"auto, and the model repeats no block.*compile.blocks=whole"):
        compile_forwards(nn.Linear(3, 3), CompileConfig())
    patched = model()
    patched[1][0].forward = MethodType(Breaks.forward, patched[1][0])
    with pytest.raises(TaskError, match="a Block has a forward that was set on the object"):
        compile_forwards(patched, CompileConfig())
