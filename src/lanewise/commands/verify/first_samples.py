"""Takes the first samples of a stream, so that they can be read by index, again and again."""

import copy
from collections.abc import Sequence
from typing import Any, final

from torch.utils.data import Dataset

from lanewise.config import BatchConfig
from lanewise.data import StreamCut, StreamReader, digest, is_stream


@final
class FirstSamples(Dataset[Any]):
    """The samples of the first steps of a stream, lane after lane, in memory; each read gives a copy.

    Args:
        stream: read on its own, by this process alone.
        seed: seed of the run.
        batch: how a step is cut into lanes.
        num_steps: how many steps to take.
        eval_dataset: the stream's name if it is evaluated.
    """

    def __init__(
        self, stream: Any, seed: int, batch: BatchConfig, num_steps: int = 1, *, eval_dataset: str = ""
    ) -> None:
        lanes = range(batch.num_lanes)
        cut = StreamCut.of(batch.num_lanes, batch.micro_batch_size, 0)
        reader = StreamReader(stream, list, seed, cut, lanes, eval_dataset=eval_dataset)
        steps = [[reader[0, lane].data or [] for lane in lanes] for _ in range(num_steps)]
        self._samples: list[Any] = [sample for step in steps for samples in step for sample in samples]
        self._lanes = [[step[lane] for step in steps] for lane in lanes] if reader.is_lane_aware else []

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        """Return a sample; None where there are fewer."""
        return copy.deepcopy(self._samples[index]) if index < len(self) else None

    def equal_lanes(self) -> Sequence[int]:
        """Return two lanes of a lane-aware stream that have the same samples; none where all differ.

        A lane whose samples are all equal tells nothing.
        """
        first: dict[str, int] = {}
        for lane, steps in enumerate(self._lanes):
            if len({digest(sample) for samples in steps for sample in samples}) > 1:
                other = first.setdefault(digest(steps), lane)
                if other != lane:
                    return [other, lane]
        return []


def readable(dataset: Any, seed: int, batch: BatchConfig, eval_dataset: str) -> Any:
    """Return a dataset to evaluate; of a stream its first samples, as many as a global batch has."""
    if is_stream(dataset):
        return FirstSamples(dataset, seed, batch, eval_dataset=eval_dataset)
    return dataset
