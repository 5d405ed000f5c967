"""A checkpoint with right checksums and wrong contents: refused before anything is changed, or taken so."""

import copy
import json
import math
import operator
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, MultiStepLR, SequentialLR

from lanewise.engine.precision import LossScale
from lanewise.engine.state.mismatch import kind_mismatches, optimizer_mismatches
from lanewise.engine.state.restore import restore
from lanewise.engine.state.run_state import RunState, take_optimizer
from lanewise.errors import CheckpointError
from lanewise.processes.world.encode import decode
from lanewise.processes.world.world import LocalWorld
from lanewise.runs.checkpoint.folder import CheckpointFolder
from lanewise.runs.checkpoint.manifest import Manifest, write_durably
from lanewise.runs.checkpoint.saver import Saver, load_state
from tests.slow import slow
from tests.unit.engine.state.test_run_state import freeze


class Strict:
    """An object of the user's that accepts one kind of state, and notices in the middle."""

    def __init__(self) -> None:
        self.count, self.name = 3, "three"

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "name": self.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.keys() != {"count", "name"}:
            raise KeyError(str(state.keys()))
        self.count = state["count"]
        self.name = state["name"]
        if type(self.count) is not int or type(self.name) is not str:
            raise TypeError("neither a count nor a name")


class Factor:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(inputs))

    def get_extra_state(self) -> Any:
        return {"seen": 5}

    def set_extra_state(self, state: Any) -> None:
        if state != {"seen": 5}:
            raise ValueError("seen what?")


def build(num_steps: int = 0) -> RunState:
    """Make the objects of a run, and take some steps."""
    torch.manual_seed(num_steps)
    net = Net()
    adam = torch.optim.AdamW(
        [{"params": net.linear.parameters(), "weight_decay": 0.1}, {"params": net.norm.parameters()}]
    )
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    warmup = LinearLR(adam, total_iters=2)
    schedulers = [SequentialLR(adam, [warmup, MultiStepLR(adam, [2, 2, 5])], [2]), LambdaLR(sgd, Factor())]
    for _ in range(num_steps):
        net(torch.randn(4, 3)).square().sum().backward()
        for stepped in (adam, sgd, *schedulers):
            stepped.step()
    names = ("model", "adam", "sgd", "warmup", "factor", "strict", "loss_scale")
    return RunState(dict(zip(names, (net, adam, sgd, *schedulers, Strict(), LossScale()), strict=True)))


