"""Which blocks run again."""

import pytest
import torch
from torch import nn

from lanewise.engine.transforms import checkpoint_activations
from lanewise.engine.transforms.checkpointed import Checkpointed
from lanewise.errors import ConfigError, TaskError


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


def checkpointed(model: nn.Module) -> list[str]:
    """Return the names of the blocks that run again."""
    return [name for name, module in model.named_modules() if isinstance(module.forward, Checkpointed)]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ("auto", ["encoder.0", "encoder.1", "encoder.2", "decoder.0", "decoder.1"]),
        (["Block"], ["encoder.0", "encoder.1", "encoder.2", "decoder.0", "decoder.1"]),
        (["decoder.*"], ["decoder.0", "decoder.1"]),
        (["head", "encoder.1.inner"], ["encoder.1.inner", "head"]),
    ],
)
def test_of_blocks_in_each_other_the_outermost_runs_again(blocks, expected):
    model = Model()
    names = list(model.state_dict())
    checkpoint_activations(model, blocks)
    assert checkpointed(model) == expected
    assert [
        module.forward.name for module in model.modules() if isinstance(module.forward, Checkpointed)
    ] == expected
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
