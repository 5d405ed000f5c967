"""Which modules fsdp gathers one at a time, and what it cannot shard."""

import re

import pytest
import torch
from torch import nn

from lanewise.errors import ConfigError, LanewiseError, TaskError
from lanewise.reduce import find_blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))


class Activation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ReLU()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(2, 3)


def names_of(model: nn.Module, blocks: list[nn.Module]) -> list[str]:
    return [name for name, module in model.named_modules() if any(module is block for block in blocks)]


def find(model: nn.Module, *names: str) -> list[str]:
    return names_of(model, find_blocks(model, names))


def test_the_outermost_modules_that_a_list_repeats_are_found():
    assert find(Model()) == ["layers.0", "layers.1", "layers.2"]


def test_those_of_transformers_and_residual_networks_are_found():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)
    assert find(encoder) == ["layers.0", "layers.1"]
    stages = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(Block(), Block()), nn.Sequential(Block()))
    assert find(stages) == ["1.0", "1.1"]  # of one block alone nobody knows that it is one


def test_what_has_no_parts_or_no_parameters_is_no_block():
    assert find(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    gates = nn.ModuleList(nn.ModuleDict({"gate": nn.ReLU()}) for _ in range(2))
    assert find(gates) == []
    layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2))
    assert find(nn.ModuleList(Activation() for _ in range(2))) == []
    assert find(layers) == ["0", "1"]


def test_of_a_dict_nobody_knows_which_ones_a_lane_runs():
    assert find(nn.ModuleDict({"de": Block(), "fr": Block()})) == []


def test_a_module_that_is_there_under_several_names_shares_nothing():
    layer = Block()
    model = nn.ModuleList([layer, layer])
    assert find(model) == []
    assert find(model, "Block") == ["0"]


def test_named_classes_are_found_wherever_they_are_and_those_inside_first():
    assert find(Model(), "Linear") == [f"layers.{i}.inner.{j}.0" for i in range(3) for j in range(2)] + [
        "head"
    ]
    model = Model()
    order = find_blocks(model, ["Block", "Linear"])
    assert order.index(model.layers[0].inner[0][0]) < order.index(model.layers[0])
    assert len(order) == 3 + 7


def test_the_model_itself_is_no_block():
    assert "names Block, and the model has no module of that class or name in it" in str(
        fails(Block(), "Block")
    )


def fails(model: nn.Module, *names: str) -> LanewiseError:
    with pytest.raises((ConfigError, TaskError)) as caught:
        find_blocks(model, names)
    return caught.value


def test_a_class_that_is_not_there_is_an_error_with_the_nearest():
    error = fails(Model(), "Blok")
    assert isinstance(error, ConfigError)
    assert "distributed.fsdp.blocks names Blok" in str(error)
    assert "Did you mean Block?" in str(error)


def test_a_block_that_shares_a_parameter_is_an_error_that_names_both():
    model = Model()
    model.head.weight = model.embedding.weight  # of what is in no block
    assert find(model)
    assert "head.weight is also a parameter of embedding" in str(fails(model, "Embedding"))
    model.layers[1].inner[0][0].bias = model.layers[2].inner[1][0].bias
    assert re.search(
        r"layers\.[12]\.inner\.\d\.0\.bias is also a parameter of layers\.[12]", str(fails(model))
    )


def test_what_fsdp_cannot_shard_is_named():
    model = Model()
    model.scale = nn.Parameter(torch.tensor(1.0))
    assert "parameter scale is a scalar" in str(fails(model))
    model.scale = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    assert "parameter scale is torch.complex64, and fsdp shards real parameters only" in str(fails(model))
    model = Model()
    model.layers[1].double()
    assert find(model)  # a block of its own dtype can be gathered
    model.layers[1].inner[0].float()
    assert "Block inner.0.0.weight is torch.float32" in str(fails(model))
    model = Model()
    model.head.double()
    assert "embedding.weight is torch.float32 and head.weight is torch.float64" in str(fails(model))
    model.head.requires_grad_(False)
    assert find(model)  # what is frozen is not reduced
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    assert "parameter weight is not contiguous (channels_last" in str(fails(convolution))
