"""Prints what popularity and a last-item Markov chain reach: `python baselines.py [FOLDER]`.

Held-out sessions, ranking, ties and items that the session has already are those of the model.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from session_rec import Batch, ModelConfig, SessionRec, ranked, split_last

from lanewise.data import ParquetDataset
from lanewise.metrics import RankingMetrics


def batches(task: SessionRec, sessions: ParquetDataset) -> Iterator[Batch]:
    for start in range(0, len(sessions), 1024):
        yield task.collate(sessions.__getitems__(list(range(len(sessions)))[start : start + 1024]))


def evaluate(task: SessionRec) -> dict[str, dict[str, float]]:
    """Return the metrics of each baseline on the held-out sessions.

    Popularity scores an item by its clicks in training. The chain scores it by how often it came right after
    the item before, and items that are alike in that by their popularity. Its table has a number for each
    pair of items: 800 MB for 10,000 of them.
    """
    size = task.num_items + 1
    follows = torch.zeros(size, size, dtype=torch.float64)
    clicks = torch.zeros(size, dtype=torch.float64)
    for batch in batches(task, task.train_dataset()):
        items = batch["items"]
        clicks += items.flatten().bincount(minlength=size)
        pairs = items[:, :-1].flatten() * size + items[:, 1:].flatten()
        follows += pairs.bincount(minlength=size * size).view(size, size)
    chain = follows + clicks / (1 + clicks.sum())
    metrics = {"popularity": RankingMetrics(10), "Markov chain": RankingMetrics(10)}
    for batch in batches(task, task.eval_datasets()["held_out"]):
        seen, last = split_last(batch)
        before = seen.gather(1, batch["lengths"][:, None] - 2).squeeze(1)
        for name, scores in (("popularity", clicks.repeat(len(last), 1)), ("Markov chain", chain[before])):
            metrics[name].update(ranked(scores, seen, may_repeat=task.may_repeat), last)
    return {
        name: {key: float(value) for key, value in metric.compute().items()}
        for name, metric in metrics.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", help="what prepare.py made; generated sessions if left out"
    )
    parser.add_argument("--context", type=int, default=ModelConfig.context, help="as of the model")
    parser.add_argument("--may-repeat", action="store_true", help="as of the task")
    given = parser.parse_args()
    task = SessionRec(given.folder, ModelConfig(context=given.context), may_repeat=given.may_repeat)
    for name, values in evaluate(task).items():
        print(f"{name:14}", *(f"{key} {value:.3f}" for key, value in values.items()), sep="  ")


if __name__ == "__main__":
    main()
