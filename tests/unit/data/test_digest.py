"""Equal values have equal digests, different ones different digests, or a warning says which have not."""

import importlib
import logging
import re
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch

from lanewise.data import digest, opaque_types


class Slots:
    __slots__ = ("label", "pixels", "unset")

    def __init__(self, pixels: Any, label: int) -> None:
        self.pixels = pixels
        self.label = label


@dataclass(frozen=True, slots=True)
class Pair:
    left: Any
    right: Any


class Own:
    """Says itself what its value is, and keeps something else besides."""

    def __init__(self, value: int, cache: int) -> None:
        self.value = value
        self.cache = cache

    def __getstate__(self) -> Any:
        return {"value": self.value}


class Deep:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


@pytest.mark.parametrize(
    ("value", "other"),
    [
        ({1, 2}, {1, 3}),
        ({"a"}, {"b"}),
        ({(1, "a")}, {(1, "b")}),
        (Slots(torch.zeros(2), 1), Slots(torch.ones(2), 1)),
        (Slots([1], 1), Slots([1], 2)),
        (Pair(1, {2}), Pair(1, {3})),
        (Decimal("1.5"), Decimal("1.6")),
        (date(2026, 1, 1), date(2026, 1, 2)),
        (Path("a"), Path("b")),
        (re.compile("a"), re.compile("b")),
        (partial(max, 1), partial(max, 2)),
        (torch.float32, torch.float64),
        (Own(1, 1), Own(2, 1)),
        (int, float),
        (deque([1]), deque([2])),
        (np.array([(1, "a")], dtype=object), np.array([(1, "b")], dtype=object)),
        (torch._efficientzerotensor((2,)), torch._efficientzerotensor((3,))),
    ],
)
def test_different_values_differ(value, other, caplog):
    assert digest(value) != digest(other)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (set("abcdefgh"), set("hgfedcba")),
        (frozenset([8, 0, 16]), frozenset([16, 8, 0])),
        (Slots(torch.zeros(2), 1), Slots(torch.zeros(2), 1)),
        (Own(1, 1), Own(1, 2)),
        (object(), object()),
        (torch._efficientzerotensor((2,)), torch.zeros(2)),
    ],
)
def test_equal_values_are_equal(value, other, caplog):
    assert digest(value) == digest(other)
    assert caplog.text == ""


def test_a_list_in_itself_ends():
    def circle(value: int) -> list[Any]:
        made: list[Any] = [value]
        made.append({"again": made})
        return made

    assert digest(circle(1)) == digest(circle(1)) != digest(circle(2))


@pytest.mark.slow  # so does test_fingerprint, in another interpreter as well
def test_another_process_hashes_a_set_alike():
    """Which iterates over it in another order."""
    script = "from lanewise.data import digest; print(digest(set('abcdefgh')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest(set("abcdefgh"))


def test_what_has_no_value_is_said_once_and_the_rest_counts(caplog, monkeypatch):
    monkeypatch.setattr(importlib.import_module("lanewise.data.digest"), "_opaque", {})

    def lock(value: int) -> Any:
        return {"lock": Lock(), "value": value}

    with caplog.at_level(logging.WARNING):
        assert digest(lock(1)) == digest(lock(1)) != digest(lock(2))
        assert digest(lambda: 1) == digest(lambda: 2)
        assert digest(Deep(Deep(Deep(Deep(Deep(1)))))) == digest(Deep(Deep(Deep(Deep(Deep(2))))))
        assert digest(torch.empty(2, device="meta")) == digest(torch.empty(2, device="meta"))
    assert [
        record.getMessage().partition(" is compared by its type alone")[0] for record in caplog.records
    ] == [
        "_thread.lock",
        "builtins.function",
        f"{__name__}.Deep",
        "torch.Tensor",
    ]
    assert opaque_types() == ("_thread.lock", "builtins.function", f"{__name__}.Deep", "torch.Tensor")


def test_a_tensor_that_was_hashed_can_be_resized():
    buffer = torch.arange(3.0)
    digest(buffer)
    assert buffer.resize_(5000).shape == (5000,)
