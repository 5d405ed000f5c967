"""The columns of metrics.jsonl that steps fill; callbacks and TensorBoard get the same.

What only the step knows comes through its `Line`.
"""

from collections.abc import Mapping

import torch

from lanewise.engine.step import Line
from lanewise.world.accelerator import peak_bytes


def step_metrics(line: Line, num_steps: int, num_samples: int, device: torch.device) -> Mapping[str, float]:
    """Name what steps found. Waits for the device; times and memory are those of this process.

    Args:
        line: of the steps.
        num_steps: those of them that this process took.
        num_samples: of all lanes in those.
        device: of this process.
    """
    seconds = line.phase_seconds()
    metrics = {
        "train/loss": line.totals.loss,
        "train/weight": line.totals.mean_weight,
        "train/grad_norm": float(line.grad_norm()),
        "train/learning_rate": line.learning_rate,
        "perf/samples_per_second": num_samples / sum(seconds.values()),
        **{f"time/{phase}_seconds": spent / num_steps for phase, spent in seconds.items()},
        "memory/peak_gib": peak_bytes(device) / 2**30,
    }
    metrics |= {f"gradients/{name}": norm for name, norm in line.gradient_norms().items()}
    if line.skipped_steps is not None:
        metrics["train/skipped_steps"] = line.skipped_steps
    return metrics
