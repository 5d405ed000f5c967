"""LightningModules in the style of public examples, for the processes of their tests to import."""

import os
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset
from torchmetrics import KendallRankCorrCoef, MeanSquaredError, PearsonCorrCoef
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

import lanewise
from lanewise.errors import LanewiseError
from lanewise.lightning import read, train

NUM_SAMPLES = 22


class Points(lightning.LightningDataModule):
    """Points of three classes, and sequences of tokens."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(1)
        points = torch.randn(NUM_SAMPLES + 9, 6, generator=generator)
        tokens = torch.randint(0, 20, (NUM_SAMPLES + 9, 7), generator=generator)
        samples = (points, points[:, :3].argmax(1), tokens)
        self.train = TensorDataset(*(part[:NUM_SAMPLES] for part in samples))
        self.val = TensorDataset(*(part[NUM_SAMPLES:] for part in samples))

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=self.batch_size)


class Autoencoder(lightning.LightningModule):
    """As on Lightning's first page."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        self.decoder = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 6))
        self.error = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        points = batch[0]
        loss = F.mse_loss(self.decoder(self.encoder(points)), points)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.error(self.decoder(self.encoder(batch[0])), batch[0])
        self.log("val_error", self.error)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Classifier(lightning.LightningModule):
    """Has a schedule of epochs, metrics of several kinds, and a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        self.train_accuracy = MulticlassAccuracy(3, average="micro")
        self.f1 = MulticlassF1Score(3)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.net(points)

    def training_step(self, batch: Any) -> dict[str, torch.Tensor]:
        logits = self(batch[0])
        self.train_accuracy(logits, batch[1])
        loss = F.cross_entropy(logits, batch[1])
        self.log_dict({"train_accuracy": self.train_accuracy, "loss": loss}, prog_bar=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self(batch[0])
        self.f1.update(logits, batch[1])
        self.log("val_f1", self.f1, on_epoch=True)
        loss = F.cross_entropy(logits, batch[1])
        self.log("val_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


class Transformer(lightning.LightningModule):
    """Predicts the next token, with weight decay by groups and a schedule of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 20)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[2]

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1)
        hidden = self.block(self.embedding(tokens[:, :-1]), src_mask=mask, is_causal=True)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train_loss", loss, batch_size=len(tokens))
        return loss

    def configure_optimizers(self) -> Any:
        decayed = [self.embedding.weight, self.head.weight]
        others = [*self.block.parameters(), self.head.bias]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Regression(lightning.LightningModule):
    """Logs in each step, returns and logs a loss of its validation, and has a schedule of every other one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        self.correlation, self.ranks = PearsonCorrCoef(), KendallRankCorrCoef()

    def loss(self, batch: Any) -> torch.Tensor:
        return F.huber_loss(self.net(batch[0])[:, 0], batch[0].sum(1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("error", loss.detach(), on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        tokens = batch[2].flatten()
        self.log("small", (tokens < 5).float().mean(), batch_size=int(tokens.sum()))
        for name, metric in {"correlation": self.correlation, "ranks": self.ranks}.items():
            metric.update(self.net(batch[0])[:, 0], batch[0].sum(1))
            self.log(name, metric)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.RMSprop(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        every_other = {"scheduler": scheduler, "interval": "step", "frequency": 2}
        return {"optimizer": optimizer, "lr_scheduler": every_other}


class Normalized(Classifier):
    """Has batch normalization, a warmup of steps, and then a schedule in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        parts = [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40),
        ]
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [3])
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


CASES = {
    "autoencoder": Autoencoder,
    "classifier": Classifier,
    "transformer": Transformer,
    "regression": Regression,
    "normalized": Normalized,
}


def build(case: str) -> lightning.LightningModule:
    """Return the module of a case."""
    torch.manual_seed(0)
    return {**CASES, "token mean": TokenMean}[case]()


def run_of(case: str, **given: Any) -> dict[str, Any]:
    """Return what lanewise reads."""
    return read(build(case), Points(), **given)


class Losses(Callback):
    """Notes the loss of each step, as the library computes it."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def trainer_of_the_library(**options: Any) -> lightning.Trainer:
    """Return a trainer on the CPU, with one device if the options do not say otherwise."""
    warnings.simplefilter("ignore")  # what it recommends is not ours to mend
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"devices": 1, "enable_model_summary": False, **quiet, **options}
    return lightning.Trainer(accelerator="cpu", **options)


def losses_of_the_library(case: str, max_steps: int) -> list[float]:
    """Train by the library on one device."""
    noted = Losses()
    trainer_of_the_library(callbacks=[noted], max_steps=max_steps).fit(build(case), Points())
    return noted.losses


class Counting(Callback):
    """Counts the samples that this process reads."""

    def __init__(self) -> None:
        self.num_training = self.num_validation = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.num_training += len(batch[0] if isinstance(batch, list) else batch)

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.num_validation += len(batch[0])


def train_by_the_library(world: Any, global_batch_size: int) -> dict[str, Any]:
    """Train each case for two epochs by the library alone, by ddp as under torchrun.

    Returns:
        By case the weights, and how many samples this process read for training and for validation.
    """
    os.environ.update({"TORCHELASTIC_RUN_ID": "run", "LOCAL_RANK": str(world.rank), "GROUP_RANK": "0"})
    os.environ.update({"RANK": str(world.rank), "WORLD_SIZE": str(world.world_size)})
    found = {}
    for case in (*CASES, "token mean"):
        counting, module = Counting(), build(case)
        trainer = trainer_of_the_library(
            callbacks=[counting],
            max_epochs=2,
            devices=world.world_size,
            num_sanity_val_steps=0,
            strategy="ddp_find_unused_parameters_true",
        )
        trainer.fit(module, Points(global_batch_size // world.world_size))
        weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
        found[case] = weights, counting.num_training, counting.num_validation
    return found


def train_and_use(
    world: Any, case: str, devices: int, run_dir: str, global_size: int = 12, evaluate: Any = None
) -> dict[str, Any]:
    """Train from end to end, and evaluate by the library what the module has then."""
    module = build(case)
    result = train(
        module,
        Points(),
        batch={"global_batch_size": global_size},
        train={"epochs": 2, "run_dir": run_dir},
        distributed={"devices": devices, "equality": "exact"},
        evaluate=evaluate or {},
    )
    (theirs,) = trainer_of_the_library().validate(module, Points(), verbose=False)
    weights = {name: value.tolist() for name, value in module.state_dict().items()}
    best = result.best_step, result.best_value
    return {"ours": dict(result.evaluation), "theirs": theirs, "weights": weights, "best": best}


class Adversarial(Autoencoder):
    """Steps two optimizers by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def on_train_epoch_end(self) -> None: ...


