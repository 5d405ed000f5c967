"""A task whose evaluation differs from its training: generated text, a loss of its own, or none at all."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from torchmetrics import MeanMetric, Metric

from lanewise import Loss
from lanewise.config import EvaluateConfig, ReducerName, RunConfig
from lanewise.engine.engine import build_engine
from lanewise.engine.evaluation.evaluation import build_evaluator
from lanewise.lanes import Placement
from lanewise.processes.device.determinism import set_determinism
from lanewise.processes.world.world import LocalWorld, World
from lanewise.runs.dir import RunDir
from lanewise.testing import run_distributed
from tests.distributed.contrastive import Contrastive
from tests.distributed.reduce.test_fsdp import Deeper
from tests.distributed.tasks import Sentences, configure, state_bytes

MOST_TOKENS = 9


class Generates(Deeper):
    """Goes on with each sentence until the first token comes again: each micro-batch needs other forwards."""

    def eval_datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"held_out": Sentences(11)}

    def eval_forward(self, model: nn.Module, batch: torch.Tensor) -> list[list[int]]:
        assert not torch.is_grad_enabled()
        assert not model.training
        tokens = batch[:, :1]
        while tokens.shape[1] < MOST_TOKENS and (tokens[:, 1:] != batch[:, :1]).all():
            tokens = torch.cat([tokens, model(tokens)[:, -1:].softmax(-1)[:, 0].multinomial(1)], dim=1)
        return tokens.tolist()

    def eval_loss(self, outputs: Any, batch: torch.Tensor) -> None:
        return None

    def build_metrics(self) -> Mapping[str, Metric]:
        return {"num_tokens": MeanMetric(), "sum": MeanMetric()}

    def update_metrics(self, metrics: Mapping[str, Any], outputs: list[list[int]], batch: Any) -> None:
        metrics["num_tokens"].update(len(outputs[0]), weight=len(outputs))
        metrics["sum"].update(torch.tensor([float(sum(tokens)) for tokens in outputs]))


def generating(**evaluate: Any) -> RunConfig:
    config = configure(Generates, num_lanes=4, steps=4, num_samples=16)
    return replace(config, evaluate=EvaluateConfig(**evaluate))


def fit(
    world: World, config: RunConfig, reducer: ReducerName, folder: str
) -> tuple[dict[str, float], dict[str, bytes]]:
    set_determinism("exact", threads=1)
    config = replace(config, distributed=replace(config.distributed, reducer=reducer))
    engine = build_engine(config, world)
    values = engine.fit(RunDir(Path(folder)))
    return values, state_bytes(engine.training.model)


def test_text_is_generated_alike_by_every_reducer_and_leaves_no_trace_in_the_training(tmp_path):
    """Under fsdp processes need different numbers of forwards, each of which would wait for the others."""
    ((values, weights),) = run_distributed(fit, 1, generating(every_steps=1), "single", str(tmp_path))
    assert values.keys() == {"held_out/num_tokens", "held_out/sum"}
    assert 1 < values["held_out/num_tokens"] < MOST_TOKENS
    for reducer in ("ddp", "fsdp"):
        found = run_distributed(fit, 2, generating(every_steps=1), reducer, str(tmp_path))
        assert found == [(values, weights)] * 2
    ((_, seldom),) = run_distributed(fit, 1, generating(every_steps=4), "single", str(tmp_path))
    assert seldom == weights


def evaluator_of(task: type, **init_args: Any) -> Any:
    config = configure(task, num_lanes=4, num_samples=16, **init_args)
    world = LocalWorld(torch.device("cpu"))
    set_determinism("exact", threads=1)
    run = build_engine(config, world).run
    placement = Placement.of(config.batch.num_lanes, world)
    evaluator = build_evaluator(config, run.runner, run.training.model, world, placement)
    assert evaluator is not None
    return evaluator


def test_what_is_predicted_is_what_the_evaluation_makes():
    predicted = evaluator_of(Generates).predict("held_out")
    assert len(predicted) == 11
    assert all(isinstance(tokens, list) and 1 < len(tokens) <= MOST_TOKENS for tokens in predicted)


class LossOfItsOwn(Generates):
    """Counts sentences that begin with an even token; the others have no loss."""

    def eval_loss(self, outputs: Any, batch: torch.Tensor) -> Loss | None:
        even = batch[batch[:, 0] % 2 == 0]
        return Loss(torch.tensor(3.0 * len(even)), len(even)) if len(even) else None


def test_a_loss_of_its_own_is_a_mean_over_the_micro_batches_that_have_one():
    assert evaluator_of(LossOfItsOwn).run()["held_out/loss"] == 3.0


class Compared(Contrastive):
    """Is trained by a loss of all samples, and evaluated by one of each micro-batch."""

    def eval_datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"held_out": self.train_dataset()}

    def eval_loss(self, outputs: Any, batch: Any) -> Loss:
        return Loss(torch.tensor(1.0), 2)


def test_a_task_with_a_loss_of_all_samples_may_be_evaluated_by_another():
    values = evaluator_of(Compared).run()
    assert values["held_out/loss"] == 0.5
    assert not any(map(math.isnan, values.values()))


class Forgets(Generates):
    """Has the loss of training, which forgets its return."""

    eval_loss = Deeper.eval_loss
    eval_forward = Deeper.eval_forward

    def build_metrics(self) -> Mapping[str, Metric]:
        return {}

    def update_metrics(self, metrics: Any, outputs: Any, batch: Any) -> None:
        pass

    def loss(self, outputs: Any, batch: Any) -> Any:
        return None


def test_a_loss_that_is_forgotten_is_an_error_as_before():
    with pytest.raises(Exception, match="the loss of Forgets must be a scalar tensor or a Loss: got None"):
        evaluator_of(Forgets).run()
