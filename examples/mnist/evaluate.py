"""Prints the accuracy of a trained model on held-out digits; plain PyTorch, for any run of this example."""

import sys
from pathlib import Path

import torch
import yaml
from mnist import Mnist
from safetensors.torch import load_file

run_dir = Path(sys.argv[1])
task = Mnist(**yaml.safe_load((run_dir / "config.yaml").read_text())["task"]["init_args"])
model = task.build_model()
model.load_state_dict(load_file(run_dir / "model.safetensors"))
model.eval()
images, labels = task.load(held_out=True)
with torch.inference_mode():
    correct = int((model(images).argmax(1) == labels).sum())
print(f"held-out accuracy: {correct / len(labels):.2%} ({correct} of {len(labels)} digits)")
print(f"the run is in {run_dir}")
