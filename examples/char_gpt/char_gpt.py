"""A character-level GPT on any text file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lanewise import Callback, Loss, Task
from lanewise.errors import DataError


@dataclass(frozen=True)
class GPTConfig:
    """Size of the model."""

    num_layers: int = 4
    num_heads: int = 4
    width: int = 128
    context: int = 64
    """Characters that the model looks back."""
    dropout: float = 0.1
    tied_head: bool = True
    """Whether the head's weight is the embedding's."""


class Block(nn.Module):
    """Attention and a two-layer network, each added to what comes in."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads, self.dropout = config.num_heads, config.dropout
        self.attention_norm = nn.LayerNorm(config.width)
        self.queries_keys_values = nn.Linear(config.width, 3 * config.width, bias=False)
        self.attention_out = nn.Linear(config.width, config.width, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(config.width),
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, time, width]
        heads = self.queries_keys_values(self.attention_norm(x)).unflatten(2, (3, self.num_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, time, width / heads]
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        added: torch.Tensor = self.mlp(x)
        return x + added


class GPT(nn.Module):
    """A decoder over characters."""

    alphabet: Sequence[str] = ()
    """Which character each token is."""

    def __init__(self, config: GPTConfig, vocabulary_size: int) -> None:
        super().__init__()
        self.config = config
        self.characters = nn.Embedding(vocabulary_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*[Block(config) for _ in range(config.num_layers)])
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, vocabulary_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("attention_out.weight", "mlp.3.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.num_layers) ** 0.5 if residual else 0.02)
        if config.tied_head:
            self.head.weight = self.characters.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # [batch, time] -> [batch, time, vocabulary]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.characters(tokens) + self.positions(positions)
        logits: torch.Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor, num_characters: int) -> torch.Tensor:
        """Continue one text [time] by characters drawn from the model."""
        for _ in range(num_characters):
            logits = self(tokens[None, -self.config.context :])[0, -1]
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(0), 1)])
        return tokens


class Windows(Dataset[torch.Tensor]):
    """A text as windows of `context + 1` characters, in training each from a random place in its stretch."""

    def __init__(self, text: torch.Tensor, context: int, *, is_random: bool) -> None:
        self.text, self.context, self.is_random = text, context, is_random

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self.context
        if self.is_random:
            start = min(start + int(torch.randint(self.context, ())), len(self.text) - self.context - 1)
        return self.text[start : start + self.context + 1]


class CharGPT(Task):
    """Predicts the next character.

    Args:
        path: a text file in UTF-8; without it, the documentation that Python carries.
        model: size of the model.
        held_out: share of the text, at its end, that is kept for evaluation.
    """

    def __init__(
        self, path: Path | None = None, model: GPTConfig | None = None, held_out: float = 0.1
    ) -> None:
        self.config = model or GPTConfig()
        if path is not None and not path.is_file():
            raise DataError(f"there is no text file {path}. Name one by --task.init_args.path.")
        text = path.read_text(encoding="utf-8") if path else "\n".join(topics.values())
        self.alphabet = sorted(set(text))
        index = {character: number for number, character in enumerate(self.alphabet)}
        self.text = torch.tensor([index[character] for character in text])
        self.num_train = int(len(text) * (1 - held_out))

    def build_model(self) -> GPT:
        model = GPT(self.config, len(self.alphabet))
        model.alphabet = self.alphabet
        return model

    def train_dataset(self) -> Dataset[torch.Tensor]:
        return Windows(self.text[: self.num_train], self.config.context, is_random=True)

    def eval_datasets(self) -> Mapping[str, Dataset[torch.Tensor]]:
        return {"held_out": Windows(self.text[self.num_train :], self.config.context, is_random=False)}

    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(batch[:, :-1])
        return logits

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> Loss:
        targets = batch[:, 1:].flatten()
        return Loss(F.cross_entropy(outputs.flatten(0, 1), targets, reduction="sum"), weight=len(targets))


class Writes(Callback):
    """Lets the model write before the training, after each evaluation and after the training.

    Args:
        num_characters: how many it writes each time.
    """

    def __init__(self, num_characters: int = 160) -> None:
        self.num_characters = num_characters

    def on_model(self, epoch: int, step: int, model: nn.Module) -> None:
        assert isinstance(model, GPT)
        start = torch.zeros(1, dtype=torch.long, device=model.positions.weight.device)
        text = "".join(model.alphabet[token] for token in model.generate(start, self.num_characters)[1:])
        self.log_text("text", text)
        print(f"--- after {step} steps\n{text}\n", flush=True)
