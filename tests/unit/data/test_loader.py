"""One iterator feeds a process for the whole run, with the same bytes whatever reads them ahead."""

import errno
import gc
import multiprocessing.synchronize
import os
import random
import re
import signal
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, default_collate

from lanewise.data import LaneLoader, LaneReader, workers
from lanewise.errors import DataError, noting
from lanewise.lanes import (
    BlockedOrder,
    FeistelShuffle,
    LaneTurn,
    OrderInputs,
    Schedule,
    ShuffledOrder,
    lane_ranges,
)
from tests.patience import patient
from tests.script import run_in_forks

# Three workers are more than some machines have processors, of which torch warns.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Drawing(Dataset):
    """Each sample is its index and a number from each of the three default generators."""

    def __getitem__(self, index):
        numpys = float(np.random.random_sample())  # noqa: NPY002
        return torch.tensor([index, random.random(), numpys, torch.rand(()).item()], dtype=torch.float64)


class Recording(Dataset):
    """Remembers which samples were read, in order."""

    def __init__(self):
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return index


class Scheduled(Dataset):
    """Each sample is its index, the epoch that the dataset was told, and what it drew when it was told."""

    def __init__(self):
        self.told = []

    def set_epoch(self, epoch):
        self.told.append(epoch)
        self.drawn = random.random()

    def __getitem__(self, index):
        return torch.tensor([index, self.told[-1], self.drawn], dtype=torch.float64)


class Pid(Dataset):
    def __getitem__(self, index):
        return os.getpid()


def make_loader(dataset, schedule, *, lanes=None, num_workers=0, collate=default_collate) -> LaneLoader:
    return LaneLoader(
        LaneReader(dataset, collate, seed=0),
        ShuffledOrder(OrderInputs(schedule, seed=0)),
        range(schedule.num_lanes) if lanes is None else lanes,
        num_workers=num_workers,
    )


def contents(batches) -> list[tuple]:
    return [
        (batch.turn, batch.indices, None if batch.data is None else batch.data.numpy().tobytes())
        for batch in batches
    ]


# Two epochs of three steps on four lanes; the third step has three samples, on the first two lanes.
PARTIAL = Schedule(num_samples=19, global_batch_size=8, micro_batch_size=2)
EVALUATED = LaneTurn(0, 0, 0, range(1), (0,), is_last=True)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("first_step", [0, 4])
def test_a_dataset_is_told_the_epoch_by_the_process_that_reads_it(num_workers, first_step):
    """Nobody told it, so that each epoch was the first; workers read ahead into the next epoch."""
    dataset = Scheduled()
    loader = make_loader(Subset(dataset, range(19)), PARTIAL, num_workers=num_workers)
    batches = list(loader.batches(first_step, 6))
    drawn = defaultdict(set)
    for batch in batches:
        for _, epoch, number in [] if batch.data is None else batch.data.tolist():
            assert epoch == batch.turn.epoch
            drawn[epoch].add(number)
    assert [len(numbers) for numbers in drawn.values()] == [1] * len(drawn)
    if not num_workers:
        assert dataset.told == sorted(drawn)  # once for each


def test_an_evaluation_of_parts_of_a_dataset_leaves_the_epoch_of_the_rest():
    dataset = Scheduled()
    trained, evaluated = (
        LaneReader(Subset(dataset, range(9)), list, 0, eval_dataset=name) for name in ("", "a")
    )
    turns = list(PARTIAL.turns(range(4), 3, 4))
    seen = [
        reader[turn, (1,)].data[0][1]
        for reader, turn in (
            (trained, turns[0]),
            (evaluated, EVALUATED),
            (trained, turns[1]),
            (trained, turns[2]),
        )
    ]
    assert seen == [1, 0, 1, 1]
    assert dataset.told == [1, 0, 1]


