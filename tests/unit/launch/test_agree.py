"""What is said of hosts that do not reach each other."""

import json
from dataclasses import replace

import pytest

from lanewise.errors import ConfigError
from lanewise.launch.agree import Agreement, Project
from lanewise.launch.membership import Elastic
from tests.unit.launch.scripted import PROJECT, Scripted, answering, make_host, say_hello

IPV4 = [["10.0.0.1", "eth0"], ["127.0.0.1", "lo"]]
IPV6_ONLY = [["127.0.0.1", "lo"]]
REFUSED, UNREACHABLE, TIMED_OUT = "Connection refused", "Network is unreachable", "timed out"


def look(addresses: object, whys: object, project: Project = PROJECT) -> Agreement:
    """Let hosts a, b, ... look at each other.

    Args:
        addresses: of each.
        whys: for each host why it does not reach each address of each host.
        project: what they shall have.
    """
    hosts = []
    for number, (own, answer) in enumerate(zip(addresses, whys, strict=True)):
        answers = {"enter": ["", ""], "compare": [], "reach": answer}
        wire = Scripted(say_hello(addresses=own), answer=answering(answers))
        hosts.append(make_host(wire, first_rank=2 * number, name="abc"[number])[0])
    agreement = Agreement(hosts, project)
    agreement.check()
    return agreement


def test_the_first_address_that_all_others_reach_is_used():
    agreement = look([IPV4, IPV4], [[["", ""], ["", REFUSED]], [["", REFUSED], ["", ""]]])
    agreement.require()
    assert [site.address for site in agreement.sites.values()] == ["10.0.0.1", "10.0.0.1"]


def test_a_host_with_ipv6_alone_is_told_that_it_needs_an_address_and_no_other_host_to_open_ports():
    agreement = look(
        [IPV4, IPV6_ONLY, IPV4],
        [
            [["", ""], [REFUSED], ["", REFUSED]],
            [[UNREACHABLE, REFUSED], [""], [UNREACHABLE, REFUSED]],
            [["", REFUSED], [REFUSED], ["", ""]],
        ],
    )
    with pytest.raises(ConfigError, match=r"^host b: it has no IPv4 address besides") as error:
        agreement.require()
    assert len(error.value.mistakes) == 1
    assert not agreement.may_pass(is_again=False)


@pytest.mark.parametrize(("why", "may_pass"), [(TIMED_OUT, True), (REFUSED, False)])
def test_only_a_host_that_does_not_answer_may_be_busy(why, may_pass):
    agreement = look([IPV4, IPV4], [[["", ""], [why, REFUSED]], [["", REFUSED], ["", ""]]])
    assert agreement.may_pass(is_again=False) is may_pass
    assert agreement.may_pass(is_again=True)
    with pytest.raises(ConfigError, match=rf"^host b: a can't connect .* tried 10.0.0.1 \({why}\)"):
        agreement.require()


def test_an_answer_about_other_addresses_is_the_fault_of_the_host_that_gives_it():
    agreement = look([IPV4, IPV4], [[["", ""], ["", REFUSED]], [["", REFUSED]]])
    with pytest.raises(ConfigError, match=r"^host b: its answer is not about the addresses") as error:
        agreement.require()
    assert len(error.value.mistakes) == 1


# ------------------------------------------------------------------------- where hosts may come and go


def elastic(max_processes: int = 9) -> Project:
    needs = Elastic(
        min_hosts=1, max_processes=max_processes, see=("see",), was_stopped=lambda _: True, hosts=list
    )
    return replace(PROJECT, run_dir="run", elastic=needs)


def meet(project: Project, *sights: dict[str, object], cut: frozenset[str] = frozenset(), goes_on=False):
    """Let hosts a, b, ... look at each other and at the run; return those that are left and why others not.

    Args:
        project: what they shall have.
        sights: what each sees, if it is not the usual.
        cut: the pairs of hosts between which nothing goes.
        goes_on: see `Agreement`.
    """
    hosts = {}
    for number, sight in enumerate(sights):
        name = "abcd"[number]
        seen = {"holds_launch": True, "saved_step": 4, "steps_lost": 0, "idle_seconds": 1.0}

        def answer(
            asked: str, name: str = name, sight: object = seen | {"pins": {}, "pins_of_run": {}} | sight
        ):
            answers = {
                "enter": ["", ""],
                "compare": [],
                "see": sight,
                "leave": [],
                "find": True,
                "remove": None,
            }
            fit = [other for other in hosts if other in [host.name for host in agreement.fit]]
            whys = [[REFUSED if {name, other} in map(set, cut) else ""] for other in fit]
            return json.dumps(["reply", {**answers, "reach": whys}[asked]]).encode()

        wire = Scripted(say_hello(addresses=[["10.0.0.1", "eth0"]]), answer=answer)
        hosts[name] = make_host(wire, first_rank=2 * number, name=name)[0]
    agreement = Agreement(list(hosts.values()), project, goes_on=goes_on)
    agreement.check()
    agreement.leave_out()
    return [(host.name, host.first_rank) for host in agreement.hosts], agreement.left_out


@pytest.mark.parametrize(
    ("cut", "left"),
    [({"bc"}, "ab"), ({"ab"}, "ac"), ({"ba", "bc"}, "ac"), ({"ab", "ac"}, "bc"), (set(), "abc")],
)
def test_of_hosts_that_do_not_reach_each_other_the_last_or_the_loneliest_is_left_out(cut, left):
    fit, why = meet(elastic(), {}, {}, {}, cut=frozenset(cut))
    assert fit == [(name, 2 * number) for number, name in enumerate(left)]
    assert why.keys() == set("abc") - set(left)
    assert all(
        "can't connect to a port of it: tried 10.0.0.1 (Connection refused)" in text for text in why.values()
    )


def test_a_host_without_the_mount_is_left_out_even_if_it_is_the_first():
    """It would make all others unfit, or begin at step 0 in an empty folder."""
    bare = {"holds_launch": False, "saved_step": 0}
    fit, why = meet(elastic(), bare, {}, {}, goes_on=True)
    assert fit == [("b", 0), ("c", 2)]
    assert why == {"a": "run_dir run there does not have this run. Mount its file system there."}
    assert meet(elastic(), bare, bare, {})[1] == {}  # the first start


def test_a_host_on_which_exact_would_not_go_on_is_left_out_and_no_mistake():
    run = {"pins_of_run": {"torch": "2", "gpu": "H100"}}
    good, other = {**run, "pins": {"torch": "2", "gpu": "H100"}}, {**run, "pins": {"torch": "2", "gpu": "T4"}}
    fit, why = meet(elastic(), other, good, {**run, "pins": {"torch": "2"}})
    assert fit == [("b", 0)]
    assert why["a"] == "it has gpu=T4, and `exact` needs gpu=H100."
    new = {"pins": {"gpu": "T4"}}, {"pins": {"gpu": "H100"}}  # a run without a checkpoint
    assert meet(elastic(), *new)[0] == [("a", 0)]


def test_a_host_for_which_there_are_no_lanes_is_left_out():
    fit, why = meet(elastic(max_processes=5), {}, {}, {})
    assert fit == [("a", 0), ("b", 2)]
    assert why == {"c": "the run has no more than 5 lanes."}
