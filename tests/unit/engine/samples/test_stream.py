"""A stream is compared at the start, and what would differ from read to read is an error."""

from typing import Any

import pytest
import torch

from lanewise.data import StreamCut, StreamReader
from lanewise.engine.samples.stream import compare_streams
from lanewise.errors import DataError
from lanewise.processes.world.world import LocalWorld
from tests.unit.data.test_lane_stream import noisy, stream_of


def compare(stream: Any) -> str:
    reader = StreamReader(stream, list, 0, StreamCut.of(2, 2, 0), range(2))
    return compare_streams(reader, LocalWorld(torch.device("cpu")))


def test_random_numbers_that_threads_draw_are_an_error():
    with pytest.raises(DataError, match=r"the training dataset draws random numbers in threads.*\.map after"):
        compare(stream_of().map(noisy).shuffle(seed=1, buffer_size=4))
    assert compare(stream_of().shuffle(seed=1, buffer_size=4).map(noisy))
