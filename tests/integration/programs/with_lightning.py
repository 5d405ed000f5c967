"""A script for Lightning, right or with a mistake that public scripts have."""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, help="of a process")
parser.add_argument("--devices", type=int)
parser.add_argument("--folder")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--fault", default="")
given = parser.parse_args()

lightning.seed_everything(0)
lengths = torch.randint(2, 13, (71,))
targets = torch.randint(0, 4, (71, 12)).masked_fill(torch.arange(12) >= lengths[:, None], -100)
data = TensorDataset(torch.randn(71, 12, 5), targets)


class Tagger(lightning.LightningModule):
    """Classifies each row of a sample."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))

    def training_step(self, batch, number):
        rows, wanted = batch
        loss = nn.functional.cross_entropy(self.layers(rows).flatten(0, 1), wanted.flatten(), reduction="sum")
        if given.fault == "token_mean":
            return loss / (wanted != -100).sum()
        return loss / wanted.numel()

    def validation_step(self, batch, number):
        self.log("accuracy", (self.layers(batch[0]).argmax(-1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=given.devices,
    strategy="ddp" if given.devices > 1 else "auto",
    max_epochs=3,
    accumulate_grad_batches=given.accumulate,
    gradient_clip_val=0.1,
    default_root_dir=given.folder,
    use_distributed_sampler=given.fault != "own_sampler",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(
    Tagger(),
    DataLoader(data, batch_size=given.rows, shuffle=True),
    DataLoader(data, batch_size=given.rows),
)
