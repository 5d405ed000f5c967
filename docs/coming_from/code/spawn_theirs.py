"""Nodes, GPUs and a rank by hand: `python spawn_theirs.py -n 1 -g 2 -nr 0`."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from toy import Net, train_data


def main() -> None:
    """Start a process for each GPU of this node."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", "--nodes", default=1, type=int)
    parser.add_argument("-g", "--gpus", default=1, type=int, help="number of gpus per node")
    parser.add_argument("-nr", "--nr", default=0, type=int, help="ranking within the nodes")
    parser.add_argument("--epochs", default=3, type=int)
    args = parser.parse_args()
    args.world_size = args.gpus * args.nodes
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.setdefault("MASTER_PORT", "8888")
    mp.spawn(train, nprocs=args.gpus, args=(args,))


def train(gpu: int, args: argparse.Namespace) -> None:
    """Train on one GPU."""
    rank = args.nr * args.gpus + gpu
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo", rank=rank, world_size=args.world_size)
    torch.manual_seed(0)
    device = torch.device("cuda", gpu) if has_gpu else torch.device("cpu")
    model = DistributedDataParallel(Net().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(train_data, num_replicas=args.world_size, rank=rank)
    loader = DataLoader(train_data, batch_size=64, shuffle=False, sampler=sampler)
    for epoch in range(args.epochs):
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if gpu == 0:
            print(f"Epoch [{epoch + 1}/{args.epochs}], loss: {loss.item():.4f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
