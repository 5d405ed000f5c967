"""Prints how well a linear classifier tells held-out digits by frozen features: `python probe.py [FILE ...]`.

A file has the weights of a `ConvNet`. Beside them stand the pixels themselves, and a model without training.
The loss is that of training, over the views of all held-out digits at once.
"""

import sys
from collections.abc import Callable

import torch
from safetensors.torch import load_model
from simclr import ConvNet, load_digits, nt_xent, random_views
from torch import nn
from torch.nn import functional as F

Features = Callable[[torch.Tensor], torch.Tensor]
IMAGES, LABELS = load_digits(held_out=False)
HELD_OUT_IMAGES, HELD_OUT_LABELS = load_digits(held_out=True)


def accuracy(features: Features, chosen: torch.Tensor) -> float:
    """Train logistic regression on the chosen digits; return its share of right answers on those held out."""
    with torch.no_grad():
        known, unknown = features(IMAGES[chosen]), features(HELD_OUT_IMAGES)
    mean, deviation = known.mean(0), known.std(0) + 0.01
    known, unknown = (known - mean) / deviation, (unknown - mean) / deviation
    classifier = nn.Linear(known.shape[1], 10)
    nn.init.zeros_(classifier.weight)
    optimizer = torch.optim.LBFGS(classifier.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        penalty = 1e-3 * classifier.weight.square().sum()
        value = F.cross_entropy(classifier(known), LABELS[chosen]) + penalty
        value.backward()
        return value

    optimizer.step(loss)
    is_right: torch.Tensor = classifier(unknown).argmax(1) == HELD_OUT_LABELS
    return is_right.float().mean().item()


def held_out_loss(model: nn.Module) -> float:
    """Return the mean over five times two views of all held-out digits, which are the same for each model."""
    torch.manual_seed(0)
    losses = []
    with torch.no_grad():
        for _ in range(5):
            first, second = (model(random_views(HELD_OUT_IMAGES)) for _ in range(2))
            losses.append(nt_xent(first, second, temperature=0.2))
    return torch.stack(losses).mean().item()


def main() -> None:
    torch.manual_seed(0)
    models = {name: ConvNet(width=128) for name in ("not trained", *sys.argv[1:])}
    for file in sys.argv[1:]:
        load_model(models[file], file)
    every = torch.arange(len(LABELS))
    of_class = torch.stack([LABELS.eq(digit).nonzero().flatten()[:100] for digit in range(10)])
    few = [one.flatten() for one in of_class.split(20, dim=1)]
    print("accuracy: all labels  20 of each digit, mean of five choices  held-out loss")
    sources: dict[str, Features] = {"pixels": nn.Flatten()} | {
        name: one.features for name, one in models.items()
    }
    for name, features in sources.items():
        with_few = sum(accuracy(features, chosen) for chosen in few) / len(few)
        loss = f"{held_out_loss(models[name]):.3f}" if name in models else ""
        print(f"{accuracy(features, every):20.3f}  {with_few:38.3f}  {loss:>13}  {name}", flush=True)


if __name__ == "__main__":
    main()
