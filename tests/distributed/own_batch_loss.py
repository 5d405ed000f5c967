"""An own loop with a loss of all samples of a step."""

import sys

import torch

import lanewise
from tests.distributed.contrastive import Contrastive, nt_xent

task = Contrastive()
lanes = lanewise.Lanes(global_batch_size=16, micro_batch_size=2, equality="exact")
model = lanes.prepare(task.build_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = lanes.steps(task.train_dataset())
for _ in range(2):
    for step in steps:
        step.batch_loss(
            lambda batch: task.forward(model, batch), lambda outputs: nt_xent(model, outputs, None)
        )
        optimizer.step()
        lanes.print(step.number + 1, step.loss, step.weight, step.grad_norm.item())
lanes.save_model(model, sys.argv[1])
