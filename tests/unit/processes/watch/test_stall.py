"""Who is named when nobody makes progress."""

import pytest

from lanewise.processes.watch import stall as module
from lanewise.processes.watch.channel import Beat
from lanewise.processes.watch.process import process_table
from lanewise.processes.watch.stall import Silence, describe_stall, gather_evidence
from tests.unit.processes.watch.store import make_beat, make_channels

LIMIT = "distributed.stall_seconds=300"


def at(phase: str, step: int = 17, lane: int | None = None) -> Beat:
    return make_beat(note=(phase, step, lane), age_seconds=301.0, table="elsewhere")


def answer(stack: str = "", *, waits: bool = False, states=None, collectives=()) -> dict:
    return {"waits": waits, "stack": stack, "states": states or {}, "collectives": list(collectives)}


def test_the_one_that_computes_is_named_before_those_that_wait_for_it():
    beats = {0: at("communication"), 1: at("forward", lane=3), 2: at("communication")}
    evidence = {0: answer("waits\n"), 1: answer("loops\n"), 2: answer("waits\n")}
    failure = describe_stall(beats, {}, evidence, LIMIT)
    assert failure.rank == 1
    assert failure.note == ("forward", 17, 3)
    assert failure.text.splitlines() == [
        "no progress within distributed.stall_seconds=300.",
        "rank 1 on gpu-a (process 4194305): in forward of step 18, lane 3 for 301 s",
        "ranks 0, 2 wait for rank 1:",
        "  rank 0 on gpu-a (process 4194305): in communication of step 18 for 301 s",
        "  rank 2 on gpu-a (process 4194305): in communication of step 18 for 301 s",
        "stack of rank 1:",
        "loops",
        "stack of ranks 0, 2:",
        "waits",
        "If this is as it should be, raise distributed.stall_seconds; in a debugger, set it to null.",
    ]


def test_one_that_is_silent_comes_first_with_its_state():
    beats = {0: at("evaluation", lane=1), 1: at("evaluation", lane=5)}
    evidence = {0: answer(states={"1": "which is stopped (SIGSTOP)"}, waits=True)}
    failure = describe_stall(beats, {1: beats[1]}, evidence, LIMIT)
    assert failure.rank == 1
    assert (
        "rank 1 on gpu-a (process 4194305), which is stopped (SIGSTOP): last heard from in " in failure.text
    )
    assert "rank 0 waits for rank 1:" in failure.text


def test_a_rank_waits_also_where_its_stack_says_so():
    beats = {0: at("save"), 1: at("save")}
    failure = describe_stall(beats, {}, {0: answer(), 1: answer(waits=True)}, LIMIT)
    assert failure.rank == 0
    assert "rank 1 waits for rank 0:" in failure.text


def test_where_all_wait_the_earliest_step_is_named_and_the_collectives_are_compared():
    beats = {0: at("communication", 18), 1: at("communication", 17)}
    of_group = {"group": "0 default_pg", "name": "gloo:all_reduce", "sizes": [[4]], "state": "scheduled"}
    evidence = {rank: answer(collectives=[{**of_group, "number": 9 - rank}]) for rank in (0, 1)}
    failure = describe_stall(beats, {}, evidence, LIMIT)
    assert failure.rank == 1
    assert (
        "rank 0 came last to number 9, gloo:all_reduce of [[4]]; rank 1 came last to number 8" in failure.text
    )


def test_evidence_is_a_tree_of_json_about_this_process():
    evidence = gather_evidence({1: make_beat(table=process_table())})
    assert evidence["states"] == {"1": "which has ended"}
    assert "test_evidence_is_a_tree_of_json" in evidence["stack"]
    assert evidence["waits"] is False


@pytest.mark.parametrize("limit", [2.0, None])
def test_a_launcher_notices_that_all_ranks_are_silent(limit, monkeypatch):
    monkeypatch.setattr(module, "state_of", lambda *_: "which is stopped (SIGSTOP)")
    channels = make_channels(2)
    silence = Silence(channels[0])
    assert silence.check(5.0) is None  # nobody has said anything yet
    for number in (1, 2):  # one that still speaks is not silent
        channels[0].beat(make_beat(number, limit_seconds=limit))
        channels[1].beat(make_beat(1, limit_seconds=limit))
        assert silence.check(5.0) is None
    assert silence.check(1.5) is None
    stall = silence.check(1.5)
    if limit is None:
        assert stall is None
    else:
        assert stall is not None
        assert "rank 0 on gpu-a (process 4194305), which is stopped (SIGSTOP)" in stall.text


def test_ranks_that_have_not_come_are_named_and_nobody_else():
    failure = describe_stall({0: at("start")}, {}, {0: answer(waits=True)}, LIMIT, absent=[3, 7])
    assert failure.text == f"no progress within {LIMIT}: ranks 3, 7 did not come."
