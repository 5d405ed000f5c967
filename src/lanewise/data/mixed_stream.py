"""Mixes several streams by weights, each lane for itself."""

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any, Final, Literal, Self, TypeAlias, final, get_args

import numpy as np

from lanewise.data.lane_stream import OpenStream, Stream, as_lane_stream, shards_of
from lanewise.errors import ConfigError, DataError
from lanewise.lanes.orders.permutation import uniform, words
from lanewise.processes.device.random_state import kept_random_state, set_random_state

WhenOneEnds: TypeAlias = Literal["go_on", "repeat", "end_epoch"]
_END: Final = object()
_DRAWS: Final = 1024
"""Draws that are made at once, for speed alone."""


@final
class MixedStream:
    """Several streams as one: each sample is the next one of a stream that is drawn by weight.

    Draw j of a lane is a function of (seed, epoch, lane, j). What is drawn is what the stream yields for this
    lane, so no sample depends on how the lanes are spread. A mixture can be cut into as many lanes as each of
    its streams can; where a stream is plain, so is the mixture.

    What happens in a lane when one of its streams ends there:

    - `go_on`: the others go on, at their weights. The lane ends with the last of them.
    - `repeat`: it begins again, opened anew for the same epoch, so that it yields the same samples, in the
      same order unless it draws one. The lane ends when each stream has come to an end at least once. One
      without a sample is left out.
    - `end_epoch`: the lane ends.

    Args:
        streams: the streams, or a mixture of others among them.
        weights: how often each is drawn, in proportion; one with the weight 0 is not read.
        when_one_ends: go_on, repeat or end_epoch.
        seed: other seeds mix in another order.

    Raises:
        ConfigError: if the weights or `when_one_ends` mean nothing.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        weights: Sequence[float],
        when_one_ends: WhenOneEnds = "go_on",
        seed: int = 0,
    ) -> None:
        self.streams = [*streams]
        self.weights = [float(weight) for weight in weights]
        self.when_one_ends = when_one_ends
        self.seed = seed
        mistakes = []
        rules = get_args(WhenOneEnds)
        if len(self.weights) != len(self.streams):
            mistakes.append(
                f"a MixedStream needs a weight for each stream: it has {len(self.streams)} streams and "
                f"{len(self.weights)} weights."
            )
        if not all(math.isfinite(weight) and weight >= 0 for weight in self.weights) or not sum(self.weights):
            mistakes.append(
                f"the weights of a MixedStream must be finite, at least 0, and not all 0: got {self.weights}."
            )
        if when_one_ends not in rules:
            mistakes.append(f"when_one_ends must be one of {', '.join(rules)}: got {when_one_ends!r}.")
        if mistakes:
            raise ConfigError(*mistakes)
        self._parts = [as_lane_stream(stream) for stream in self.streams]

    @property
    def num_shards(self) -> int | None:
        """Into how many lanes it can be cut: as many as each of its streams; None: any number."""
        return min((number for part in self._parts if (number := shards_of(part)) is not None), default=None)

    def iter_lane(self, epoch: int, lane: int, num_lanes: int) -> Iterable[Any]:
        """Return the samples of a lane in an epoch, an iterator that has a state."""
        opens = [partial(part.iter_lane, epoch, lane, num_lanes) for part in self._parts]
        return _MixedLane(self, opens, (self.seed, epoch, lane))


@final
class _Part:
    """What a lane reads of one of the streams, from its begin to its end, and maybe again.

    Each opening has a random state of its own, and so has each read of a stream without a state: doing it
    again gives the same, whatever the others draw.
    """

    def __init__(self, opened: Callable[[], Iterable[Any]], weight: float, key: tuple[int, ...]) -> None:
        self.weight = weight
        self._opened = opened
        self._key = key
        self._samples: OpenStream | None = None
        self._num_read = 0
        """Samples read in the present pass."""
        self.num_passes = 0
        """How often it came to an end."""
        self.is_over = False

    def end(self) -> None:
        """Give no more samples."""
        self.is_over = True

    def open(self, state: Any = None) -> None:
        """Open it, at the beginning or at a state; under the same random state in either case."""
        self._num_read = 0
        with self._seeded("open"):
            self._samples = OpenStream(self._opened(), state)

    def read(self) -> Any:
        """Return the next sample; _END at the end."""
        assert self._samples is not None
        with nullcontext() if self._samples.has_state else self._seeded("mixed", self._num_read):
            samples = self._samples.take(1)
        if not samples:
            self.num_passes += 1
            return _END
        self._num_read += 1
        return samples[0]

    @contextmanager
    def _seeded(self, what: str, *numbers: int) -> Iterator[None]:
        """Set a random state of this pass, and put the present one back afterwards."""
        with kept_random_state():
            set_random_state(int(words(1, what, *self._key, self.num_passes, *numbers)[0]))
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return where it is."""
        state = None if self._samples is None or self.is_over else self._samples.state
        return {
            "num_read": self._num_read,
            "num_passes": self.num_passes,
            "is_over": self.is_over,
            "state": state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go there, by its state or by reading again."""
        self.num_passes, self.is_over = state["num_passes"], state["is_over"]
        if self.is_over:
            return
        self.open(state["state"])
        if state["state"] is not None:
            self._num_read = state["num_read"]
        else:
            for number in range(state["num_read"]):
                if self.read() is _END:
                    raise DataError(
                        f"a stream of the mixture ended after {number} samples, and had yielded "
                        f"{state['num_read']} before: it must yield the same ones whenever it is opened. "
                        "Mend the stream, or begin a new run."
                    )


@final
class _MixedLane:
    """The samples of a lane of a mixture."""

    def __init__(
        self, mixed: MixedStream, opens: Sequence[Callable[[], Iterable[Any]]], key: tuple[int, int, int]
    ) -> None:
        self._when_one_ends = mixed.when_one_ends
        self._key = key
        self._parts = [
            _Part(opened, weight, (*key, number))
            for number, (opened, weight) in enumerate(zip(opens, mixed.weights, strict=True))
            if weight
        ]
        self._is_open = False
        self._num_draws = 0
        self._draws: Sequence[float] = ()
        self._find_live()

    def __iter__(self) -> Self:
        """Open the streams, all at once."""
        if not self._is_open:
            self._is_open = True
            for part in self._parts:
                part.open()
        return self

    def __next__(self) -> Any:
        """Return the next sample of the stream that is drawn."""
        while self._live:
            part = self._draw()
            sample = part.read()
            if sample is _END:
                sample = self._ended(part)
            if sample is not _END:
                return sample
        raise StopIteration

    def _ended(self, part: _Part) -> Any:
        """Do what is to be done when a stream has ended; return the next sample if there is one yet."""
        rule, all_ended = self._when_one_ends, all(other.num_passes for other in self._parts)
        sample = _END
        if rule == "repeat" and not all_ended:
            part.open()
            sample = part.read()
        if sample is _END:
            ends_all = rule == "end_epoch" or (rule == "repeat" and all_ended)
            for ending in self._parts if ends_all else [part]:
                ending.end()
        self._find_live()
        return sample

    def _find_live(self) -> None:
        """Note which streams can be drawn."""
        self._live = [part for part in self._parts if not part.is_over]
        self._sums = [*accumulate(part.weight for part in self._live)]

    def _draw(self) -> _Part:
        number = self._num_draws % _DRAWS
        if not number or not self._draws:
            first = self._num_draws - number
            self._draws = uniform(np.arange(first, first + _DRAWS), "mix", *self._key).tolist()
        self._num_draws += 1
        return self._live[bisect(self._sums, self._draws[number] * self._sums[-1], 0, len(self._live) - 1)]

    def state_dict(self) -> dict[str, Any]:
        """Return where the lane is."""
        return {"num_draws": self._num_draws, "parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go there; before the first sample."""
        self._is_open = True
        self._num_draws = state["num_draws"]
        for part, of_part in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(of_part)
        self._find_live()
