"""State that lanewise cannot see, by name, and numbers in it that matter where a few runs do not get."""

import copy
import gc
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lanewise.commands.verify.hidden import (
    GeneratorProbe,
    changed,
    hidden_state,
    numbers,
    numbers_that_matter,
    probe_generators,
)
from lanewise.config import DistributedConfig
from lanewise.lanes import Placement
from lanewise.reduce import build_reducer
from lanewise.testing import run_distributed


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.level = torch.zeros(3)
        self.history = deque([1, 2])
        self.config = {"rates": [0.1, 0.2]}


def test_parameters_and_buffers_are_not_hidden():
    model = Counting()
    before = hidden_state(model)
    with torch.no_grad():
        model.inner.weight.add_(1)
        model.norm.running_mean.add_(1)
    assert changed(before, hidden_state(model)) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: model.level.add_(1), "model.level"),
        (lambda model: model.history.append(3), "model.history.2"),
        (lambda model: model.config["rates"].__setitem__(1, 0.3), "model.config.rates.1"),
        (lambda model: setattr(model.inner, "calls", 1), "model.inner.calls"),
    ],
)
def test_a_change_is_named(change, name):
    model = Counting()
    before = hidden_state(model)
    change(model)
    assert changed(before, hidden_state(model)) == [name]


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator(), lambda one: torch.rand((), generator=one)),
        (np.random.default_rng(0), lambda one: one.random()),
        (np.random.RandomState(0), lambda one: one.rand()),
        (random.Random(0), lambda one: one.random()),
    ],
)
def test_a_generator_that_drew_is_named_as_one(generator, draw):
    task = SimpleNamespace(noise=generator)
    before = hidden_state(nn.Linear(1, 1), task=task)
    draw(generator)
    assert changed(before, hidden_state(nn.Linear(1, 1), task=task)) == ["task.noise (a generator)"]


SEEN: dict[str, int] = {}


class Keeping:
    """Keeps state in places other than the attributes of an object."""

    __slots__ = ("count", "numbers", "words")
    shared: list[int] = []  # noqa: RUF012 - of all, that is the mistake

    def __init__(self) -> None:
        self.count = 0
        self.numbers = itertools.count()
        self.words = {"a", "b"}

    def look(self) -> None:
        SEEN["all"] = SEEN.get("all", 0) + 1


def enclosed() -> Callable[[], int]:
    count = 0

    def again() -> int:
        nonlocal count
        count += 1
        return count

    return again


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda task: setattr(task, "count", 1), ["task.count"]),
        (lambda task: next(task.numbers), ["task.numbers"]),
        (lambda task: task.words.add("c"), ["task.words"]),
        (lambda task: task.shared.append(1), ["task.Keeping.shared.0"]),
        (lambda task: task.look(), ["task.Keeping.look.SEEN.all"]),
    ],
)
def test_state_in_slots_iterators_sets_classes_and_modules_is_named(change, names, monkeypatch):
    monkeypatch.setattr(Keeping, "shared", [])
    monkeypatch.setitem(globals(), "SEEN", {})
    task, model = Keeping(), nn.Linear(1, 1)
    before = hidden_state(model, task=task)
    change(task)
    assert changed(before, hidden_state(model, task=task)) == names


def test_state_in_a_closure_is_named():
    task, model = SimpleNamespace(again=enclosed(), part=partial(enclosed())), nn.Linear(1, 1)
    before = hidden_state(model, task=task)
    task.again()
    task.part()
    assert changed(before, hidden_state(model, task=task)) == ["task.again.count", "task.part.function.count"]


class Shared:
    seen = 0


LOCAL = threading.local()


@cache
def remembered(number: int) -> int:
    return number


def helped() -> None:
    SEEN["helped"] = SEEN.get("helped", 0) + 1


class Using:
    """Keeps state where its methods reach it by a name of their module."""

    def by_a_function(self) -> None:
        helped()

    def by_a_class(self) -> None:
        Shared.seen += 1

    def by_thread(self) -> None:
        LOCAL.count = getattr(LOCAL, "count", 0) + 1

    def by_cache(self) -> None:
        remembered(len(SEEN))

    @torch.no_grad()
    def by_default(self, *, seen: list[int] = []) -> None:  # noqa: B006 - that is the mistake
        seen.append(1)


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("by_a_function", "helped.SEEN.helped"),
        ("by_a_class", "Shared.seen"),
        ("by_thread", "LOCAL.count"),
        ("by_cache", "remembered.cache"),
        ("by_default", "__wrapped__.seen.0"),
    ],
)
def test_state_that_a_method_reaches_by_name_is_named(way, name, monkeypatch):
    monkeypatch.setitem(globals(), "SEEN", {})
    remembered.cache_clear()
    task, model = Using(), nn.Linear(1, 1)
    before = hidden_state(model, task=task)
    getattr(task, way)()
    assert changed(before, hidden_state(model, task=task)) == [f"task.Using.{way}.{name}"]


def test_modules_that_are_not_of_the_model_count_with_their_weights():
    model, teacher = nn.Linear(1, 1), nn.Linear(1, 1)
    task = SimpleNamespace(model=model, teacher=teacher)
    before = hidden_state(model, task=task)
    with torch.no_grad():
        model.weight.add_(1)
        teacher.weight.add_(1)
    assert changed(before, hidden_state(model, task=task)) == ["task.teacher.weight"]


