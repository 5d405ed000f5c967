"""A script that trains on several devices by itself: `python curve.py RUN_DIR DEVICES [SECONDS_A_LANE]`."""

import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanSquaredError, Metric

import lanewise


class Curve(lanewise.Task):
    """Fits a parabola; with dropout, so that random numbers count."""

    def __init__(self, width: int = 8, *, seconds_a_lane: float = 0.0) -> None:
        self.width = width
        self.seconds_a_lane = seconds_a_lane

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, self.width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(self.width, 1))

    def train_dataset(self) -> TensorDataset:
        x = torch.linspace(-1, 1, 45).unsqueeze(1)
        return TensorDataset(x, x**2)

    def eval_datasets(self) -> dict[str, TensorDataset]:
        return {"held_out": TensorDataset(*(column[::3] for column in self.train_dataset().tensors))}

    def build_metrics(self) -> dict[str, Metric]:
        return {"error": MeanSquaredError()}

    def update_metrics(self, metrics: Mapping[str, Any], outputs: torch.Tensor, batch: Any) -> None:
        metrics["error"].update(outputs, batch[1])

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(self.seconds_a_lane)
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, batch[1])


def main(run_dir: str, devices: int, seconds_a_lane: float = 0.0) -> None:
    result = lanewise.train(
        Curve(width=6, seconds_a_lane=seconds_a_lane),
        batch={"global_batch_size": 16, "micro_batch_size": 4},
        train={"epochs": 4, "run_dir": run_dir},
        optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-2}},
        distributed={"devices": devices, "equality": "exact"},
    )
    outputs = result.model()(Curve().train_dataset().tensors[0])
    print(f"{result.evaluation['held_out/error']!r} {outputs.sum().item()!r}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:]))