def sign(folder: Path, tree: Any) -> Manifest:
    """Write a state to a checkpoint, with right checksums."""
    manifest = Manifest.read(folder)
    entry = write_durably(folder / "state.json", json.dumps(tree).encode())
    files = tuple(entry if file.name == entry.name else file for file in manifest.files)
    Manifest(manifest.step, manifest.metric, manifest.identity, files).write(folder)
    return Manifest.read(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = CheckpointFolder(tmp_path_factory.mktemp("run"))
    saver = Saver(folder, LocalWorld(torch.device("cpu")), keep_last=1, keep_best=0, sign=1)
    saver.save(build(3).take(), Manifest(3, None, {}, ()))
    assert saver.finish()
    return folder.of_step(3)


WRONG = [
    None,
    True,
    -7,
    10**400,
    0.25,
    math.nan,
    {"$float": "nan"},
    {"$float": "x"},
    "text",
    [],
    [1],
    {},
    {"a": 1},
]
WRONG += [{"$tensor": "adam/state/model.linear.weight/exp_avg"}, {"$tensor": "none"}, {"$tensor": []}]
WRONG += [
    {"$tuple": []},
    {"$counter": []},
    {"$counter": [["a", "b"]]},
    {"$items": [[[], 1]]},
    {"$shards": [[1]]},
]


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Give the way to every value in a tree."""
    yield path
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield from places(tree[key], (*path, key))


def edited(tree: Any, path: tuple[Any, ...], *, change: Callable[[Any, Any], None]) -> Any:
    """Return a copy of the tree after `change(parent, key)` of one place."""
    whole = {"": copy.deepcopy(tree)}
    parent: Any = whole
    *above, last = ("", *path)
    for key in above:
        parent = parent[key]
    change(parent, last)
    return whole.get("")


def edits(tree: Any) -> Iterator[tuple[str, Any]]:
    """Give the tree with one value at a time replaced, removed, or with another one beside it.

    Each place gets three of the wrong values, in turn: all of them at all places would take minutes.
    """
    wrong = cycle(WRONG)
    for path in places(tree):
        for value in islice(wrong, 3):
            yield (
                f"{path} = {value!r:.60}",
                edited(
                    tree, path, change=lambda parent, key, value=value: operator.setitem(parent, key, value)
                ),
            )
        yield f"{path} removed", edited(tree, path, change=operator.delitem)
        if path and isinstance(path[-1], str):
            yield f"{path} and more", edited(tree, path, change=lambda parent, _: parent.update(more=1))


def outcome_of(folder: Path, tree: Any) -> str:
    """Go on from a checkpoint; return what is wrong with how that ended."""
    manifest = sign(folder, tree)
    state = build()
    before = freeze(state.take())
    try:
        restore(state, {}, folder, manifest)
    except CheckpointError:
        return "" if freeze(state.take()) == before else "refused, and changed"
    except Exception as error:  # noqa: BLE001 - what a user would see
        return f"{type(error).__name__}: {error!s:.100}"
    return "" if freeze(state.take()) == freeze(load_state(folder, manifest)) else "accepted, and other bytes"


@pytest.mark.parametrize("every", [10, *slow(1)])
def test_an_edited_state_is_refused_or_taken_as_it_is(saved, tmp_path, monkeypatch, every):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    folder = Path(shutil.copytree(saved, tmp_path / saved.name))
    tree = json.loads((saved / "state.json").read_bytes())
    assert outcome_of(folder, tree) == ""
    failures = [
        f"{edit}: {outcome}"
        for edit, changed in islice(edits(tree), 0, None, every)
        if (outcome := outcome_of(folder, changed))
    ]
    assert not failures, "\n".join(failures)


def test_what_does_not_fit_is_one_error_that_lists_it(saved, tmp_path):
    folder = Path(shutil.copytree(saved, tmp_path / saved.name))
    tree = json.loads((saved / "state.json").read_bytes())
    tree["adam"]["groups"][1]["lr"] = {"$float": "nan"}
    tree["adam"]["state"]["elsewhere"] = tree["adam"]["state"].pop("model.norm.bias")
    with pytest.raises(CheckpointError) as caught:
        restore(build(), {}, folder, sign(folder, tree))
    assert "\n  adam state model.norm.bias is not in it" in str(caught.value)
    assert "\n  adam groups 1 lr is nan in it and 0.00033" in str(caught.value)


TORCH_OPTIMIZERS = {
    name: {"momentum": 0.9} if name == "SGD" else {}
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "NAdam",
        "RAdam",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "RMSprop",
        "Rprop",
    )
} | {"ASGD": {}, "Adafactor": {}, "Muon": {}}


@pytest.mark.parametrize(("name", "options"), TORCH_OPTIMIZERS.items())
def test_what_torchs_optimizers_keep_of_a_parameter_is_known(name, options):
    """Also where the parameter is the only one of its kind, so that no other shows what is missing."""
    weight = nn.Parameter(torch.ones(3, 2))

    def make() -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        optimizer = getattr(torch.optim, name)([weight], lr=0.1, **options)
        return optimizer, take_optimizer(optimizer, {weight: "weight"})

    weight.grad = torch.ones_like(weight)
    optimizer, _ = make()
    optimizer.step()
    saved = take_optimizer(optimizer, {weight: "weight"})
    fresh, own = make()

    def mismatches(state: Any) -> list[str]:
        return list(
            optimizer_mismatches(fresh, own, {**saved, "state": {"weight": state}}, {weight: "weight"}, "it")
        )

    state = saved["state"]["weight"]
    assert mismatches(state) == []
    assert mismatches({}) == []
    for key in state:
        rest = {name: value for name, value in state.items() if name != key}
        assert mismatches(rest) or not rest, key
        assert mismatches({**state, key: torch.ones(5)}), key
    assert mismatches({**state, "more": 1})


def test_another_optimizer_is_measured_by_its_other_parameters():
    class Own(torch.optim.Adam):
        pass

    first, second, vector = (nn.Parameter(torch.ones(shape)) for shape in [(2, 3), (4, 1), (5,)])
    names = {first: "first", second: "second", vector: "vector"}
    own = take_optimizer(Own(names), names)
    saved = {**own, "state": {"first": {"a": 1}, "second": {"a": 2}, "vector": {"b": 1}}}
    assert list(optimizer_mismatches(Own(names), own, saved, names, "it")) == []
    saved["state"]["second"] = {"b": 2}
    mismatches = optimizer_mismatches(Own(names), own, saved, names, "it")
    assert list(mismatches) == ["it state second a is not in it", "it state second b is not in this run"]


@pytest.mark.parametrize(
    ("own", "saved"),
    [
        (1, 2.5),
        (math.inf, 3.0),
        (None, "x"),
        (True, None),
        ([], [1]),
        (Counter(), Counter({3: 1})),
        ((1, None), (2, 3)),
        (0.1, 2**62 - 1),
        (torch.tensor(0.0), torch.tensor(math.inf)),  # a buffer, such as the largest value so far
    ],
    ids=repr,
)
def test_what_is_of_the_same_kind_fits(own, saved):
    assert list(kind_mismatches(own, saved, "it")) == []


def test_tensors_without_a_dimension_are_shown_by_their_values():
    mismatches = kind_mismatches(torch.tensor(1), torch.tensor(1.5), "it")
    assert list(mismatches) == ["it is tensor(1.5000) in it and tensor(1) in this run"]


@pytest.mark.parametrize("saved", [2**62, -(2**63), 10**400])
def test_an_integer_that_torch_does_not_take_fits_nothing(saved):
    assert len(list(kind_mismatches(0.1, saved, "lr"))) == 1


def test_a_state_that_is_named_by_nobody_is_refused(saved, tmp_path):
    folder = Path(shutil.copytree(saved, tmp_path / saved.name))
    tree = json.loads((saved / "state.json").read_bytes())
    del tree["adam"]
    with pytest.raises(CheckpointError, match="does not refer to the tensor adam/state/"):
        load_state(folder, sign(folder, tree))


def test_rows_that_are_named_often_are_joined_once(tmp_path):
    tree = {"a": {"$shards": [["w@0", 0]]}, "tied": {"$shards": [["w@0", 0]]}}
    state = decode(tree, {"w@0": torch.ones(2, 2)})
    assert state["a"] is state["tied"]
    with pytest.raises(LookupError, match="which is not a known encoding"):
        decode({"a": {"$shards": [["w@0", 0], ["w@0", 2]]}}, {"w@0": torch.ones(2, 2)})
