"""What a model is made of, in a line for each part."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from lanewise.engine.run.build import build_run
from lanewise.engine.run.summary import summarize
from lanewise.processes.world.world import LocalWorld
from tests.distributed.tasks import Smooth, configure


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(4))
        self.head = nn.Linear(8, 2)
        self.scale = nn.Parameter(nn.init.ones_(nn.Linear(1, 1).weight))
        self.embedding.weight.requires_grad = False


def test_equal_parts_in_a_row_share_a_line_and_containers_are_opened():
    lines = summarize(Reader()).splitlines()
    assert [line.split()[0] for line in lines] == [
        "embedding",
        "layers.0.0",
        "layers.1.0",
        "layers.2.0",
        "blocks.0",
        "head",
        "(own)",
    ]
    assert lines[0].split()[2:4] == ["8,000", "parameters,"]
    assert "not trained" in lines[0]
    assert lines[4].startswith("blocks.0 to blocks.3")
    assert lines[4].split()[4:6] == ["2,400", "parameters"]
    assert lines[-1].split() == ["(own)", "Reader", "1", "parameters", "3.815e-06", "MiB"]


def test_a_model_of_many_parts_ends_with_the_sum_of_the_others():
    model = nn.Sequential(*(nn.Linear(1, width) for width in range(1, 31)))
    *_, last = summarize(model).splitlines()
    assert last.split()[:3] == ["10", "further", "parts"]
    assert f"{sum(2 * width for width in range(21, 31)):,} parameters" in last


def test_a_model_without_parameters_has_no_line():
    assert summarize(nn.ReLU()) == ""


class HeadOnly(Smooth):
    """Gives the optimizer some of what can be trained."""

    def parameter_groups(self, model: nn.Module) -> Any:
        return [model[3].weight] if self.num_samples == 50 else model.parameters()


@pytest.mark.parametrize("num_samples", [50, 53])
def test_what_is_in_no_group_of_the_optimizer_is_not_counted_as_trained_and_is_named(caplog, num_samples):
    """It was never trained, and counted as trained."""
    with caplog.at_level(logging.INFO):
        build_run(configure(HeadOnly, num_samples=num_samples), LocalWorld(torch.device("cpu")))
    said = "not trained, as in no group of the optimizer (add or freeze them): 0.weight, 1.weight, 1.bias, "
    assert (said in caplog.text) is (num_samples == 50)
    if num_samples == 50:
        lines = [
            line.split("parameters")[1].split("MiB")[0] for line in caplog.text.splitlines() if "MiB" in line
        ]
        assert lines[:3] == [
            ", not trained  0.001892 ",
            ", not trained  0.0005493 ",
            ", 248 trained  0.002129 ",
        ]
        assert "trained: 248\n" in caplog.text