class TwoOptimizers(Autoencoder):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.encoder, self.decoder)]


class TokenMean(Transformer):
    """Its mean is over tokens, of which a sample has some."""

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> Any:
        targets = tokens.where(tokens % 4 > 0, -100)
        return F.cross_entropy(self.head(self.embedding(tokens)).flatten(0, 1), targets.flatten())


class Weighted(TokenMean):
    """Says so."""

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> Any:
        return lanewise.Loss.mean(super().training_step(tokens, batch_idx), (tokens % 4 > 0).sum())


class Indexed(Autoencoder):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (1 if batch_idx % 2 else 2)


class Annealed(Autoencoder):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.current_epoch)


class Noisy(Autoencoder):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step([batch[0] + torch.randn_like(batch[0])], batch_idx)


class ClassWeighted(Classifier):
    """Its loss says so, though one of a micro-batch of one class is a plain mean."""

    def training_step(self, batch: Any) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1], weight=torch.tensor([1.0, 9.0, 9.0]))


class OfPositives(Classifier):
    """Its mean is over the few samples of one class."""

    def training_step(self, batch: Any) -> Any:
        is_positive = batch[1] == 2
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        return losses.where(is_positive, 0.0).sum() / is_positive.sum().clamp(min=1)


def what_is_said_of_sorted_data(world: Any) -> dict[str, str]:
    """Return what is said by module, and for `none` where no sample shows anything."""
    classes = torch.tensor([0] * 60 + [1] * 36 + [2] * 4)
    data = {"ClassWeighted": classes, "OfPositives": classes, "none": classes.clamp(max=1)}
    said = {}
    for name, labels in data.items():
        loader = DataLoader(TensorDataset(torch.randn(100, 6), labels), batch_size=4)
        module = {"ClassWeighted": ClassWeighted}.get(name, OfPositives)()
        try:
            read(module, loader, train={"epochs": 1, "run_dir": "unused"})
        except LanewiseError as error:
            said[name] = str(error)
    return said


class Flat(Autoencoder):
    """Lowers its rate when its validation finds nothing better."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def scheduler_of_a_plateau(world: Any) -> Any:
    """Return the section in place of a scheduler that follows a metric."""
    section = {"class_path": "torch.optim.lr_scheduler.ReduceLROnPlateau"}
    given = {"train": {"epochs": 1, "run_dir": "unused"}, "evaluate": {"best": "val/val_loss"}}
    return read(Flat(), Points(), **given, scheduler=section)["scheduler"]


def what_is_said(world: Any) -> dict[str, str]:
    """Return what is said of modules that cannot be trained, by their names; empty of those that can."""
    said = {}
    for cls in (Adversarial, TwoOptimizers, TokenMean, Weighted, Indexed, Annealed, Noisy, Flat):
        try:
            read(cls(), Points(), train={"epochs": 1, "run_dir": "unused"})
            said[cls.__name__] = ""
        except LanewiseError as error:
            said[cls.__name__] = str(error)
    return said


def what_is_said_of_loaders(world: Any) -> dict[str, str]:
    """Return what is said of loaders that are not read as they are, by a word for each."""
    data = TensorDataset(torch.randn(12, 6))
    plain = DataLoader(data, batch_size=4)
    loaders = {
        "batches": (DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, False)), None),
        "split": (plain, DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(range(4)))),
        "collate": (plain, DataLoader(data, batch_size=4, collate_fn=lambda samples: samples)),
        "right": (plain, DataLoader(data, batch_size=4, shuffle=True)),
    }
    said = {}
    for name, (training, validation) in loaders.items():
        try:
            run = read(Autoencoder(), training, validation, train={"epochs": 1, "run_dir": "unused"})
            said[name] = " ".join(run["task"].eval_datasets())
        except LanewiseError as error:
            said[name] = str(error)
    made = lightning.LightningDataModule.from_datasets(data, data, batch_size=4)
    run = read(Autoencoder(), made, train={"epochs": 1, "run_dir": "unused"})
    return said | {"from_datasets": " ".join(run["task"].eval_datasets())}


def sections_of_a_loader_that_drops(world: Any) -> tuple[Any, Any]:
    """Return the section `data` as it is read, and where the section is given besides the loader."""
    loader = DataLoader(TensorDataset(torch.randn(14, 6)), batch_size=4, drop_last=True)
    given: dict[str, Any] = {"train": {"epochs": 1, "run_dir": "unused"}}
    own = read(Autoencoder(), loader, **given, data={"drop_last": False})
    return read(Autoencoder(), loader, **given)["data"], own["data"]
