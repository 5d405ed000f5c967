import os
import signal
import sys

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from lanewise.errors import RunDirError
from lanewise.launch.torchrun import main
from lanewise.processes.watch.failure import Failure, record_failure
from lanewise.processes.watch.store import OWN_STORE_VARIABLE


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    """What torchrun sets for its workers must not reach other tests."""
    monkeypatch.setattr(os, "environ", dict(os.environ))


def ends_with(monkeypatch, error=None):
    """Let torchrun end with an error, and return the list that gets its arguments."""
    seen = []

    def end(arguments):
        seen.append(arguments)
        if error is not None:
            raise error

    monkeypatch.setattr(run, "main", end)
    return seen


@pytest.mark.parametrize(("given", "used"), [(None, "1"), ("0", "0")])
def test_rank_0_of_each_start_keeps_the_store_unless_the_user_says_otherwise(given, used, monkeypatch):
    """Torch's agent that stays while others come and go would keep that of the first round."""
    monkeypatch.setattr(os, "environ", {} if given is None else {OWN_STORE_VARIABLE: given})
    ends_with(monkeypatch)
    main([])
    assert os.environ == {OWN_STORE_VARIABLE: used}


def failed(**codes: int) -> ChildFailedError:
    """What torchrun says of processes that ended with these codes, the first first."""
    failures = {}
    for rank, code in enumerate(codes.values()):
        failures[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="<N/A>")
        failures[rank].timestamp += rank
    return ChildFailedError("lanewise", failures)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [({"first": 2, "then": -15}, 2), ({"first": 75}, 75), ({"first": 1, "then": 2}, 1), ({"first": -9}, 1)],
)
def test_it_exits_with_the_code_of_the_process_that_failed_first(codes, expected, monkeypatch, capsys):
    ends_with(monkeypatch, failed(**codes))
    assert main([]) == expected
    assert "Root Cause" in capsys.readouterr().err


def test_it_exits_with_the_code_that_a_process_recorded(monkeypatch, tmp_path):
    """The process itself may have been killed meanwhile, or have ended because of another's error."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    record_failure(Failure.of(RunDirError("in use"), rank=3))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=-9, error_file=str(tmp_path / "error.json"))
    ends_with(monkeypatch, ChildFailedError("lanewise", {0: failure}))
    assert main([]) == 2


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 129)])
def test_after_sigterm_the_run_is_to_be_started_again(sign, code, monkeypatch):
    ends_with(monkeypatch, SignalException("ended", sign))
    assert main([]) == code


def test_it_exits_with_0_when_all_is_done(monkeypatch):
    seen = ends_with(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["torchrun", "-m", "lanewise"])
    assert main() == main(["-m", "lanewise"]) == 0
    assert seen == [None, ["-m", "lanewise"]]  # of None torchrun makes sys.argv
