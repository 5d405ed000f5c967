"""What a worker on another host sends as the result of a job."""

import pytest

from lanewise.commands.jobs.rank import read_sent_result, write_sent_result
from lanewise.errors import PreemptedError, WorldError
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
