"""The place of a process, as torchrun's variables tell it."""

import pytest

from lanewise.errors import WorldError
from lanewise.world.environment import Environment

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "PATH": "/usr/bin",
}


def test_what_torchrun_sets():
    environment = Environment.from_env(TORCHRUN)
    assert environment == Environment(rank=3, local_rank=1, world_size=4, local_world_size=2)


def test_two_machines_with_two_processes_each_as_drawn():
    ranks, local_ranks = (0, 1, 2, 3), (0, 1, 0, 1)
    for rank, local_rank in zip(ranks, local_ranks, strict=True):
        variables = TORCHRUN | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        assert Environment.from_env(variables) == Environment(rank, local_rank, 4, 2)


@pytest.mark.parametrize("variables", [{}, {"PATH": "/usr/bin"}, {"MASTER_ADDR": "h", "MASTER_PORT": "1"}])
def test_no_world_was_prepared(variables):
    assert Environment.from_env(variables) is None


def test_alone_without_a_world():
    assert Environment() == Environment(rank=0, local_rank=0, world_size=1, local_world_size=1)


@pytest.mark.parametrize("name", [name for name in TORCHRUN if name != "PATH"])
def test_a_missing_variable_is_named(name):
    variables = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(WorldError, match=rf"only in part: {name} not set\. Start through torchrun"):
        Environment.from_env(variables)


def test_all_missing_variables_are_named():
    with pytest.raises(WorldError, match="LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"):
        Environment.from_env({"RANK": "0", "WORLD_SIZE": "1"})


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["", "two", "1.5"])
def test_what_is_no_number_is_shown(name, value):
    with pytest.raises(WorldError, match=rf"must be integers: .*'{value}'"):
        Environment.from_env(TORCHRUN | {name: value})


@pytest.mark.parametrize(
    "contradiction",
    [
        {"RANK": "4"},
        {"RANK": "-1"},
        {"LOCAL_RANK": "2"},
        {"LOCAL_RANK": "-1"},
        {"LOCAL_WORLD_SIZE": "5"},
        {"WORLD_SIZE": "0"},
    ],
)
def test_contradictions_are_shown_with_all_numbers(contradiction):
    variables = TORCHRUN | contradiction
    with pytest.raises(WorldError) as caught:
        Environment.from_env(variables)
    assert str(caught.value) == (
        "the environment contradicts itself: "
        "got RANK={RANK} of WORLD_SIZE={WORLD_SIZE} and "
        "LOCAL_RANK={LOCAL_RANK} of LOCAL_WORLD_SIZE={LOCAL_WORLD_SIZE}.".format_map(variables)
    )