def test_the_samples_of_any_lane_in_any_step_are_known():
    """Also to a process that does not carry the lane."""
    loader = make_loader(Recording(), PARTIAL, lanes=range(1))
    for batch in make_loader(Recording(), PARTIAL).batches(0, 6):
        assert loader.samples_of(batch.turn.step, batch.turn.lane) == list(batch.indices)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_do_not_change_a_byte(num_workers):
    here = contents(make_loader(Drawing(), PARTIAL).batches(0, 6))
    assert len(here) == 20
    assert contents(make_loader(Drawing(), PARTIAL, num_workers=num_workers).batches(0, 6)) == here


def test_three_workers_are_three_processes_for_the_whole_run():
    schedule = Schedule(num_samples=12, global_batch_size=6, micro_batch_size=2)
    pids_of_epoch = {epoch: set() for epoch in range(4)}
    for batch in make_loader(Pid(), schedule, num_workers=3, collate=set).batches(0, 8):
        pids_of_epoch[batch.turn.epoch] |= batch.data
    assert len(pids_of_epoch[0]) == 3
    assert os.getpid() not in pids_of_epoch[0]
    assert all(pids == pids_of_epoch[0] for pids in pids_of_epoch.values())


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("first_step", [1, 3, 4])
def test_starting_in_the_middle_equals_skipping(first_step, num_workers):
    whole = [
        content
        for content in contents(make_loader(Drawing(), PARTIAL).batches(0, 6))
        if content[0].step >= first_step
    ]
    assert contents(make_loader(Drawing(), PARTIAL, num_workers=num_workers).batches(first_step, 6)) == whole


@pytest.mark.parametrize(("num_workers", "lanes"), [(2, range(4)), (3, range(1, 4)), (3, range(2))])
def test_of_a_dataset_in_blocks_each_lane_is_read_by_one_worker(num_workers, lanes):
    """Else each worker would read every block of the process."""
    order = BlockedOrder(OrderInputs(PARTIAL, 0, {"block_sizes": lambda: [9, 10]}))
    loader = LaneLoader(LaneReader(Pid(), set, seed=0), order, lanes, num_workers=num_workers)
    batches = list(loader.batches(0, 6))
    assert [batch.turn for batch in batches] == list(PARTIAL.turns(lanes, 0, 6))
    readers = defaultdict(set)
    for batch in batches:
        readers[batch.turn.lane] |= batch.data or set()
    assert all(len(workers) <= 1 for workers in readers.values())
    assert len(set().union(*readers.values())) == min(num_workers, len(lanes))


