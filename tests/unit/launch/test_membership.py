"""Who takes part in the next start of a run whose hosts come and go, and which starts count."""

from dataclasses import replace

import pytest

from lanewise.errors import LaunchError
from lanewise.launch import membership as module
from lanewise.launch.membership import RESIZED, Members
from lanewise.processes.watch.channel import failure_of
from lanewise.processes.watch.failure import LOST_HOST, Failure

HOSTS = [("a", 1), ("b", 2), ("c", 1)]
NAMES = ["a", "b", "c"]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def members(max_restarts: int = 0, min_hosts: int | None = 2) -> Members:
    return Members(max_restarts, min_hosts, Clock())


def lost(host: str) -> Failure:
    return replace(failure_of(0, None, LOST_HOST, f"host {host}: it is gone."), host=host)


def error(rank: int, text: str = "upside down", step: int = 6, exit_code: int = 1) -> Failure:
    failure = failure_of(rank, None, "ValueError", text, exit_code)
    return replace(failure, note=("forward", step, 0))


def begin(run: Members, step: int) -> list[str]:
    """Make a start with all hosts that it asks first."""
    asked = run.asked(NAMES)
    run.begin([host for host in HOSTS if host[0] in asked], step, {})
    return asked


def test_a_lost_host_is_left_out_of_the_next_start_unless_too_few_are_left():
    run = members()
    begin(run, 0)
    run.fail(lost("a"))
    assert begin(run, 4) == ["b", "c"]
    run.fail(lost("c"))
    assert run.asked(NAMES) == NAMES


def test_a_loss_is_free_where_the_newest_checkpoint_is_later_than_at_any_start_before():
    run = members()
    for step in range(0, 100, 4):
        begin(run, step)
        assert run.fail(lost("b")).startswith(
            "starting again with the hosts that are there: host b: it is gone"
        )


def test_losses_that_come_faster_than_checkpoints_end_the_run():
    run = members(max_restarts=1)
    begin(run, 4)
    for number in range(4):
        run.fail(lost(NAMES[number % 3]))
        begin(run, 4)
    run.fail(lost("b"))
    with pytest.raises(LaunchError, match=r"host b: it is gone(?s:.*)\n5 starts .*max_restarts \+ 3 may"):
        begin(run, 4)


def test_a_host_that_ends_each_first_step_is_left_out_for_good():
    run = members()
    begin(run, 0)
    run.fail(lost("b"))
    begin(run, 0)
    run.join(["b"])
    run.fail(failure_of(0, None, RESIZED, "starting again"))
    assert begin(run, 8) == NAMES
    run.fail(lost("b"))
    begin(run, 8)
    run.clock.now += 1e9
    assert run.due(HOSTS, 9) == []
    assert run.left_out["b"][1] == "it ended two starts running"


def test_a_host_on_which_two_starts_running_fail_is_left_out():
    run = members(max_restarts=1)
    begin(run, 0)
    assert run.fail(error(1)).startswith("starting again, 1 of 4 times: upside down")
    assert begin(run, 0) == NAMES
    run.fail(error(2, "another one"))
    assert begin(run, 0) == ["a", "c"]


def test_the_same_error_on_another_host_is_the_users():
    run = members(max_restarts=9)
    begin(run, 0)
    run.fail(error(3))
    begin(run, 0)
    run.fail(error(3))
    assert begin(run, 0) == ["a", "b"]
    with pytest.raises(LaunchError, match="upside down"):
        run.fail(error(1))


@pytest.mark.parametrize("min_hosts", [None, 3])
def test_the_same_error_ends_a_run_that_can_leave_out_no_host(min_hosts):
    run = members(max_restarts=9, min_hosts=min_hosts)
    begin(run, 0)
    run.fail(error(3))
    begin(run, 0)
    with pytest.raises(LaunchError, match="upside down"):
        run.fail(error(3))


def test_a_mistake_never_starts_again():
    run = members(max_restarts=9)
    begin(run, 0)
    with pytest.raises(LaunchError):
        run.fail(error(0, exit_code=2))


def test_where_no_host_may_be_missing_a_loss_counts():
    run = members(max_restarts=1, min_hosts=None)
    begin(run, 0)
    assert run.fail(lost("b")).startswith("starting again, 1 of 1 times")
    assert begin(run, 4) == NAMES
    with pytest.raises(LaunchError):
        run.fail(lost("b"))


def test_who_may_be_asked_to_join_is_named_not_used_has_lanes_and_was_not_asked_just_now():
    run = members()
    run.begin([("a", 1)], 0, {})
    assert run.due(HOSTS, 3) == ["b", "c"]
    assert run.due(HOSTS, 2) == ["c"]  # two processes of b would be without a lane
    run.leave_out("b", "it was told to stop", 300.0)
    assert run.due([*HOSTS, ("new", 1)], 9) == ["c", "new"]
    run.clock.now += 300.0
    assert run.due(HOSTS, 9) == ["b", "c"]


def test_a_host_that_is_left_out_after_all_is_asked_again_after_an_hour():
    run = members()
    run.begin([("a", 1), ("c", 1)], 0, {})
    run.join(["b"])
    run.begin([("a", 1), ("c", 1)], 4, {"b": "a can't connect to a port of it."})
    assert run.due(HOSTS, 9) == []
    run.clock.now += module._SECONDS_BETWEEN_JOINS
    assert run.due([*HOSTS, ("new", 1)], 9) == ["new"]
    run.clock.now += module._SECONDS_AFTER_A_JOIN
    assert run.due(HOSTS, 9) == ["b"]
