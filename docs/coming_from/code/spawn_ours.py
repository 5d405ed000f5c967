"""The same command line, and the same model for any -n and -g: `python spawn_ours.py -n 1 -g 2 -nr 0`."""

import argparse
import os

import torch
from torch import multiprocessing as mp
from torch.nn import functional as F
from toy import Net, train_data

import lanewise


def main() -> None:
    """Start a process for each GPU of this node."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", "--nodes", default=1, type=int)
    parser.add_argument("-g", "--gpus", default=1, type=int, help="number of gpus per node")
    parser.add_argument("-nr", "--nr", default=0, type=int, help="ranking within the nodes")
    parser.add_argument("--epochs", default=3, type=int)
    args = parser.parse_args()
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.setdefault("MASTER_PORT", "8888")
    os.environ["WORLD_SIZE"] = str(args.gpus * args.nodes)
    os.environ["LOCAL_WORLD_SIZE"] = str(args.gpus)
    mp.spawn(train, nprocs=args.gpus, args=(args,))


def train(gpu: int, args: argparse.Namespace) -> None:
    """Train on one GPU."""
    os.environ["RANK"] = str(args.nr * args.gpus + gpu)
    os.environ["LOCAL_RANK"] = str(gpu)
    lanes = lanewise.Lanes(global_batch_size=64, micro_batch_size=16, seed=0, equality="exact")
    model = lanes.prepare(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = lanes.steps(train_data)
    for epoch in range(args.epochs):
        for step in steps:
            for inputs, labels in step:
                step.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
        lanes.print(f"Epoch [{epoch + 1}/{args.epochs}], loss: {step.loss:.4f}")
    lanes.save_model(model, "model.safetensors")


if __name__ == "__main__":
    main()
