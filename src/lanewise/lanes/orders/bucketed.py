"""The order that brings samples of like lengths together, so that little is padded."""

from functools import lru_cache
from typing import final

import numpy as np
import numpy.typing as npt

from lanewise.errors import ConfigError, DataError
from lanewise.lanes.orders.order import OrderInputs, SampleOrder
from lanewise.lanes.orders.permutation import FeistelShuffle, permutation, uniform
from lanewise.lanes.schedule import LaneTurn


@final
class BucketedOrder(SampleOrder):
    """Shuffles like `ShuffledOrder`, and sorts windows of so many steps by length, with some noise.

    The micro-batches of a step are neighbours in that sorted window, so the devices have like amounts of
    work. Which step of the window has the short ones, and which lane, is drawn anew in each window.

    With `max_tokens` a window is cut by tokens instead of samples, into as many micro-batches: the longest
    samples get a small one, and none has more tokens than `max_tokens`, padding counted. The number of steps
    stays what it is, and `batch.micro_batch_size` is how many samples a micro-batch has on average.

    Args:
        inputs: has the table `sample_lengths`: the tokens of each sample.
        window_steps: steps whose samples are sorted together; fewer are closer to a full shuffle.
        noise: how much lengths are changed at random for the sorting, as a part of themselves.
        max_tokens: most tokens of a micro-batch with its padding; None: all have equally many samples.

    Raises:
        ConfigError: if an argument is out of its range.
        DataError: if the lengths are not one for each sample, or one is longer than `max_tokens`; and when a
            window is reached that cannot be cut so.
    """

    def __init__(
        self, inputs: OrderInputs, window_steps: int = 50, noise: float = 0.1, max_tokens: int | None = None
    ) -> None:
        super().__init__(inputs)
        for name, value, least in (("window_steps", window_steps, 1), ("noise", noise, 0)):
            if value < least:
                raise ConfigError(f"data.order.init_args.{name} must be at least {least}: got {value}.")
        self._window_steps = window_steps
        self._noise = noise
        self._max_tokens = max_tokens
        self._lengths = inputs.table_of_samples("sample_lengths", np.int64)
        if max_tokens is not None and self._lengths.max(initial=0) > max_tokens:
            raise DataError(
                f"sample {self._lengths.argmax()} alone has {self._lengths.max()} tokens, and "
                f"data.order.init_args.max_tokens is {max_tokens}. Cut the samples, or allow more."
            )
        self._shuffle = FeistelShuffle(self.schedule.num_samples, seed=self.seed)
        self._window = lru_cache(maxsize=1)(self._make_window)

    def samples(self, turn: LaneTurn) -> tuple[int, ...]:
        if not turn.positions:
            return ()
        number = turn.step % self.schedule.steps_per_epoch
        first_step = turn.step - number % self._window_steps
        return self._window(turn.epoch, first_step)[turn.step, turn.lane]

    def _make_window(self, epoch: int, first_step: int) -> dict[tuple[int, int], tuple[int, ...]]:
        """Return the samples of the turns of a window by step and lane."""
        schedule = self.schedule
        of = self.seed, epoch, first_step
        last_step = min(first_step + self._window_steps, (epoch + 1) * schedule.steps_per_epoch)
        steps = first_step + permutation(last_step - first_step, "steps", *of)
        turns = [
            (step, lane)
            for step in steps.tolist()
            for lane in permutation(schedule.num_present_lanes(step), "lanes", *of, step).tolist()
        ]
        positions = [schedule.positions(step, lane) for step, lane in turns]
        first, stop = min(of_turn.start for of_turn in positions), max(of_turn.stop for of_turn in positions)
        samples = self._shuffle.indices(epoch, first, stop)
        lengths = self._lengths[samples]
        noisy = lengths * (1 + self._noise * (2 * uniform(samples, "noise", *of) - 1))
        by_length = np.lexsort((samples, noisy))
        samples = samples[by_length]
        if self._max_tokens is None:
            ends = np.cumsum([len(of_turn) for of_turn in positions])
        else:
            ends = self._cut_by_tokens(lengths[by_length], len(turns), first_step)
        parts = np.split(samples, ends[:-1])
        return {turn: tuple(part.tolist()) for turn, part in zip(turns, parts, strict=True)}

    def _cut_by_tokens(
        self, lengths: npt.NDArray[np.int64], num_parts: int, first_step: int
    ) -> npt.NDArray[np.int64]:
        """Cut samples into so many parts, the largest of which is as small as can be; return their ends."""
        low, high = 0, int(lengths.max()) * len(lengths)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if _cut(lengths, middle, num_parts) else (middle, high)
        assert self._max_tokens is not None
        if high > self._max_tokens:
            raise DataError(
                f"a micro-batch of the steps from {first_step + 1} on needs {high} tokens, its padding "
                f"counted, and data.order.init_args.max_tokens is {self._max_tokens}. Use a smaller "
                "batch.micro_batch_size, which makes more micro-batches of a step."
            )
        ends = _cut(lengths, high, num_parts)
        while len(ends) < num_parts:  # cut the parts that can be cut: each turn needs a sample
            sizes = np.diff(ends, prepend=0)
            largest = int(np.argmax(sizes))
            ends.insert(largest, ends[largest] - int(sizes[largest]) // 2)
        return np.array(ends)


def _cut(lengths: npt.NDArray[np.int64], budget: int, num_parts: int) -> list[int]:
    """Cut greedily into parts of at most `budget` tokens; return their ends, none if they are too many."""
    ends: list[int] = []
    size = longest = 0
    for place, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if (size + 1) * longest > budget and size:
            ends.append(place)
            if len(ends) == num_parts:
                return []
            size, longest = 0, length
        size += 1
        if length > budget:
            return []
    return [*ends, len(lengths)]
