"""The Trainer of hf_trainer_theirs.py, trained on two processes: `python hf_trainer_ours.py`."""

from pydoc_data.topics import topics
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import lanewise.hugging_face

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
set_seed(42)  # the weights are those of the model that you build
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
trainer = Trainer(model, arguments, data_collator=collate, train_dataset=sentences)
lanewise.hugging_face.train(
    trainer,
    num_processes=2,  # for which the batch sizes were chosen: 4 x 2 x 2 is the global batch
    distributed={"devices": 2, "equality": "exact"},
)
