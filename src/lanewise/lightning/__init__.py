"""Trains a LightningModule on its data, with the same model on any number of devices."""

from lanewise.lightning.module import read as read
from lanewise.lightning.module import train as train
