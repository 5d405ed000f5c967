"""Optimizers that ask more of a trainer than `step()`, in the style of those that people install."""

import torch
from torch.optim import SGD

from lanewise.processes.world.shards import is_sharded


class Sharpness(SGD):
    """Sharpness-aware minimisation (Foret et al., 2021), which needs the gradient, and a closure for another.

    Like the usual implementations, it declares no closure that it must get.
    """

    def __init__(self, params, lr: float, rho: float = 0.05) -> None:
        super().__init__(params, lr, momentum=0.9)
        self.rho = rho

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"
        trained = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for one in trained]).norm()
        before = [one.clone() for one in trained]
        for one in trained:
            one.add_(one.grad * (self.rho / (norm + 1e-12)))
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for one, old in zip(trained, before, strict=True):
            one.copy_(old)
        super().step()
        return loss


class ScheduleFree(SGD):
    """Schedule-free SGD (Defazio et al., 2024): trains one point, and evaluates an average of another.

    Its modes are those of the authors' package: the way between them is a lerp, which rounds.
    """

    def __init__(self, params, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group |= {"beta": momentum, "k": 0, "train_mode": False}

    @torch.no_grad()
    def _to(self, *, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train:
                weight = 1 - group["beta"] if train else 1 - 1 / group["beta"]
                for one in group["params"]:
                    if "z" in self.state[one]:
                        one.lerp_(self.state[one]["z"], weight)
            group["train_mode"] = train

    def train(self) -> None:
        self._to(train=True)

    def eval(self) -> None:
        self._to(train=False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"], "Optimizer was not in train mode when step is called."
            beta, lr, group["k"] = group["beta"], group["lr"], group["k"] + 1
            for one in (one for one in group["params"] if one.grad is not None):
                z = self.state[one].setdefault("z", one.clone())
                one.lerp_(z, 1 / group["k"])
                one.add_(one.grad, alpha=lr * (beta * (1 - 1 / group["k"]) - 1))
                z.sub_(one.grad, alpha=lr)


class Swapping(SGD):
    """Averages its weights, and swaps both for an evaluation, which changes its state as well."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, lr, momentum=0.9)
        self.is_training = False

    @torch.no_grad()
    def _swap(self, *, train: bool) -> None:
        if self.is_training is not train:
            for one, state in self.state.items():
                # Adding and subtracting swaps without a copy, and rounds.
                one.add_(state["average"])
                state["average"] = one - state["average"]
                one.sub_(state["average"])
        self.is_training = train

    def train(self) -> None:
        self._swap(train=True)

    def eval(self) -> None:
        self._swap(train=False)

    @torch.no_grad()
    def step(self, closure=None):
        assert self.is_training
        super().step()
        for group in self.param_groups:
            for one in (one for one in group["params"] if one.grad is not None):
                self.state[one].setdefault("average", one.clone()).lerp_(one, 0.3)


def _local(tensor):
    """Return this process's part of a tensor, of which torch would refuse the draw on CPUs."""
    return tensor.to_local() if is_sharded(tensor) else tensor


class Noisy(SGD):
    """Adds noise to the gradient: Langevin dynamics."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in (one for one in group["params"] if one.grad is not None):
                _local(one.grad).add_(torch.randn_like(_local(one.grad)), alpha=0.01)
        super().step()


class NoisyByItself(Noisy):
    """Likewise, with a generator of its own."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, lr)
        self.generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in (one for one in group["params"] if one.grad is not None):
                local = _local(one.grad)
                local.add_(torch.randn(local.shape, generator=self.generator), alpha=0.01)
        SGD.step(self)
