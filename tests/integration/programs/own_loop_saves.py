"""A loop that ends right after its last save: own_loop_saves.py FOLDER [fails]."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lanewise import Lanes
from lanewise.runs.checkpoint.part import Staging

write = Staging.write


def write_slowly(*arguments):
    """Take as long as a large model."""
    time.sleep(1)
    if "fails" in sys.argv:
        raise OSError("the disk is full")
    return write(*arguments)


Staging.write = write_slowly
lanes = Lanes(global_batch_size=4, micro_batch_size=1)
model = lanes.prepare(nn.Linear(2, 1))
checkpoints = lanes.checkpoints(sys.argv[1], model=model)
for step in lanes.steps(TensorDataset(torch.ones(4, 2))):
    for (inputs,) in step:
        step.backward(model(inputs).mean())
checkpoints.save(1)
