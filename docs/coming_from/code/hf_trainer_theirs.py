"""A small GPT-2 and the Trainer of transformers."""

from pydoc_data.topics import topics
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

# Ragged sentences, a token for each byte.
texts = [line for line in topics["class"].splitlines() if line][:45]
sentences = [{"input_ids": torch.tensor(list(text.encode()))} for text in texts]


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Pad with 0, which is no target."""
    tokens = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    is_token = tokens != 0
    labels = tokens.where(is_token, -100)
    return {"input_ids": tokens, "attention_mask": is_token.long(), "labels": labels}


size = {"vocab_size": 256, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=None, eos_token_id=None))
arguments = TrainingArguments(
    "output",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    learning_rate=1e-3,
    lr_scheduler_type="linear",
    report_to="none",
)
Trainer(model, arguments, data_collator=collate, train_dataset=sentences).train()
