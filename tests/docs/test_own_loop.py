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


@pytest.fixture(scope="module")
def loop() -> str:
    """Return the code of the section on a hidden state."""
    section = PAGE.read_text().partition("\n## A hidden state from batch to batch\n")[2]
    return section.partition("```python\n")[2].partition("```")[0]


def test_a_hidden_state_by_column_is_the_same_on_any_number_of_processes(tmp_path, loop):
    weights = []
    for num_processes in (1, 2, 3):
        folder = tmp_path / str(num_processes)
        folder.mkdir()
        (folder / "loop.py").write_text(BEFORE + loop + AFTER)
        run_script(folder / "loop.py", cwd=folder, num_processes=num_processes)
        weights.append((folder / "model.safetensors").read_bytes())
    assert weights == weights[:1] * 3