def test_a_worker_reads_lanes_that_lie_beside_each_other():
    """With every second lane each, two workers read most blocks that two lanes share: 12 % too much."""
    schedule = Schedule(960, 64, 8)
    order = BlockedOrder(OrderInputs(schedule, 0, {"block_sizes": lambda: [100] * 9 + [60]}))
    loader = LaneLoader(LaneReader(Pid(), set, seed=0), order, range(8), num_workers=2)
    blocks_of = defaultdict(set)
    for batch in loader.batches(0, schedule.steps_per_epoch):
        (worker,) = batch.data
        blocks_of[worker] |= {index // 100 for index in batch.indices}
    assert len(blocks_of) == 2
    assert sum(map(len, blocks_of.values())) <= 11  # of 10 blocks


def test_an_epoch_shows_every_sample_anew():
    first, second = {}, {}
    for batch in make_loader(Drawing(), PARTIAL, collate=list).batches(0, 6):
        (second if batch.turn.epoch else first).update({int(sample[0]): sample[1:] for sample in batch.data})
    assert first.keys() == second.keys() == set(range(19))
    assert not any((first[index] == second[index]).any() for index in first)
    assert list(first) != list(second)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_process_whose_lanes_are_absent_gets_a_batch_without_data(num_workers):
    loader = make_loader(Drawing(), PARTIAL, lanes=range(2, 4), num_workers=num_workers)
    batches = list(loader.batches(0, 6))
    assert [(batch.turn.step, batch.turn.lane) for batch in batches if batch.data is None] == [(2, 2), (5, 2)]
    assert [batch.indices for batch in batches if batch.data is None] == [(), ()]
    assert [batch.turn.step for batch in batches] == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_it_can_get_the_data_of_lane_0_which_do_not_count(num_workers):
    first = make_loader(Drawing(), PARTIAL, lanes=range(2), collate=list)
    loader = make_loader(Drawing(), PARTIAL, lanes=range(2, 4), num_workers=num_workers, collate=list)
    loader.reader.fills_empty = True
    of_lane_0 = {batch.turn.step: batch.data for batch in first.batches(0, 6) if batch.turn.lane == 0}
    empty = [batch for batch in loader.batches(0, 6) if not batch.has_samples]
    assert [(batch.turn.step, batch.turn.lane, batch.indices, batch.num_samples) for batch in empty] == [
        (2, 2, (), 0),
        (5, 2, (), 0),
    ]
    for batch in empty:
        assert [int(sample[0]) for sample in batch.data] == [
            int(sample[0]) for sample in of_lane_0[batch.turn.step]
        ]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_all_processes_together_read_every_sample_once_an_epoch(world_size, drop_last):
    schedule = Schedule(num_samples=37, global_batch_size=16, micro_batch_size=2, drop_last=drop_last)
    seen = Counter()
    for lanes in lane_ranges(8, world_size):
        dataset = Recording()
        for batch in make_loader(dataset, schedule, lanes=lanes, collate=list).batches(
            0, 3 * schedule.steps_per_epoch
        ):
            assert (batch.data or []) == list(batch.indices)
            seen.update((batch.turn.epoch, index) for index in batch.indices)
    if drop_last:
        assert Counter(epoch for epoch, _ in seen.elements()) == {0: 32, 1: 32, 2: 32}
        assert set(seen.values()) == {1}
    else:
        assert seen == {(epoch, index): 1 for epoch in range(3) for index in range(37)}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_lane_gets_the_same_bytes_whoever_carries_it(world_size):
    together = {
        (content[0].step, content[0].lane): content[1:]
        for content in contents(make_loader(Drawing(), PARTIAL).batches(0, 6))
    }
    for lanes in lane_ranges(4, world_size):
        for turn, *rest in contents(make_loader(Drawing(), PARTIAL, lanes=lanes).batches(0, 6)):
            if rest[0]:
                assert tuple(rest) == together.pop((turn.step, turn.lane))
    assert not together


def test_only_the_samples_of_the_own_lanes_are_read_and_each_once():
    for lanes in lane_ranges(4, 3):
        dataset = Recording()
        loader = make_loader(dataset, PARTIAL, lanes=lanes)
        list(loader.batches(4, 6))
        order = FeistelShuffle(19, seed=0)
        positions = [PARTIAL.positions(step, lane) for step in (4, 5) for lane in lanes]
        own = [index for p in positions for index in order.indices(1, p.start, p.stop).tolist()]
        assert dataset.read == own


def test_nothing_is_read_before_it_is_asked_for():
    dataset = Recording()
    batches = make_loader(dataset, PARTIAL).batches(1, 6)
    assert dataset.read == []
    assert list(next(batches).indices) == dataset.read
    assert len(dataset.read) == 2


def test_a_far_step_of_a_huge_dataset_is_reached_at_once():
    schedule = Schedule(num_samples=10**9, global_batch_size=8, micro_batch_size=2)
    dataset = Recording()
    start = time.process_time()
    batch = next(make_loader(dataset, schedule).batches(10**12, 10**12 + 1))
    assert time.process_time() - start < 10
    assert dataset.read == list(batch.indices)


def test_loading_ahead_leaves_the_default_generators_alone():
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    before = states()
    assert len(list(make_loader(Drawing(), PARTIAL, num_workers=1).batches(0, 3))) == 10
    assert states() == before


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_collate_returns_arrives_as_it_is(num_workers):
    def to_arrays(samples):
        return {"index": np.array([sample[0] for sample in samples]), "text": "abc", "pair": (1, [2.0, None])}

    batches = list(make_loader(Drawing(), PARTIAL, num_workers=num_workers, collate=to_arrays).batches(0, 1))
    for batch in batches:
        assert isinstance(batch.data["index"], np.ndarray)
        assert batch.data["index"].tolist() == list(batch.indices)
        assert (batch.data["text"], batch.data["pair"]) == ("abc", (1, [2.0, None]))
    assert len(batches) == 4


class Threads(Dataset):
    def __getitem__(self, index):
        return torch.get_num_threads()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_are_made_with_one_thread_whatever_the_trainer_uses(num_workers):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        loader = make_loader(Threads(), PARTIAL, num_workers=num_workers, collate=set)
        assert [batch.data for batch in loader.batches(0, 2)] == [{1}] * 8
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


class Broken(Dataset):
    def __getitem__(self, index):
        raise KeyError(f"no sample {index}")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_dataset_reaches_the_trainer(num_workers):
    batches = make_loader(Broken(), PARTIAL, num_workers=num_workers).batches(0, 1)
    with pytest.raises(KeyError, match="no sample") as caught:
        next(batches)
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("in step 1, lane 0, samples [") == 1
    # The traceback holds the iterator in a cycle: torch takes 5 s to end workers that the collector finds.
    traceback.clear_frames(caught.tb)
    del batches


def kill_in_step(pid: int) -> None:
    with noting(lambda: "in step 0"):
        os.kill(pid, signal.SIGKILL)
        time.sleep(60)


def test_a_killed_worker_is_no_error_of_the_code_that_ran_meanwhile():
    batches = make_loader(Pid(), PARTIAL, num_workers=1, collate=set).batches(0, 6)
    (worker,) = next(batches).data
    with pytest.raises(RuntimeError, match=f"{worker}.* is killed by signal") as caught:
        kill_in_step(worker)
    assert not hasattr(caught.value, "__notes__")


def test_a_connection_that_breaks_because_a_worker_is_killed_is_not_the_error(monkeypatch):
    monkeypatch.setattr(workers, "_SECONDS_TO_SEE_AN_END", 60.0)
    batches = make_loader(Pid(), PARTIAL, num_workers=1, collate=set).batches(0, 6)
    (worker,) = next(batches).data

    def breaks():
        threading.Timer(0.05, os.kill, (worker, signal.SIGKILL)).start()
        yield from ()
        raise ConnectionResetError

    with pytest.raises(RuntimeError, match=f"{worker}.* is killed by signal"):
        list(workers._until_told(breaks(), None, [end.sentinel for end in active_children()]))


class Left:
    """Is garbage that notes which process collects it."""

    def __init__(self, path: Path) -> None:
        self.path, self.itself = path, self

    def __del__(self) -> None:
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")


class Collecting(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        assert gc.isenabled()
        gc.collect()
        return index


def test_a_worker_collects_no_garbage_of_the_trainer(tmp_path):
    """A loader among it was shut down in the worker, which once waited for ever for a lock of its queues."""
    schedule = Schedule(num_samples=4, global_batch_size=2, micro_batch_size=2)
    gc.collect()
    Left(tmp_path / "collected")
    assert [batch.data for batch in make_loader(Collecting(), schedule, num_workers=1).batches(0, 2)]
    gc.collect()
    assert (tmp_path / "collected").read_text() == f"{os.getpid()}\n"


class Failing(Collecting):
    def __getitem__(self, index: int) -> int:
        raise ValueError("on purpose")


def test_workers_end_with_an_error_of_one_though_its_traceback_is_kept():
    """They lived until the garbage was collected, which waited five seconds for each of them."""
    schedule = Schedule(num_samples=4, global_batch_size=2, micro_batch_size=2)
    before = {child.pid for child in active_children()}
    with pytest.raises(Exception, match="on purpose") as kept:
        list(make_loader(Failing(), schedule, num_workers=1).batches(0, 2))
    assert {child.pid for child in active_children()} <= before
    assert kept.value.__traceback__ is not None


TRAINER = """
import os, signal, sys, time
from lanewise.processes.die_with_parent import name_process
from lanewise.data import LaneLoader, LaneReader
from lanewise.errors import DataError, noting
from lanewise.lanes import OrderInputs, Schedule, ShuffledOrder

class Pid:
    def __getitem__(self, index):
        return os.getpid()

name_process("lanewise: rank 0 of 1, runs/mnist")
schedule = Schedule(num_samples=1000, global_batch_size=4, micro_batch_size=2)
reader = LaneReader(Pid(), set, seed=0)
order = ShuffledOrder(OrderInputs(schedule, seed=0))
batches = LaneLoader(reader, order, range(2), num_workers=2).batches(0, 100)
workers = [next(batches).data.pop(), next(batches).data.pop()]
print(*workers, flush=True)
"""


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"  # a zombie waits for init, which may not care


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_workers_end_with_a_killed_trainer():
    ours, theirs = multiprocessing.Pipe()
    variables = {"print": lambda *pids, **_: theirs.send(pids), "__name__": "trainer"}
    context = multiprocessing.get_context("fork")
    trainer = context.Process(target=exec, args=(f"{TRAINER}time.sleep(600)", variables))
    trainer.start()
    try:
        workers = set(ours.recv())
        assert len(workers - {trainer.pid}) == 2
        assert all(map(is_running, workers))
        titles = {Path(f"/proc/{pid}/cmdline").read_text()[:12] for pid in workers}
        assert titles == {"loader 0 of ", "loader 1 of "}
    finally:
        trainer.kill()
        trainer.join()
    deadline = time.monotonic() + patient(60)
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [pid for pid in workers if is_running(pid)]


ENDS = (
    'raise ValueError("upside down")',
    "os.kill(workers[0], signal.SIGKILL)\nwhile True: next(batches)",
)


def test_a_trainer_that_fails_ends_its_workers_and_itself():
    said = run_in_forks(*[TRAINER + end for end in ENDS]).stdout.splitlines()
    workers, codes = said[::2], said[1::2]
    assert codes == ["1", "1"]
    assert [len(of_one.split()) for of_one in workers] == [2, 2]
    assert not [pid for pid in map(int, " ".join(workers).split()) if is_running(pid)]


def test_workers_that_have_no_memory_to_share_are_one_error(monkeypatch):
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))  # what a read-only /dev/shm does

    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", refuse)
    schedule = Schedule(num_samples=4, global_batch_size=2, micro_batch_size=2)
    lanes = make_loader(Drawing(), schedule, num_workers=1)
    said = (
        r"^loader workers cannot be used: .*Read-only file system\. They share what they read in /dev/shm, "
    )
    with pytest.raises(DataError, match=said):
        lanes.batches(0, 1)


@pytest.mark.parametrize(
    "error", ["unable to allocate shared memory(shm) for file </torch_7_1_0>", "Bus error"]
)
def test_a_batch_for_which_there_is_no_shared_memory_is_one_error(monkeypatch, error):
    """Torch showed a traceback, or, of a collate that stacks, lost the batch and waited for ever."""

    def refuse(_tensor: torch.Tensor) -> None:
        if error == "Bus error":
            os.kill(os.getpid(), signal.SIGBUS)
        raise RuntimeError(f"{error}: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", refuse)
    schedule = Schedule(num_samples=4, global_batch_size=2, micro_batch_size=2)
    batches = make_loader(Drawing(), schedule, num_workers=1).batches(0, 1)
    said = (
        rf"{re.escape(error)}.*They share .* in /dev/shm, where .* MiB are free\. .*--shm-size 1g\), or set "
    )
    with pytest.raises(DataError, match=said):
        next(batches)
