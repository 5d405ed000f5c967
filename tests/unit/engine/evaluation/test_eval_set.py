"""Loader workers of an evaluation own lanes where a dataset has blocks, and change no micro-batch."""

import os
from collections import defaultdict

import pytest
import torch
from torch.utils.data import Dataset

from lanewise.data import LaneReader
from lanewise.engine.evaluation.eval_set import IndexedSet
from lanewise.lanes import SequentialSchedule, lane_ranges

CPU = torch.device("cpu")
# Three workers are more than some machines have processors, of which torch warns.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class InBlocks(Dataset):
    """Each sample is its index, and the process that read it."""

    def __getitem__(self, index):
        return index, os.getpid()

    def block_sizes(self):
        return [5, 6]


def batches_of(num_samples: int, lanes: range, num_workers: int, *, fills_empty: bool = False):
    reader = LaneReader(InBlocks(), list, 0, eval_dataset="held_out")
    of_lanes = IndexedSet("held_out", reader, SequentialSchedule(num_samples, 4, 2))
    return list(of_lanes.batches(lanes, CPU, num_workers=num_workers, fills_empty=fills_empty))


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_of_a_dataset_in_blocks_each_lane_is_read_by_one_worker(num_workers, world_size):
    for lanes in lane_ranges(4, world_size):
        here = [(batch.turn, batch.indices) for batch in batches_of(11, lanes, 0)]
        assert here == sorted(here, key=lambda place: (place[0].lane, place[0].step))
        readers = defaultdict(set)
        found = batches_of(11, lanes, num_workers)
        for batch in found:
            readers[batch.turn.lane] |= {pid for _, pid in batch.data}
        found.sort(key=lambda batch: (batch.turn.lane, batch.turn.step))
        assert [(batch.turn, batch.indices) for batch in found] == here
        assert all(len(workers) == 1 for workers in readers.values())
        assert len(set().union(*readers.values()) - {os.getpid()}) == min(num_workers, len(lanes))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_process_has_an_empty_micro_batch_only_where_none_of_its_lanes_has_samples(num_workers):
    assert [batch.turn.lane for batch in batches_of(3, range(2, 4), num_workers)] == [2]
    (empty,) = batches_of(2, range(2, 4), num_workers)
    assert (empty.turn.lane, empty.turn.is_last, empty.has_samples, empty.data) == (2, True, False, None)
    (empty,) = batches_of(2, range(2, 4), num_workers, fills_empty=True)
    assert (empty.has_samples, [index for index, _ in empty.data]) == (False, [0])
