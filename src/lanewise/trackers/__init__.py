"""Trackers, to which `callbacks` of a configuration sends the numbers of a run."""

from lanewise.trackers.mlflow import MLflow
from lanewise.trackers.trackio import Trackio
from lanewise.trackers.wandb import WandB

__all__ = ["MLflow", "Trackio", "WandB"]
