"""Trainers of transformers in the style of public examples, for the processes of their tests to import."""

import os
import tempfile
import warnings
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

from lanewise.errors import ConfigError, LanewiseError
from lanewise.hugging_face import read, train

NUM_SAMPLES = 22
_BERT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_GPT2 = {
    "vocab_size": 64,
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_T5 = {
    "vocab_size": 64,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
_VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 8,
    "patch_size": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 3,
}


def sentences() -> list[torch.Tensor]:
    """Return ragged rows of tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 12, (NUM_SAMPLES,), generator=generator).tolist()
    return [torch.randint(2, 64, (length,), generator=generator) for length in lengths]


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad rows, and stack what is a number of each sample."""
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    for name in samples[0].keys() - batch.keys():
        values = [torch.as_tensor(sample[name]) for sample in samples]
        batch[name] = pad_sequence(values, True, -100) if values[0].dim() else torch.stack(values)
    return batch


def some(tokens: torch.Tensor) -> torch.Tensor:
    """Return labels of which some are none."""
    return tokens.where(tokens % 3 != 0, -100)


def smoothed_mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    """Return a loss function of the user's own, which divides what it adds up."""
    losses = torch.nn.functional.cross_entropy(
        outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100
    )
    return losses / num_items_in_batch


def build(case: str, trainer_class: type[Trainer] = Trainer, **given: Any) -> Trainer:
    """Return the trainer of a case; `given` are arguments of it or of TrainingArguments."""
    set_seed(0)
    rows = sentences()
    samples: list[dict[str, Any]] = [{"input_ids": row, "unused": 1} for row in rows]
    labels: dict[str, list[Any]] = {"labels": [some(row) for row in rows]}
    options: dict[str, Any] = {}
    collate = pad
    model: torch.nn.Module
    if case.startswith("gpt2"):
        model = GPT2LMHeadModel(GPT2Config(**_GPT2))
        model.loss_type = "ForCausalLM"  # without it the library counts the first label of each row as well
        labels = {"labels": rows}
        if case == "gpt2 smoothed":
            options["label_smoothing_factor"] = 0.1
        if case == "gpt2 peft":
            from peft import LoraConfig, get_peft_model

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what peft asks it
                options_of_lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
                model = get_peft_model(model, options_of_lora)
    elif case == "t5":
        model = T5ForConditionalGeneration(T5Config(**_T5))
    elif case == "vit":
        model = ViTForImageClassification(ViTConfig(**_VIT))
        samples = [{"pixel_values": torch.randn(3, 8, 8)} for _ in rows]
        labels, collate = {"labels": [number % 3 for number in range(NUM_SAMPLES)]}, None
    elif case in ("bert sequences", "bert regression"):
        model = BertForSequenceClassification(BertConfig(**_BERT, num_labels=3 if "seq" in case else 1))
        labels = {"labels": [int(row.sum()) % 3 for row in rows]}
        if case == "bert regression":
            labels = {"labels": [float(row.sum() % 7) for row in rows]}
    elif case == "bert masked":
        model = BertForMaskedLM(BertConfig(**_BERT))
    elif case == "question answering":
        model = BertForQuestionAnswering(BertConfig(**_BERT))
        labels = {"start_positions": [0] * NUM_SAMPLES, "end_positions": [len(row) - 1 for row in rows]}
    else:
        model = BertForTokenClassification(BertConfig(**_BERT, num_labels=64))
    for name, values in labels.items():
        samples = [{**sample, name: value} for sample, value in zip(samples, values, strict=True)]
    if case == "bert own loss":
        given["compute_loss_func"] = smoothed_mean
    of_trainer = ("compute_loss_func", "compute_metrics", "callbacks", "eval_dataset", "optimizers", "model")
    options = {
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 3,
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
        "use_cpu": True,
        **options,
        **{name: value for name, value in given.items() if name not in of_trainer},
    }
    options.setdefault("output_dir", tempfile.mkdtemp())
    parts = {"model": model, **{name: value for name, value in given.items() if name in of_trainer}}
    return trainer_class(
        args=TrainingArguments(**options), data_collator=collate, train_dataset=samples, **parts
    )


class Noting(Trainer):
    """Notes the loss of each step, as the library computes it."""

    losses: list[float]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def losses_of_the_library(case: str, **given: Any) -> list[float]:
    """Train by the library on one device."""
    trainer = build(case, Noting, **given)
    trainer.losses = []
    trainer.train()
    return trainer.losses


def run_of(case: str, **given: Any) -> dict[str, Any]:
    """Return what lanewise reads."""
    return read(build(case, **given))


def refused(case: str, **given: Any) -> str:
    """Return what is said of a trainer that cannot be read; empty where it can."""
    try:
        run_of(case, **given)
    except LanewiseError as error:
        return str(error)
    return ""


class OwnLoss(Trainer):
    """Changes what a step is."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class Stopping(TrainerCallback):
    """Changes control."""


def ask_for_much(world: Any) -> str:
    """Return the error of a trainer that asks for much that a run does not do."""
    trainer = build(
        "gpt2",
        OwnLoss,
        callbacks=[Stopping()],
        neftune_noise_alpha=5.0,
        activation_checkpointing=True,
        train_sampling_strategy="group_by_length",
        data_seed=3,
    )
    trainer.eval_dataset = torch.utils.data.ChainDataset([])
    try:
        read(trainer)
    except ConfigError as error:
        return str(error)
    return ""


def among_themselves(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    """Return a loss in which the samples of a micro-batch influence each other."""
    logits = outputs.logits.mean(1)
    targets = torch.arange(len(logits))
    return torch.nn.functional.cross_entropy(logits @ logits.T, targets)


def with_a_penalty(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    """Return a sum that is divided, and a term that is not."""
    return smoothed_mean(outputs, labels, num_items_in_batch) + outputs.logits.square().mean()


def losses_that_are_no_means(world: Any) -> list[str]:
    """Return what is said of them."""
    return [
        *(refused("bert tokens", compute_loss_func=loss) for loss in (among_themselves, with_a_penalty)),
        refused(
            "bert tokens", lr_scheduler_type="reduce_lr_on_plateau", eval_dataset=[1], eval_strategy="epoch"
        ),
    ]


def what_gpt2_counts(world: Any) -> tuple[str, float, float]:
    """Return what is counted of a GPT-2 as it comes, and how small its loss is by the library."""
    given = build("gpt2", max_steps=1)
    given.model.loss_type = None
    parts = (given.model, given.args, given.data_collator, given.train_dataset)
    counts = read(Trainer(*parts))["task"]._parts.counts
    trainer = Noting(*parts)
    trainer.losses = []
    batch = trainer.get_train_dataloader().collate_fn(given.train_dataset[:4])
    right = given.model(**batch).loss.item()
    trainer.train()
    targets = batch["labels"] != -100
    return counts, trainer.losses[0] / right, (targets[:, 1:].sum() / targets.sum()).item()


def in_order(prediction: Any) -> dict[str, float]:
    """Return numbers that depend on every row and on its place."""
    logits, labels = prediction.predictions, prediction.label_ids
    places = 1 + np.arange(len(labels))
    rows = (labels != -100).reshape(len(labels), -1).sum(1)
    right = (logits.argmax(-1) == labels) & (labels != -100)
    return {"accuracy": right.sum() / rows.sum(), "order": (places * rows).sum(), "width": labels.shape[1]}


def train_and_use(world: Any, devices: int) -> dict[str, Any]:
    """Train from end to end, and use what the run left."""
    trainer = build(
        "bert tokens",
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        eval_dataset=build("bert tokens").train_dataset[:11],
        compute_metrics=in_order,
        load_best_model_at_end=True,
        save_strategy="epoch",
        metric_for_best_model="accuracy",
        callbacks=[EarlyStoppingCallback(early_stopping_patience=5)],
    )
    before = trainer.model.classifier.weight.clone()
    # Of this test: the metrics of the last model are compared, so it shall be the best one.
    result = train(trainer, distributed={"devices": devices, "equality": "exact"}, overwrite=True)
    assert not torch.equal(before, trainer.model.classifier.weight)
    loaded = BertForTokenClassification.from_pretrained(result.run_dir / "pretrained")
    weights = zip(loaded.state_dict().values(), trainer.model.state_dict().values(), strict=True)
    assert all(torch.equal(saved, own) for saved, own in weights)
    return {
        "model": result.model_file.read_bytes(),
        "best": (result.best_step, result.best_value),
        "ours": result.evaluation,
        "theirs": trainer.evaluate(),
        "steps": result.step,
    }


def under_torchrun(world: Any) -> str:
    """Return what is said where torchrun started the process."""
    trainer = build("bert tokens")
    os.environ.update({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    try:
        train(trainer)
    except ConfigError as error:
        return str(error)
    return ""


def sections(world: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the sections of a run, without the optimizer and the scheduler."""
    run = read(
        build(
            "bert tokens",
            gradient_accumulation_steps=2,
            num_train_epochs=2.5,
            logging_steps=0.25,
            save_strategy="epoch",
            save_total_limit=3,
            bf16=True,
            max_grad_norm=0.0,
            output_dir="unused",
            eval_strategy="steps",
            eval_steps=4,
            eval_dataset={"easy": [1], "hard": [1]},
            metric_for_best_model="eval_hard_accuracy",
            callbacks=[EarlyStoppingCallback(2, 0.5)],
            load_best_model_at_end=False,
        ),
        num_processes=2,
        log={"gradients": True},
        **given,
    )
    return {name: run[name] for name in run.keys() - {"task", "optimizer", "scheduler"}}
