"""The loops of docs/own_loop.md that stand there as a whole train as a plain loop does."""

from pathlib import Path

import pytest

from tests.script import run_script

PAGE = Path(__file__).parents[2] / "docs" / "own_loop.md"

BEFORE = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import lanewise


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.words, self.out = nn.Embedding(7, 8), nn.Linear(8, 7)
        self.memory = nn.RNN(8, 8, batch_first=True)

    def forward(self, tokens, hidden):
        outputs, hidden = self.memory(self.words(tokens), hidden)
        return self.out(outputs), hidden


tokens = torch.arange(20 * 90).square() % 7
num_epochs = 2
"""

AFTER = """
plain = LanguageModel()
optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
columns = tokens.view(COLUMNS, -1)
for _ in range(num_epochs):
    hidden = torch.zeros(1, COLUMNS, 8)
    for start in range(0, 89, LENGTH):
        chunk = columns[:, start : start + LENGTH + 1]
        logits, hidden = plain(chunk[:, :-1], hidden.detach())
        optimizer.zero_grad()
        cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten()).backward()
        optimizer.step()
for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(mine, theirs)
lanes.save_model(model, "model.safetensors")
"""


BEFORE_PAIRS = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

import lanewise


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.word, self.image = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def words(self, inputs):
        return self.word(self.body(inputs).tanh())

    def images(self, pixels):
        return self.image(self.body(pixels).tanh())


values = torch.arange(50 * 4.0).view(50, 4).sin()
words = TensorDataset(values, torch.arange(50) % 3)
images = TensorDataset(values[:18].cos(), values[:18, :2])
"""

AFTER_PAIRS = """
lanes.save_model(model, "model.safetensors")
plain = TwoHeads()
optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
for step in lanes.steps(Pairs(words, images)) if lanes.world_size == 1 else ():
    micro_batches = []
    for batch in step:
        micro_batches.append(batch)
        step.backward(lanewise.Loss(model.words(batch[0][0]).sum() * 0, weight=len(batch[0][0])))
    (inputs, labels), (pixels, targets) = (
        [torch.cat(parts) for parts in zip(*of_dataset)] for of_dataset in zip(*micro_batches)
    )
    assert len(inputs) == len(pixels) == (2 if step.number == 3 else 16)
    optimizer.zero_grad()
    (cross_entropy(plain.words(inputs), labels) + 0.5 * mse_loss(plain.images(pixels), targets)).backward()
    optimizer.step()
if lanes.world_size == 1:
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
"""


def loop_of(section: str) -> str:
    """Return the code of a section of the page."""
    text = PAGE.read_text().partition(f"\n## {section}\n")[2]
    return text.partition("```python\n")[2].partition("```")[0]


@pytest.mark.parametrize(
    ("section", "before", "after"),
    [
        ("A hidden state from batch to batch", BEFORE, AFTER),
        ("Two datasets in one update", BEFORE_PAIRS, AFTER_PAIRS),
    ],
)
def test_a_loop_that_stands_there_trains_the_same_on_any_number_of_processes(
    tmp_path, section, before, after
):
    weights = []
    for num_processes in (1, 2, 3):
        folder = tmp_path / str(num_processes)
        folder.mkdir()
        (folder / "loop.py").write_text(before + loop_of(section) + after)
        run_script(folder / "loop.py", cwd=folder, num_processes=num_processes)
        weights.append((folder / "model.safetensors").read_bytes())
    assert weights == weights[:1] * 3
