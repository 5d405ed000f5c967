"""An own loop over a stream, from where a folder has a checkpoint up to a step: prints each step."""

import sys
from pathlib import Path

import torch

import lanewise
from tests.distributed.streams import Streaming

folder, kind, last_step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
task = Streaming(kind)
lanes = lanewise.Lanes(global_batch_size=16, micro_batch_size=2, equality="exact", device_type="cpu")
model = lanes.prepare(task.build_model())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
checkpoints = lanes.checkpoints(folder / "checkpoints", model=model, optimizer=optimizer)
steps = lanes.steps(task.train_dataset(), collate=task.collate, shuffle_buffer=3, first_step=checkpoints.step)
is_over = False
while not is_over:
    for step in steps:
        for batch in step:
            step.backward(task.loss(task.forward(model, batch), batch))
        optimizer.step()
        lanes.print(step.epoch + 1, step.number + 1, step.loss)
        is_over = step.number + 1 == last_step
        if is_over:
            break
checkpoints.save(last_step)
checkpoints.finish()
lanes.save_model(model, folder / "model.safetensors")
