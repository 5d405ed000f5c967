"""Prints text of a model before and after training: `python nanogpt_sample.py runs/nanogpt`."""

import sys

import torch

import lanewise

task, trained = lanewise.load(sys.argv[1])
for when, model in (("before", task.build_model()), ("after", trained)):
    model.eval()
    torch.manual_seed(1337)
    start = torch.tensor([[task.itos.index("\n")]])
    text = "".join(task.itos[i] for i in model.generate(start, max_new_tokens=200)[0])
    print(f"--- {when} training{text}\n---")