def test_what_refers_to_itself_ends():
    task = SimpleNamespace(count=1)
    task.itself = task
    assert set(hidden_state(nn.Linear(1, 1), task=task)) >= {"task.count"}


def test_looking_twice_gives_the_same():
    """Values were left out once where Python gave the identity of a freed object to another one."""
    model = nn.Sequential(*[Counting() for _ in range(20)])
    looks = []
    for _ in range(5):
        looks.append(hidden_state(model))
        gc.collect()
    assert all(look == looks[0] for look in looks)
    assert sum(name.endswith("in_features") for name in looks[0]) == 20


def state_of_sharded(world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    reducer = "single" if world.world_size == 1 else "fsdp"
    built = build_reducer(model, Placement.of(2, world), world, DistributedConfig(reducer=reducer))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = hidden_state(model, optimizer=optimizer)
    built.close()
    return state


def test_a_sharded_model_hides_no_more_than_a_plain_one_and_its_optimizer_is_seen_whole():
    (plain,) = run_distributed(state_of_sharded, 1)
    assert any("exp_avg" in name for name in plain)
    assert run_distributed(state_of_sharded, 2) == [plain, plain]


def numbers_in(state: SimpleNamespace) -> dict[str, float]:
    return {name: value for name, (value, _) in numbers(nn.Linear(1, 1), state=state).items()}


def found(state: SimpleNamespace, step, matters) -> list[str]:
    """Return the names, of runs that take a step and tell whether what matters is so."""

    def run() -> bool:
        step(state)
        return not matters(state)

    before = numbers_in(state)
    names = numbers_that_matter(run, nn.Linear(1, 1), state=state)
    # Runs went on counting, and what was far off is back.
    assert all(abs(numbers_in(state)[name] - value) < 99 for name, value in before.items())
    return names


def count(state: SimpleNamespace) -> None:
    state.count += 1
    state.seen["samples"] += 4
    state.steps += 1


@pytest.mark.parametrize(
    ("matters", "names"),
    [
        (lambda state: state.level == 3.0, []),
        (lambda state: state.count % 1000 == 0, ["state.count"]),
        (lambda state: state.count % 100 == 99, ["state.count"]),
        (lambda state: state.steps > 10_000, ["state.steps"]),
        (lambda state: state.seen["samples"] % 512 == 0, ["state.seen.samples"]),
        (lambda state: state.level != 2.0, []),
    ],
)
def test_counters_that_act_rarely_are_named(matters, names):
    state = SimpleNamespace(count=5, seen={"samples": 8}, steps=torch.tensor(5), level=2.0)
    assert found(state, count, matters) == names


def test_levels_that_act_beyond_a_limit_are_named_and_what_is_set_anew_is_not():
    def learn(state: SimpleNamespace) -> None:
        state.level = 0.99 * state.level + 0.01
        state.last = state.level + state.number
        state.number += 1
        state.last = 0.5

    state = SimpleNamespace(level=0.0, last=1.0, number=0)
    assert found(state, learn, lambda state: state.level < -5) == ["state.level"]
    assert found(state, learn, lambda state: state.last != 0.5) == []


def test_what_such_a_number_breaks_is_not_called_a_cause():
    def fail(state: SimpleNamespace) -> None:
        state.count += 1
        [0] * 8 if state.count < 100 else {}["no such key"]

    assert found(SimpleNamespace(count=0, level=0), fail, lambda state: state.level) == []


class Drawing:
    """Holds a generator, and draws in one of several ways."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.rng = random.Random(7)
        self.torch = torch.Generator() if way == "seeded" else None

    def run(self) -> str:
        if self.way == "moved" and self.rng.random() < 0.02:
            return "rarely"
        if self.way == "rarely" and torch.rand(()) < 0:
            self.rng.random()
        if self.way == "copied":
            return str(copy.deepcopy(self.rng).random())
        if self.way == "anew":
            self.rng = random.Random(torch.initial_seed())
            self.rng.random()
        if self.way == "seeded":
            self.rng.seed(7)
            self.rng.random()
            torch.rand(3, generator=self.torch.manual_seed(torch.initial_seed()))
        return ""


@pytest.mark.parametrize(
    ("way", "moved", "unmoved"),
    [
        ("moved", ["task.rng (a generator)"], []),
        ("rarely", [], ["task.rng (a generator)"]),
        ("copied", [], []),
        ("anew", [], []),
        ("seeded", [], []),
    ],
)
def test_a_generator_is_named_unless_runs_seed_it(way, moved, unmoved):
    task = Drawing(way)
    state = task.rng.getstate()
    rng = task.rng
    torch.manual_seed(3)
    assert probe_generators(task.run, nn.Linear(1, 1), task=task) == GeneratorProbe(moved, unmoved)
    assert rng.getstate() == state


@pytest.mark.parametrize(
    "generator",
    [torch.Generator(), np.random.default_rng(0), np.random.RandomState(0), random.Random(0)],
)
def test_every_kind_of_generator_is_put_back(generator):
    task = SimpleNamespace(noise=generator)
    before = hidden_state(nn.Linear(1, 1), task=task)
    assert probe_generators(lambda: "", nn.Linear(1, 1), task=task) == GeneratorProbe([], [])
    assert changed(before, hidden_state(nn.Linear(1, 1), task=task)) == []
