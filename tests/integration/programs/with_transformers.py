"""A script for the Trainer of transformers, with models of its own."""

import argparse

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=["gpt2", "bert", "masked"])
parser.add_argument("--rows", type=int, help="of a process")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--folder")
parser.add_argument("--fault", default="")
given = parser.parse_args()

torch.manual_seed(0)
lengths = torch.randint(4, 13, (60,)).tolist() if given.model == "gpt2" else [12] * 60
texts = [torch.randint(2, 50, (length,)) for length in lengths]
size = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
if given.model == "gpt2":
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )
elif given.model == "bert":
    model = BertForSequenceClassification(BertConfig(**size))
else:
    model = BertForMaskedLM(BertConfig(**size))


def collate(samples):
    """Pad with 0, and mask every fourth token where words are predicted."""
    tokens = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    batch = {"input_ids": tokens, "attention_mask": (tokens != 0).long()}
    if given.model == "bert":
        return {**batch, "labels": torch.stack([sample["labels"] for sample in samples])}
    labels = tokens.masked_fill(tokens == 0, -100)
    if given.model == "masked":
        is_masked = torch.rand(tokens.shape) < 0.25
        batch["input_ids"] = tokens.masked_fill(is_masked, 1)
        labels = labels.masked_fill(~is_masked, -100)
    return {**batch, "labels": labels}


data = [{"input_ids": text, "labels": text[0] % 2} for text in texts]
arguments = TrainingArguments(
    given.folder,
    per_device_train_batch_size=given.rows,
    per_device_eval_batch_size=7,
    gradient_accumulation_steps=given.accumulate,
    average_tokens_across_devices=given.fault != "token_mean",
    num_train_epochs=3,
    eval_strategy="epoch",
    learning_rate=1e-3,
    use_cpu=True,
)
Trainer(model, arguments, data_collator=collate, train_dataset=data, eval_dataset=data[:25]).train()
