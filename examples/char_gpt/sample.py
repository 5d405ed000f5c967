"""Prints text of a model before and after training: `python sample.py RUN_DIR`."""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_model

from lanewise.config.class_path import add_search_path
from lanewise.config.classes import build
from lanewise.config.load import load_config

run_dir = Path(sys.argv[1])
config = load_config(str(run_dir / "config.yaml"))
add_search_path(config.search_path)
task = build("task", config.task)
model = task.build_model().eval()
for when in ("before", "after"):
    torch.manual_seed(0)
    tokens = model.generate(task.text[task.num_train :][: task.config.context], 400)
    print(f"--- {when} training\n{''.join(task.alphabet[token] for token in tokens)}\n")
    load_model(model, run_dir / "best.safetensors")
