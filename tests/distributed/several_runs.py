"""A program that trains several times: by the trainer, by a loop of its own, and by the trainer again."""

import os

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import lanewise

INPUTS = torch.arange(24 * 4.0).view(24, 4).sin()
SAMPLES = TensorDataset(INPUTS, INPUTS.sum(1))
BATCH = {"global_batch_size": 8, "micro_batch_size": 2}
SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}


class Fold(lanewise.Task):
    """Trains a model of some width."""

    def __init__(self, width: int) -> None:
        self.width = width

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, self.width), nn.Dropout(0.1), nn.Linear(self.width, 1))

    def train_dataset(self) -> TensorDataset:
        return SAMPLES

    def forward(self, model, batch):
        return model(batch[0])[:, 0]

    def loss(self, outputs, batch):
        return mse_loss(outputs, batch[1])


def train(width: int) -> None:
    distributed = {
        "devices": int(os.environ.get("WORLD_SIZE", "1")),
        "equality": "exact",
        "device_type": "cpu",
    }
    train = {"epochs": 1, "run_dir": "runs/{number}"}
    lanewise.train(Fold(width), batch=BATCH, optimizer=SGD, train=train, distributed=distributed)


def loop() -> None:
    lanes = lanewise.Lanes(**BATCH, equality="exact", device_type="cpu", stall_seconds=60.0)
    model = lanes.prepare(Fold(3).build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in lanes.steps(SAMPLES):
        for inputs, targets in step:
            step.backward(mse_loss(model(inputs)[:, 0], targets))
        optimizer.step()
    lanes.save_model(model, "runs/loop/model.safetensors")
    lanes.close()


if __name__ == "__main__":
    train(3)
    train(5)
    loop()
    train(4)
