"""Tests whether an update of the optimizer depends on state that a checkpoint does not hold."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lanewise.commands.recording.recorder import tensor_digests
from lanewise.commands.verify.hidden import changed, hidden_state, numbers_that_matter
from lanewise.config.optimizer_rules import needs_closure
from lanewise.engine.step.update import Training
from lanewise.processes.device.random_state import set_random_state

_NUM_AGAIN = 6


@dataclass(frozen=True)
class Updates:
    """What several updates from equal weights, gradients, optimizer state and random state gave."""

    parameter: str = ""
    """A parameter that differs between the updates; empty where none does."""
    changed: Sequence[str] = ()
    """Values outside of the optimizer's state dict that a further update changed."""

    def __str__(self) -> str:
        equal = "equal weights, gradients, optimizer state and random state"
        return f"another update from {equal} gives another {self.parameter}"


def probe_updates(training: Training) -> Updates:
    """Update several times, at the end of a run, where the optimizer can load its state."""
    model, optimizer = training.model, training.optimizer
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    kept = [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]
    gradients = {name: 0.1 * weight.detach() + 0.01 for name, weight in trained.items()}
    state = copy.deepcopy(optimizer.state_dict())

    def give_gradients() -> float:
        for name, weight in trained.items():
            weight.grad = gradients[name].clone()
        return 0.0

    closures = [give_gradients] if needs_closure(type(optimizer), is_asked=training.closure) else []

    def update() -> dict[str, str]:
        optimizer.load_state_dict(copy.deepcopy(state))
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
        give_gradients()
        set_random_state(0)
        optimizer.step(*closures)
        return tensor_digests(trained.items())

    try:
        first = update()
    except Exception:  # noqa: BLE001 - verify with --resume says what is wrong with it
        return Updates()
    hidden = hidden_state(model, optimizer=optimizer)
    last = update()
    names = changed(hidden, hidden_state(model, optimizer=optimizer))
    for _ in range(_NUM_AGAIN if names else 0):
        last = update() if last == first else last
    if last != first:
        return Updates(changed(first, last)[0], names)
    far = numbers_that_matter(lambda: update() == first, model, optimizer=optimizer)
    return Updates(next(iter(first)), far) if far else Updates("", names)
