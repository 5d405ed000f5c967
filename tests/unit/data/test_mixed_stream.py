"""Mixing streams: what is drawn, what happens when one ends, and how a lane goes on from a state."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from lanewise.data import LaneStream, MixedStream
from lanewise.data.mixed_stream import WhenOneEnds
from lanewise.errors import ConfigError, DataError

RULES = ("go_on", "repeat", "end_epoch")


class Letters:
    """Numbered samples of a name; lane-aware, without a state, each with a random number."""

    def __init__(self, name: str, length: int) -> None:
        self.name = name
        self.length = length

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterable[Any]:
        for number in range(self.length):
            yield self.name, epoch, lane, number, torch.rand(()).item()


class Counted(Letters):
    """The same with a state, without the random number."""

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterable[Any]:
        return Count((self.name, epoch, lane), self.length)


class Count:
    def __init__(self, key: tuple[Any, ...], length: int) -> None:
        self.key = key
        self.length = length
        self.number = 0

    def __iter__(self) -> Iterator[Any]:
        while self.number < self.length:
            self.number += 1
            yield *self.key, self.number - 1, 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class Draw(Count):
    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.length).tolist()
        return ((*self.key, order[sample[3]], 0.0) for sample in super().__iter__())


class Drawn(Letters):
    """The same without a state, in an order that is drawn when the lane is opened."""

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterable[Any]:
        return [(self.name, epoch, lane, number, 0.0) for number in torch.randperm(self.length).tolist()]


class DrawnAndCounted(Letters):
    """The same with a state, which does not hold the order."""

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterable[Any]:
        return Draw((self.name, epoch, lane), self.length)


class Plain(IterableDataset[Any]):
    """Yields the epoch that it was told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        yield from [("plain", self.epoch, 0, number, 0.0) for number in range(3)]


def mixed(lengths: list[int], rule: WhenOneEnds, kinds: Any = (Letters, Counted)) -> MixedStream:
    streams = [kinds[number % len(kinds)](str(number), length) for number, length in enumerate(lengths)]
    return MixedStream(streams, [1 + number for number in range(len(lengths))], rule)


def names(samples: Iterable[Any]) -> list[str]:
    return [sample[0] for sample in samples]


def test_what_is_drawn_follows_the_weights_and_from_seed_epoch_and_lane():
    streams = [Letters(name, 3000) for name in "abc"]

    def first(seed: int, epoch: int, lane: int) -> str:
        lane_of = MixedStream(streams, [6, 3, 1], seed=seed).iter_lane(epoch, lane, 4)
        return "".join(names(sample for sample, _ in zip(lane_of, range(3000), strict=False)))

    found = Counter(first(0, 0, 0))
    assert [round(found[name] / 300) for name in "abc"] == [6, 3, 1]
    assert first(0, 0, 0) == first(0, 0, 0)
    assert len({first(0, 0, 0), first(1, 0, 0), first(0, 1, 0), first(0, 0, 1)}) == 4


def test_a_weight_of_zero_is_never_read():
    def boom() -> Any:
        raise AssertionError

    never = Letters("never", 3)
    never.iter_lane = boom
    for rule in RULES:
        lane = MixedStream([never, Letters("a", 3)], [0, 2.5], rule).iter_lane(0, 0, 1)
        assert names(lane) == ["a"] * 3


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4), rule=st.sampled_from(RULES))
def test_what_a_lane_has_when_one_ends(lengths, rule):
    samples = list(mixed(lengths, rule).iter_lane(2, 1, 4))
    of = {str(number): [s[3] for s in samples if s[0] == str(number)] for number in range(len(lengths))}
    assert all(sample[1:3] == (2, 1) for sample in samples)
    if rule == "go_on":
        assert of == {str(number): list(range(length)) for number, length in enumerate(lengths)}
        return
    for number, length in enumerate(lengths):
        read = of[str(number)]
        assert read == [place % length for place in range(len(read))] if length else not read
        if rule == "repeat":
            assert len(read) >= length
        else:
            assert len(read) <= length
    ended = [len(of[str(number)]) >= length for number, length in enumerate(lengths)]
    assert all(ended) if rule == "repeat" else any(ended)
    if rule == "repeat":  # it ends with the last one, which has come to its end once
        assert any(len(of[str(number)]) == length for number, length in enumerate(lengths))


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    rule=st.sampled_from(RULES),
    kinds=st.sampled_from([(Letters,), (Counted,), (Letters, Counted), (Drawn,), (Drawn, DrawnAndCounted)]),
    data=st.data(),
)
def test_a_lane_goes_on_from_its_state_with_the_same_samples(lengths, rule, kinds, data):
    stream = mixed(lengths, rule, kinds)
    whole = list(stream.iter_lane(0, 0, 1))
    at = data.draw(st.integers(0, len(whole)))
    before = iter(stream.iter_lane(0, 0, 1))
    torch.manual_seed(1)  # what others draw changes nothing
    assert [next(before) for _ in range(at)] == whole[:at]
    after = stream.iter_lane(0, 0, 1)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    again = stream.iter_lane(0, 0, 1)
    again.load_state_dict(json.loads(json.dumps(after.state_dict())))  # before anything is read
    assert list(after) == whole[at:]
    assert list(again) == whole[at:]
    assert list(after) == []


@pytest.mark.parametrize("rule", RULES)
def test_streams_without_samples_end_at_once(rule):
    assert list(mixed([0, 0], rule).iter_lane(0, 0, 1)) == []


def test_a_mixture_can_be_cut_as_its_streams_can():
    aware, plain = Letters("a", 3), Plain()
    assert isinstance(MixedStream([aware], [1]), LaneStream)
    assert MixedStream([aware, aware], [1, 1]).num_shards is None
    assert MixedStream([aware, plain], [1, 1]).num_shards == 1
    nested = MixedStream([MixedStream([aware, plain], [1, 1]), aware], [1, 1])
    assert nested.num_shards == 1
    samples = list(nested.iter_lane(5, 0, 1))
    assert Counter(names(samples)) == {"a": 6, "plain": 3}
    assert {sample[1] for sample in samples} == {5}


@pytest.mark.parametrize(
    ("weights", "rule", "said"),
    [
        ([1], "go_on", "it has 2 streams and 1 weights"),
        ([1, -1], "go_on", r"not all 0: got \[1.0, -1.0\]"),
        ([1, float("nan")], "go_on", "must be finite"),
        ([1, float("inf")], "go_on", "must be finite"),
        ([0, 0], "go_on", "not all 0"),
        ([1, 1], "stop", "go_on, repeat, end_epoch: got 'stop'"),
    ],
)
def test_what_means_nothing_is_an_error(weights, rule, said):
    with pytest.raises(ConfigError, match=said) as caught:
        MixedStream([Letters("a", 1), Letters("b", 1)], weights, rule)
    assert len(caught.value.mistakes) == 1


def test_no_streams_are_an_error():
    with pytest.raises(ConfigError, match="not all 0"):
        MixedStream([], [])


def test_a_stream_that_yields_less_when_it_is_read_again_is_an_error():
    stream = mixed([4], "go_on", (Letters,))
    lane = iter(stream.iter_lane(0, 0, 1))
    for _ in range(3):
        next(lane)
    stream.streams[0].length = 2
    after = stream.iter_lane(0, 0, 1)
    with pytest.raises(DataError, match="ended after 2 samples, and had yielded 3 before"):
        after.load_state_dict(lane.state_dict())
