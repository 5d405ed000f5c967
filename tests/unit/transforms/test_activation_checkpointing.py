"""Which blocks run again."""

import pytest
import torch
from torch import nn

from lanewise.errors import ConfigError, TaskError
from lanewise.transforms import checkpoint_activations


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.decoder = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 1)


def segments(model: nn.Module) -> list[list[str]]:
    """Return the names of the blocks that run again, those of a segment together."""
    found: dict[object, list[str]] = {}
    for name, module in model.named_modules():
        if "forward" in vars(module):
            found.setdefault(module.forward.segment, []).append(name)
    return list(found.values())


@pytest.mark.parametrize(
    ("blocks", "every", "expected"),
    [
        ("auto", 1, [["encoder.0"], ["encoder.1"], ["encoder.2"], ["decoder.0"], ["decoder.1"]]),
        ("auto", 2, [["encoder.0", "encoder.1"], ["encoder.2"], ["decoder.0", "decoder.1"]]),
        (["Block"], 9, [["encoder.0", "encoder.1", "encoder.2"], ["decoder.0", "decoder.1"]]),
        (["decoder.*"], 2, [["decoder.0", "decoder.1"]]),
        (["head", "encoder.1.inner"], 1, [["encoder.1.inner"], ["head"]]),
    ],
)
def test_segments_are_of_blocks_with_one_parent(blocks, every, expected):
    model = Model()
    names = list(model.state_dict())
    checkpoint_activations(model, blocks, every=every)
    assert segments(model) == expected
    assert list(model.state_dict()) == names


def test_a_model_without_blocks_says_what_to_name():
    with pytest.raises(ConfigError, match=r"auto, and the model repeats no block.*Name classes or modules"):
        checkpoint_activations(nn.Linear(3, 3))
    with pytest.raises(ConfigError, match=r"names Blok.*Did you mean Block\?"):
        checkpoint_activations(Model(), ["Blok"])


def test_a_compiled_model_cannot_be_looked_into():
    compiled = torch.compile(Model(), backend="eager")
    with pytest.raises(TaskError, match=r"the model is compiled.*compile: auto"):
        checkpoint_activations(compiled)
    model = Model()
    model.encoder[1].compile(backend="eager")
    with pytest.raises(TaskError, match=r"encoder.1 is compiled"):
        checkpoint_activations(model)
