"""A callback that shows something of every kind."""

import torch
from matplotlib.figure import Figure
from torch import nn

from lanewise import Callback


class Shows(Callback):
    """Logs a text, an image and a figure at each evaluation."""

    def on_model(self, epoch: int, step: int, model: nn.Module) -> None:
        self.log_text("words", f"<after> {step}")
        self.log_image("noise", torch.full((2, 3), step / 100))
        figure = Figure(figsize=(1, 1))
        figure.subplots().plot([0, step])
        self.log_figure("curve", figure)
