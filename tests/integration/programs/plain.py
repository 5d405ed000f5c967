"""A script for torchrun and for one process, right or with a mistake that public scripts have."""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    random_split,
)

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, help="of a process")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--fault", default="")
parser.add_argument("--workers", type=int, default=0)
given = parser.parse_args()

world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
is_alone = given.fault == "alone"  # as a library is that was not told of the other processes
if (world_size > 1 and not is_alone) or given.fault == "needs_torchrun":
    dist.init_process_group("gloo")
torch.manual_seed(0)
lengths = torch.randint(2, 13, (71,))
targets = torch.randint(0, 4, (71, 12)).masked_fill(torch.arange(12) >= lengths[:, None], -100)
features = torch.randn(71, 12, 5)


class Noisy(Dataset):
    """Adds noise to a sample when it is read."""

    def __len__(self):
        return len(features)

    def __getitem__(self, index):
        return features[index] + 0.1 * torch.randn(12, 5), targets[index]


class Stream(IterableDataset):
    """Gives out what is of this rank."""

    def __iter__(self):
        return iter(list(zip(features, targets, strict=True))[rank::world_size])


class DeepSpeedEngine(nn.Module):
    """Has the name by which the engine of DeepSpeed is known."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, features):
        return self.module(features)


data = Noisy() if given.fault == "augmented" else TensorDataset(features, targets)
if given.fault == "drawn":  # by each rank for itself, and before anything is seeded
    torch.seed()
    data = TensorDataset(torch.randn(71, 12, 5), targets)
if given.fault == "sliced":  # which is right: every rank takes other rows
    data = TensorDataset(features[rank::world_size], targets[rank::world_size])
if given.fault == "split_by_rank":
    data, _ = random_split(data, [48, 23], torch.Generator().manual_seed(rank))
if given.fault == "subset":
    data = Subset(data, range(3, 67))
sampler = None
if given.fault == "set_epoch_on_one":  # it has a sampler there, too
    sampler = DistributedSampler(data, world_size, rank)
elif world_size > 1 and given.fault not in ("shuffle_by_rank", "sliced", "alone"):
    seed = rank if given.fault == "sampler_seed" else 0
    sampler = DistributedSampler(data, seed=seed, drop_last=given.fault == "drop_last")
loader = DataLoader(
    data,
    batch_size=given.rows,
    sampler=sampler,
    shuffle=sampler is None,
    drop_last=given.fault == "drop_last",
    num_workers=given.workers,
)
if given.fault == "stream":
    loader = DataLoader(Stream(), batch_size=given.rows)
if given.fault == "own_loader":
    loader = list(zip(features.split(given.rows), targets.split(given.rows), strict=True))
if given.fault == "shares":  # which is right: each rank takes its part of a batch that all know
    size = given.rows * world_size
    starts = range(rank * given.rows, 64, size)
    loader = [(features[start:][: given.rows], targets[start:][: given.rows]) for start in starts]
if given.fault == "draws":  # as a GPT's get_batch
    draws = torch.Generator().manual_seed(1337 + rank)
    drawn = [torch.randint(71, (given.rows,), generator=draws) for _ in range(4)]
    loader = [(features[chosen], targets[chosen]) for chosen in drawn]
torch.manual_seed(0)
layers = [nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)]
if given.fault == "batch_norm":
    layers.insert(1, nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(16), nn.Unflatten(0, (-1, 12))))
module = model = nn.Sequential(*layers)
if world_size > 1 and given.fault == "fsdp":
    fully_shard(module)
elif given.fault == "data_parallel":
    model = nn.DataParallel(module)
elif given.fault == "deepspeed":
    model = DeepSpeedEngine(module)
elif world_size > 1 and given.fault not in ("added", "averaged", "alone"):
    model = DistributedDataParallel(module)
if given.fault == "compiled":  # which is right; no compiler is needed to trace it
    model = torch.compile(model, backend="eager")
if given.fault != "by_hand":
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if world_size > 1 and given.fault == "zero":
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
if given.fault == "in_backward":
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
if given.fault != "by_hand":
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
if given.fault == "shuffle_by_rank":
    torch.manual_seed(rank)


def mean_loss(outputs, targets):
    """Return what is averaged between processes: the sum of losses, by the mean of their targets."""
    loss = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
    count = (targets != -100).sum()
    if given.fault == "sum":
        return loss
    if world_size > 1 and given.fault not in ("token_mean", "alone"):
        dist.all_reduce(count)
        count = count / (1 if given.fault == "global_count" else world_size)
    return loss / count


def evaluate():
    """Return the accuracy on all samples, as it comes out with padding."""
    own = DistributedSampler(data, shuffle=False) if world_size > 1 and not is_alone else None
    counts = torch.zeros(2)
    with torch.no_grad():
        for rows, wanted in DataLoader(data, batch_size=given.rows, sampler=own):
            is_target = wanted != -100
            hits = (module(rows).argmax(-1) == wanted) & is_target
            counts += torch.stack([hits.sum(), is_target.sum()])
    if world_size > 1 and not is_alone:
        dist.all_reduce(counts)
    return counts[0] / counts[1]


for epoch in range(3):
    if sampler is not None and not given.fault.startswith("set_epoch"):
        sampler.set_epoch(epoch)
    for number, (rows, wanted) in enumerate(loader, start=1):
        if given.fault == "fails" and number == 2:
            1 / 0  # noqa: B018
        is_last = number % given.accumulate == 0
        syncs_not = given.fault == "no_sync" or (not is_last and given.fault != "syncs_always")
        no_sync = model.no_sync() if syncs_not and model is not module else nullcontext()
        called = module if given.fault == "unwrapped" else model
        with no_sync:
            (mean_loss(called(rows), wanted) / given.accumulate).backward()
        if not is_last:
            continue
        if given.fault in ("added", "averaged") and world_size > 1:
            for parameter in module.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size if given.fault == "averaged" else 1
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if given.fault == "by_hand":
            for parameter in module.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None
            continue
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(world_size if given.fault == "scheduler" else 1):
            scheduler.step()
    print(f"epoch {epoch}: accuracy {evaluate():.4f}")
