"""Which generators objects hold, and which of them code of the user may use while lanes run."""

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from lanewise.engine.reachable import is_used_in_lanes, own_generators

RNG = random.Random(1)


def found(task, model=None):
    held = own_generators(nn.Linear(1, 1) if model is None else model, task=task)
    return {one.name: is_used_in_lanes(one, [task]) for one in held}


class Holding:
    """Uses a generator in some method; each case overrides one."""

    def __init__(self):
        self.rng = np.random.default_rng(0)


class InForward(Holding):
    def forward(self, model, batch):
        return batch if self.rng.random() > 0.02 else model(batch)


class InAHelper(Holding):
    def __getitem__(self, index):
        return self._noise()

    def _noise(self):
        return self.rng.random()


class InAProperty(Holding):
    @property
    def level(self):
        return self.rng.random()


class WithoutGradient(Holding):
    @torch.no_grad()
    def forward(self, model, batch):
        return self.rng.random()


class InTheConstructor(Holding):
    def __init__(self):
        super().__init__()
        self.rows = self._make()

    def _make(self):
        return self.rng.random(3)

    def __getitem__(self, index):
        return self.rows[index]


class InBuildModel(Holding):
    def build_model(self):
        return nn.Linear(1, self.rng.integers(8))


class Nowhere(Holding):
    pass


class InAPart:
    def __init__(self):
        self.part = SimpleNamespace(config=InForward())

    def forward(self, model, batch):
        return self.part.config.forward(model, batch)


class InAList:
    def __init__(self):
        self.rngs = [random.Random(lane) for lane in range(2)]

    def collate(self, samples):
        return self.rngs[0].random()


class InAPartial:
    def __init__(self):
        self.augment = partial(random.Random(7).shuffle)
        self.other = partial(print, rng=random.Random(7))

    def collate(self, samples):
        return self.other(self.augment(samples))


class OfTheModule:
    def __getitem__(self, index):
        return RNG.random()


class OfTheModuleInTheConstructor:
    def __init__(self):
        self.rows = RNG.random()


class OfALibrary:
    def __init__(self):
        data = TensorDataset(torch.zeros(4))
        self.sampler = RandomSampler(data, generator=torch.Generator())
        self.loader = DataLoader(data, sampler=self.sampler, generator=torch.Generator())

    def forward(self, model, batch):
        return next(iter(self.loader)), self.sampler.generator


@pytest.mark.parametrize(
    ("task", "names"),
    [
        (InForward(), {"task.rng": True}),
        (InAHelper(), {"task.rng": True}),
        (InAProperty(), {"task.rng": True}),
        (WithoutGradient(), {"task.rng": True}),
        (InAPart(), {"task.part.config.rng": True}),
        (InAList(), {"task.rngs.0": True, "task.rngs.1": True}),
        (InAPartial(), {"task.augment.function.self": True, "task.other.keywords.rng": True}),
        (OfTheModule(), {"task.OfTheModule.__getitem__.RNG": True}),
        (InTheConstructor(), {"task.rng": False}),
        (InBuildModel(), {"task.rng": False}),
        (Nowhere(), {"task.rng": False}),
        (OfTheModuleInTheConstructor(), {"task.OfTheModuleInTheConstructor.__init__.RNG": False}),
        (OfALibrary(), {"task.sampler.generator": False, "task.loader.generator": False}),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_lanes_may_use_is_told_from_what_only_builds_or_is_a_librarys(task, names):
    assert found(task) == names


def test_a_module_may_use_its_own():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.noise = torch.Generator()

        def forward(self, given):
            return given + torch.rand(1, generator=self.noise)

    assert found(object(), nn.Sequential(Noisy())) == {"model.0.noise": True}


def test_the_default_generators_and_the_systems_are_not_own_ones():
    task = SimpleNamespace(
        torch=torch.default_generator,
        python=random.random.__self__,
        numpy=np.random.mtrand._rand,
        system=random.SystemRandom(),
    )
    assert found(task) == {}


class Guarded:
    """Refuses to be looked at before it is set up, as some configurations of trackers do."""

    def __init__(self):
        self.noise = random.Random(7)

    def __getattr__(self, name):
        raise RuntimeError(f"set it up before you ask for {name}")


class WithoutState(nn.Module):
    """Cannot tell its state, as some that are quantised or sharded cannot."""

    def state_dict(self, *_args, **_options):
        raise RuntimeError("no state")


class OfGuarded:
    def __init__(self):
        self.guarded, self.other = Guarded(), WithoutState()
        self.rng = random.Random(7)

    def forward(self, model, batch):
        return model(batch) + self.rng.random() + self.guarded.noise.random()


def test_an_object_that_refuses_to_be_looked_at_hides_no_other():
    assert found(OfGuarded()) == {"task.guarded.noise": True, "task.rng": True}
