"""Prints how well a linear classifier tells held-out digits by frozen features: `python probe.py [FILE ...]`.

A file has the weights of a `ConvNet`. Beside them stand the pixels themselves, and a model without training.
"""

import sys
from collections.abc import Callable

import torch
from safetensors.torch import load_model
from simclr import ConvNet, load_digits
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


def load(file: str) -> Features:
    model = ConvNet(width=128)
    load_model(model, file)
    return model.features


def main() -> None:
    torch.manual_seed(0)
    sources: dict[str, Features] = {"pixels": nn.Flatten(), "not trained": ConvNet(width=128).features}
    sources |= {file: load(file) for file in sys.argv[1:]}
    every = torch.arange(len(LABELS))
    of_class = torch.stack([LABELS.eq(digit).nonzero().flatten()[:100] for digit in range(10)])
    few = [one.flatten() for one in of_class.split(20, dim=1)]
    print("all labels  20 of each digit, mean of five choices")
    for name, features in sources.items():
        with_few = sum(accuracy(features, chosen) for chosen in few) / len(few)
        print(f"{accuracy(features, every):10.3f}  {with_few:16.3f}  {name}", flush=True)


if __name__ == "__main__":
    main()
