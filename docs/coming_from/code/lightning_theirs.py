"""A LightningModule and its Trainer, which starts two processes."""

from typing import Any

import lightning
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from toy import Net, test_data, train_data


class Points(lightning.LightningModule):
    """Classifies points."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        logits = self.net(batch[0])
        self.accuracy.update(logits, batch[1])
        self.log("test/accuracy", self.accuracy)
        loss = F.cross_entropy(logits, batch[1])
        self.log("test/loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 12)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


if __name__ == "__main__":
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_epochs=3, devices=2, strategy="ddp", accumulate_grad_batches=2, gradient_clip_val=1.0
    )
    train_loader = DataLoader(train_data, batch_size=16, shuffle=True)
    test_loader = DataLoader(test_data, batch_size=16)
    trainer.fit(Points(), train_loader, test_loader)
