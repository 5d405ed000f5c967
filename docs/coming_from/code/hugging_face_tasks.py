"""A GPT-2 and a BERT of Hugging Face as tasks: each loss is weighted by the tokens that it is a mean over."""

from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from lanewise import Loss, Task

# Ragged sentences, a token for each byte; 0 and 1 occur in none of them.
SENTENCES = [torch.tensor(list(line.encode())) for line in topics["class"].splitlines() if line][:45]
PADDING, MASK = 0, 1

GPT2_SIZE = GPT2Config(
    vocab_size=256, n_positions=128, n_embd=32, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
)
BERT_SIZE = BertConfig(
    vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
)


class GPT2(Task):
    """Predicts the next token. The model shifts the labels, so the first one of each row is no target."""

    def build_model(self) -> nn.Module:
        return GPT2LMHeadModel(GPT2_SIZE)

    def train_dataset(self) -> Any:
        return SENTENCES

    def collate(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        tokens = pad_sequence(samples, batch_first=True)
        labels = tokens.where(tokens != PADDING, -100)
        return {"input_ids": tokens, "attention_mask": (tokens != PADDING).long(), "labels": labels}

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(**batch)

    def loss(self, outputs: Any, batch: Any) -> Loss:
        return Loss.mean(outputs.loss, weight=(batch["labels"][:, 1:] != -100).sum())


class Bert(Task):
    """Predicts masked tokens: other ones in every epoch, and the same ones on any number of processes."""

    def build_model(self) -> nn.Module:
        return BertForMaskedLM(BERT_SIZE)

    def train_dataset(self) -> Any:
        return SENTENCES

    def collate(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        tokens = pad_sequence(samples, batch_first=True)
        is_target = (tokens != PADDING) & (torch.rand(tokens.shape) < 0.15)
        inputs, labels = tokens.masked_fill(is_target, MASK), tokens.where(is_target, -100)
        return {"input_ids": inputs, "attention_mask": (tokens != PADDING).long(), "labels": labels}

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(**batch)

    def loss(self, outputs: Any, batch: Any) -> Loss:
        return Loss.mean(outputs.loss, weight=(batch["labels"] != -100).sum())
