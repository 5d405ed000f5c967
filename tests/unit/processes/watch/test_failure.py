"""What a process says of its error."""

import dataclasses
import json

import pytest
import torch.distributed as dist

from lanewise.errors import ConfigError, LostRankError, StorageError, TaskError, WorldError
from lanewise.processes.watch import failure as module
from lanewise.processes.watch.failure import LOST_HOST, Failure, is_consequence, record_failure
from lanewise.processes.watch.heartbeat import Heartbeat
from lanewise.processes.watch.typed_json import read_typed
from tests.slow import slow


@pytest.fixture(autouse=True)
def at_step_17(monkeypatch):
    beating = Heartbeat()
    beating.note = ("forward", 17, 3)
    monkeypatch.setattr(module, "heartbeat", beating)


def raised(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as caught:
        return caught


def test_an_error_of_the_users_code_is_shown_with_its_place_and_its_traceback():
    error = raised(ValueError("boom"))
    error.add_note("in step 17, lane 3, samples [5, 6]")
    shown = str(Failure.of(error, rank=1))
    first, *rest = shown.splitlines()
    assert first.startswith("rank 1 on ")
    assert first.endswith(" failed in forward of step 18, lane 3:")
    assert rest[0] == "Traceback (most recent call last):"
    assert rest[-2:] == ["ValueError: boom", "in step 17, lane 3, samples [5, 6]"]


def test_an_error_of_ours_is_shown_without_a_traceback():
    shown = str(Failure.of(raised(TaskError("the loss is no scalar.")), rank=2))
    assert shown.startswith("the loss is no scalar.\n(rank 2 on ")
    assert "Traceback" not in shown


def test_a_failure_comes_back_from_json_as_it_was():
    failure = Failure.of(raised(ValueError("boom \u2028 \x00")), rank=1)
    assert read_typed(failure.to_json().encode(), Failure) == failure


OTHER = [
    {"exit_code": 0},  # the command would end with it
    {"exit_code": 256},
    {"exit_code": "1"},
    {"note": ["forward", 1.5, None]},
    {"shown": None},
    {"more": 1},
]


@pytest.mark.parametrize(
    "written",
    [
        *(b"", b"{}", b"[1]", b"\xff", b'{"rank": 1}', b'{"note": 3}', b"[" * 100_000),
        *(
            json.dumps({**dataclasses.asdict(Failure.of(ValueError(), rank=1)), **change}).encode()
            for change in OTHER
        ),
    ],
)
def test_what_something_else_wrote_is_refused(written):
    with pytest.raises(ValueError, match=r"it is (no|nested)|codec|Expecting"):
        read_typed(written, Failure)


def test_a_mistake_or_the_same_error_at_the_same_step_is_final():
    failure = Failure.of(raised(ValueError("boom")), rank=1)
    other_rank = dataclasses.replace(failure, rank=0, host="elsewhere")
    later = dataclasses.replace(failure, note=("forward", 18, 3))
    assert not failure.is_final(None)
    assert failure.is_final(other_rank)
    assert not failure.is_final(later)
    assert not failure.is_final(dataclasses.replace(failure, text="bang"))
    assert Failure.of(raised(ConfigError("no such key.")), rank=0).is_final(None)


@pytest.mark.parametrize("kind", [LOST_HOST, "silence", "StoreLostError"])
def test_two_lost_hosts_are_not_the_same_error_at_the_same_step(kind):
    """Nobody knows at which step each was lost, and they may be different ones."""
    lost = dataclasses.replace(Failure.of(raised(WorldError("host gpu1 is gone.")), rank=0), kind=kind)
    assert not lost.is_final(dataclasses.replace(lost, text="host gpu2 is gone."))
    assert not lost.is_final(lost)


@pytest.mark.parametrize("length", [5 * 2**20, *slow(100 * 2**20)])
def test_of_a_very_long_message_the_middle_is_left_out_wherever_it_travels(length):
    failure = Failure.of(raised(ValueError(f"boom {'x' * length} bang")), rank=1)
    written = failure.to_json().encode()
    assert len(written) < 2**18
    assert failure.text.startswith("boom x")
    assert failure.text.endswith("x bang")
    assert "characters are left out here" in failure.shown
    assert read_typed(written, Failure) == failure


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (LostRankError("rank 1 ended"), True),
        (dist.DistBackendError("NCCL: remote process exited"), True),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed"), True),
        (RuntimeError("Connection reset by peer"), True),
        (RuntimeError("Unable to cast rank 1 ended while this one waited for it. to Tensor"), True),  # DDP's
        (caused_by(StorageError("not saved"), dist.DistNetworkError("Broken pipe")), True),
        (caused_by(StorageError("not saved"), OSError("No space left on device")), False),
        (StorageError("not saved"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # of the user's own socket
        (ValueError("Broken pipe"), False),
    ],
)
def test_a_lost_connection_is_a_consequence(error, expected):
    assert is_consequence(error) is expected


def test_torchrun_finds_the_failure_in_its_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    failure = Failure.of(raised(ValueError("boom")), rank=1)
    record_failure(failure)
    message = json.loads((tmp_path / "error.json").read_bytes())["message"]
    assert message["message"] == "ValueError: boom"
    assert message["extraInfo"]["py_callstack"] == str(failure)
    assert message["errorCode"] == failure.exit_code
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]
