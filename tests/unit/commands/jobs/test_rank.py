"""What a worker on another host sends as the result of a job, and how a worker ends that cannot begin."""

import multiprocessing

import pytest

from lanewise.commands.jobs import rank
from lanewise.commands.jobs.rank import read_sent_result, work, write_sent_result
from lanewise.errors import PreemptedError, WorldError
from lanewise.processes.watch.failure import ERROR_FILE_VARIABLE, LAUNCHER_SHOWS_VARIABLE, recorded_failure
from lanewise.processes.watch.store import StoreLostError
from lanewise.processes.world.tree_message import dump_tree


def test_a_result_or_what_stopped_the_run_comes_back():
    assert read_sent_result(write_sent_result({"step": 3})) == {"step": 3}
    stopped = read_sent_result(write_sent_result(PreemptedError("stopped after step 3")))
    assert isinstance(stopped, PreemptedError)
    assert str(stopped) == "stopped after step 3"


@pytest.mark.parametrize(
    "written",
    [b"", b"garbage", *map(dump_tree, (3, {"stopped": None}, {"stopped": 1, "result": None}))],
    ids=["empty", "garbage", "number", "no text", "both"],
)
def test_anything_else_is_refused(written):
    with pytest.raises(WorldError):
        read_sent_result(written)


def test_a_worker_whose_launcher_ends_before_it_has_come_shows_no_traceback(tmp_path, monkeypatch, capfd):
    """After a signal before the first step the launcher ends, and with it the store that workers look for."""

    def watch(environment, timeout_seconds):
        raise StoreLostError("the store is lost.", has_ended=True)

    monkeypatch.setattr(rank, "_watch", watch)
    variables = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv(LAUNCHER_SHOWS_VARIABLE, "True")
    monkeypatch.setenv(ERROR_FILE_VARIABLE, str(tmp_path / "error"))
    process = multiprocessing.get_context("fork").Process(target=work, args=(tmp_path / "job",))
    process.start()
    process.join()
    assert process.exitcode == 1
    assert capfd.readouterr().err == ""
    assert recorded_failure(tmp_path / "error").text == "the store is lost."
