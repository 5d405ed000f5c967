"""The audit is written to its own files only, and a disk that refuses them is one error."""

from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from lanewise.data import LaneBatch
from lanewise.data.audit import AuditLog
from lanewise.errors import StorageError
from lanewise.lanes import Schedule


def batches(num_steps: int) -> Iterator[LaneBatch]:
    schedule = Schedule(num_samples=8, global_batch_size=8, micro_batch_size=8)
    for turn in schedule.turns(range(1), 0, num_steps):
        yield LaneBatch(turn, tuple(range(8)), torch.zeros(8), 8)


def test_an_audit_is_never_written_through_a_link(tmp_path):
    (tmp_path / "plan.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match="it is a link"):
        AuditLog(tmp_path, 0, 1, 0, {}, {})
    assert not (tmp_path / "precious").exists()


@pytest.mark.parametrize("kind", ["file", "loop"])
def test_a_folder_that_is_none_is_one_error(tmp_path, kind):
    path = tmp_path / "audit"
    path.touch() if kind == "file" else path.symlink_to("audit")
    with pytest.raises(StorageError, match="audit cannot be written: "):
        AuditLog(path, 0, 1, 0, {}, {})


def test_files_of_another_name_are_left_alone(tmp_path):
    (tmp_path / "rank-mine.jsonl").write_text("mine")
    AuditLog(tmp_path, 0, 1, 0, {}, {})
    assert (tmp_path / "rank-mine.jsonl").read_text() == "mine"


def test_a_full_disk_is_one_error_at_any_line(small_disk):
    log = AuditLog(small_disk / "audit", 0, 1, 0, {}, {})
    with pytest.raises(
        StorageError, match=r"rank-00000\.jsonl cannot be written: No space left on device, .* are free"
    ):
        list(log.record(batches(10**6)))


def test_a_full_disk_is_one_error_at_the_start(small_disk):
    with suppress(OSError):
        (small_disk / "full").write_bytes(bytes(2**21))
    with pytest.raises(StorageError, match=r"plan\.jsonl cannot be written: No space left on device"):
        AuditLog(small_disk / "audit", 0, 1, 0, {}, {})
