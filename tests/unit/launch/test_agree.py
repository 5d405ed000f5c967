"""What is said of hosts that do not reach each other."""

import pytest

from lanewise.errors import ConfigError
from lanewise.launch.agree import Agreement
from tests.unit.launch.scripted import PROJECT, Scripted, answering, make_host, say_hello

IPV4 = [["10.0.0.1", "eth0"], ["127.0.0.1", "lo"]]
IPV6_ONLY = [["127.0.0.1", "lo"]]
REFUSED, UNREACHABLE, TIMED_OUT = "Connection refused", "Network is unreachable", "timed out"


def look(addresses: object, whys: object) -> Agreement:
    """Let hosts a, b, ... look at each other.

    Args:
        addresses: of each.
        whys: for each host why it does not reach each address of each host.
    """
    hosts = []
    for number, (own, answer) in enumerate(zip(addresses, whys, strict=True)):
        answers = {"enter": ["", ""], "compare": [], "reach": answer}
        wire = Scripted(say_hello(addresses=own), answer=answering(answers))
        hosts.append(make_host(wire, first_rank=2 * number, name="abc"[number])[0])
    agreement = Agreement(hosts, PROJECT)
    agreement.look()
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
