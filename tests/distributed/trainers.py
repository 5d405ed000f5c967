"""Trainers of transformers in the style of public examples, for the processes of their tests to import."""

import os
import tempfile
from typing import Any

import numpy as np
import torch
from transformers import (
    BertForTokenClassification,
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from lanewise.errors import ConfigError, LanewiseError
from lanewise.hugging_face import read, train
from lanewise.hugging_face.arguments import observed
from tests.distributed.trainer_cases import CASES


def smoothed_mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    """Return a loss function of the user's own, which divides what it adds up."""
    losses = torch.nn.functional.cross_entropy(
        outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100
    )
    return losses / num_items_in_batch


def build(case: str, trainer_class: type[Trainer] = Trainer, **given: Any) -> Trainer:
    """Return the trainer of a case; `given` are arguments of it or of TrainingArguments."""
    set_seed(0)
    model, samples, collate = CASES[case]()
    if case == "llama bfloat16":
        model.bfloat16()
    if case == "bert own loss":
        given["compute_loss_func"] = smoothed_mean
    of_trainer = ("compute_loss_func", "compute_metrics", "callbacks", "eval_dataset", "optimizers", "model")
    parts = {"model": model, **{name: value for name, value in given.items() if name in of_trainer}}
    options = {
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 3,
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
        "use_cpu": True,
        "label_smoothing_factor": 0.1 if case == "gpt2 smoothed" else 0.0,
        **{name: value for name, value in given.items() if name not in of_trainer},
    }
    options.setdefault("output_dir", tempfile.mkdtemp())
    arguments = Seq2SeqTrainingArguments if issubclass(trainer_class, Seq2SeqTrainer) else TrainingArguments
    return trainer_class(args=arguments(**options), data_collator=collate, train_dataset=samples, **parts)


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


PLATEAU = {"class_path": "torch.optim.lr_scheduler.ReduceLROnPlateau"}


def refused(case: str, scheduler: Any = None, **given: Any) -> str:
    """Return what is said of a trainer that cannot be read; empty where it can."""
    try:
        read(build(case, **given), **({} if scheduler is None else {"scheduler": scheduler}))
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
    trainer.args.deepspeed = {"zero_optimization": {"stage": 2}}  # TrainingArguments asks for the package
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


def weighted_by_class(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    """Return a mean under weights, which of samples of one class is a plain one."""
    labels = torch.zeros_like(labels)
    weight = 1.0 + torch.arange(outputs.logits.shape[-1])
    return torch.nn.functional.cross_entropy(outputs.logits, labels, weight)


def what_is_said(world: Any) -> dict[str, str]:
    """Return what is said of trainers, by a word for each; empty where they are read."""
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_dataset": [1], "eval_strategy": "epoch"}
    generation = {"trainer_class": Seq2SeqTrainer, "predict_with_generate": True}
    return {
        "among themselves": refused("bert tokens", compute_loss_func=among_themselves),
        "weighted": refused("bert sequences", compute_loss_func=weighted_by_class),
        "clip": refused("clip"),
        "penalty": refused("bert tokens", compute_loss_func=with_a_penalty),
        "plateau": refused("bert tokens", **plateau),
        "plateau in its place": refused("bert tokens", scheduler=PLATEAU, **plateau),
        "generation": refused("t5", **generation),
        "no generation": refused("t5", trainer_class=Seq2SeqTrainer),
        "no labels to smooth": refused("question answering", label_smoothing_factor=0.1),
        "bfloat16": refused("bert tokens", model=CASES["bert tokens"]()[0].bfloat16()),
    }


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


def modes(world: Any) -> dict[str, str]:
    """Return what becomes of `metric_for_best_model`, with what is said of it."""
    found = {}
    for name, greater in (("wer", None), ("f1", None), ("own", None), ("own", False), ("own_loss", True)):
        trainer = build(
            "bert tokens",
            eval_strategy="epoch",
            eval_dataset=[1],
            metric_for_best_model=name,
            greater_is_better=greater,
            callbacks=[EarlyStoppingCallback(1)],
        )
        found[f"{name} {greater}"] = observed(trainer, 1)["evaluate"]["best_mode"]
    return found


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
            eval_dataset={"easy": [1], "hard": [1], "hard_old": [1]},  # the first name begins the other
            metric_for_best_model="eval_hard_old_accuracy",
            callbacks=[EarlyStoppingCallback(2, 0.5)],
            load_best_model_at_end=False,
        ),
        num_processes=2,
        log={"gradients": True},
        **given,
    )
    return {name: run[name] for name in run.keys() - {"task", "optimizer", "scheduler"}}
