"""The columns of metrics.jsonl that a step fills; callbacks and TensorBoard get the same."""

import math
from collections.abc import Mapping

import torch

from lanewise.engine.step import StepReport
from lanewise.world.accelerator import peak_bytes


def step_metrics(report: StepReport, num_samples: int, device: torch.device) -> Mapping[str, float]:
    """Name what a step found. Waits for the device; times and memory are those of this process.

    Args:
        report: of the step.
        num_samples: of all lanes in the step.
        device: of this process.
    """
    seconds = {f"time/{phase}_seconds": spent for phase, spent in report.phase_seconds().items()}
    metrics = {
        "train/loss": report.totals.loss,
        "train/grad_norm": float(report.grad_norm()) if report.grad_norm is not None else math.nan,
        "train/learning_rate": report.learning_rate,
        "perf/samples_per_second": num_samples / sum(seconds.values()),
        **seconds,
        "memory/peak_gib": peak_bytes(device) / 2**30,
    }
    if report.skipped_steps is not None:
        metrics["train/skipped_steps"] = report.skipped_steps
    return metrics
