"""The place of a process, as the variables of torchrun, Slurm and MPI tell it."""

import re
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanewise.errors import WorldError
from lanewise.processes.world.environment import Environment, _first_host

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "PATH": "/usr/bin",
}
MEETING = ("10.0.0.1", 29500)


def test_what_torchrun_sets():
    environment = Environment.from_env(TORCHRUN)
    assert environment == Environment(
        rank=3,
        local_rank=1,
        world_size=4,
        local_world_size=2,
        master_address="10.0.0.1",
        master_port=29500,
        machine=2,
        terminal=2,
    )


def test_two_machines_with_two_processes_each_as_drawn():
    ranks, local_ranks = (0, 1, 2, 3), (0, 1, 0, 1)
    for rank, local_rank in zip(ranks, local_ranks, strict=True):
        variables = TORCHRUN | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        assert Environment.from_env(variables) == Environment(
            rank, local_rank, 4, 2, *MEETING, machine=rank - local_rank, terminal=rank - local_rank
        )


def test_the_launcher_of_deepspeed_calls_a_variable_otherwise():
    variables = {key: value for key, value in TORCHRUN.items() if key != "LOCAL_WORLD_SIZE"}
    assert Environment.from_env(variables | {"LOCAL_SIZE": "2"}) == Environment.from_env(TORCHRUN)
    assert Environment.from_env(TORCHRUN | {"LOCAL_SIZE": "3"}) == Environment.from_env(TORCHRUN)


@pytest.mark.parametrize("variables", [{}, {"PATH": "/usr/bin"}, {"MASTER_ADDR": "h", "MASTER_PORT": "1"}])
def test_no_world_was_prepared(variables):
    assert Environment.from_env(variables) is None


def test_alone_without_a_world():
    assert Environment() == Environment(rank=0, local_rank=0, world_size=1, local_world_size=1)


@pytest.mark.parametrize("name", [name for name in TORCHRUN if name != "PATH"])
def test_a_missing_variable_is_named(name):
    variables = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(WorldError, match=rf"only in part, without {name}\. Start through torchrun"):
        Environment.from_env(variables)


def test_all_missing_variables_are_named():
    with pytest.raises(WorldError, match="without LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        Environment.from_env({"RANK": "0", "WORLD_SIZE": "1"})


@pytest.mark.parametrize("name", [name for name in TORCHRUN if name not in ("PATH", "MASTER_ADDR")])
@pytest.mark.parametrize("value", ["", "two", "1.5"])
def test_what_is_no_number_is_shown(name, value):
    with pytest.raises(WorldError, match=rf"^{name} must be an integer: got '{value}'\."):
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


@pytest.mark.parametrize("port", ["0", "-1", "65536"])
def test_what_is_no_port_is_shown(port):
    with pytest.raises(WorldError, match=f"MASTER_PORT must be a port: got {port}. Use 1 to 65535"):
        Environment.from_env(TORCHRUN | {"MASTER_PORT": port})


# What srun set for the last of three tasks on two nodes, and what else it sets.
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURMD_NODENAME": "node2",
}
NEEDED = list(SLURM)[:8]
# What a batch script sees with --nodes=2 --ntasks-per-node=2.
BATCH = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_ID": "7",
}


def test_what_srun_sets():
    assert Environment.from_env(SLURM) == Environment(
        rank=2,
        local_rank=0,
        world_size=3,
        local_world_size=1,
        master_address="node1",
        master_port=10_708,
        machine=1,
    )


@pytest.mark.parametrize(
    ("tasks_per_node", "places"),  # of each rank: its node, local rank and local world size
    [
        ("4", [(0, 0, 4), (0, 1, 4), (0, 2, 4), (0, 3, 4)]),
        ("2(x2)", [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]),
        ("2(x2)", [(0, 0, 2), (1, 0, 2), (0, 1, 2), (1, 1, 2)]),  # --distribution=cyclic
        ("1(x4)", [(0, 0, 1), (1, 0, 1), (2, 0, 1), (3, 0, 1)]),
        ("2(x2),1", [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2), (2, 0, 1)]),
        ("1,2(x1),1", [(0, 0, 1), (1, 0, 2), (1, 1, 2), (2, 0, 1)]),
    ],
)
def test_each_task_has_the_size_of_its_node(tasks_per_node, places):
    for rank, (node, local_rank, local_world_size) in enumerate(places):
        variables = SLURM | {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local_rank),
            "SLURM_NODEID": str(node),
            "SLURM_STEP_NUM_TASKS": str(len(places)),
            "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        }
        expected = Environment(rank, local_rank, len(places), local_world_size, "node1", 10_708, node)
        assert Environment.from_env(variables) == expected


@pytest.mark.parametrize(
    "variables",
    [BATCH, BATCH | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"}, {"SLURM_STEP_NUM_TASKS": "1"}],
    ids=["batch script", "step of one task", "nothing else"],
)
def test_slurm_without_a_step_of_several_tasks_is_no_world(variables):
    assert Environment.from_env(variables) is None


def test_torchrun_inside_a_step_comes_first():
    assert Environment.from_env(SLURM | TORCHRUN) == Environment.from_env(TORCHRUN)


def test_where_the_processes_meet_can_be_said():
    variables = SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert Environment.from_env(variables) == Environment(2, 0, 3, 1, *MEETING, machine=1)


def test_steps_and_jobs_meet_at_ports_of_their_own():
    def port(job: int, step: int) -> int:
        return Environment.from_env(
            SLURM | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        ).master_port

    assert len({port(7, step) for step in range(20_000)}) == 20_000
    ports = [port(job, step) for job in range(1_000_000, 1_000_198) for step in range(100)]
    assert len(set(ports)) == len(ports)
    assert min(ports) >= 10_000
    assert max(ports) < 30_000


@pytest.mark.parametrize("name", [name for name in NEEDED if name != "SLURM_STEP_NUM_TASKS"])
def test_a_missing_variable_of_slurm_is_named(name):
    variables = {key: value for key, value in SLURM.items() if key != name}
    with pytest.raises(WorldError, match=rf"only in part, without {name}\. Start through srun, or unset"):
        Environment.from_env(variables)


@pytest.mark.parametrize(
    "name", [name for name in NEEDED if name not in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")]
)
def test_what_is_no_number_of_slurm_is_shown(name):
    with pytest.raises(WorldError, match=f"^{name} must be an integer: got 'two'"):
        Environment.from_env(SLURM | {name: "two"})


@pytest.mark.parametrize("written", ["", "two", "2,", "2(x)", "2(2)", "2 1", "-2"])
def test_tasks_per_node_that_slurm_would_not_write_are_shown(written):
    with pytest.raises(WorldError, match=re.escape(f"like 2(x3),1: got '{written}'.")):
        Environment.from_env(SLURM | {"SLURM_STEP_TASKS_PER_NODE": written})


@pytest.mark.parametrize(
    "contradiction",
    [
        {"SLURM_PROCID": "3"},
        {"SLURM_PROCID": "-1"},
        {"SLURM_LOCALID": "1"},
        {"SLURM_LOCALID": "-1"},
        {"SLURM_NODEID": "2"},
        {"SLURM_NODEID": "-1"},
        {"SLURM_STEP_NUM_TASKS": "4"},
        {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
    ],
)
def test_contradictions_of_slurm_are_shown_with_all_numbers(contradiction):
    variables = SLURM | contradiction
    with pytest.raises(WorldError) as caught:
        Environment.from_env(variables)
    assert str(caught.value) == (
        "the environment contradicts itself: got SLURM_PROCID={SLURM_PROCID}, "
        "SLURM_LOCALID={SLURM_LOCALID}, SLURM_NODEID={SLURM_NODEID}, "
        "SLURM_STEP_NUM_TASKS={SLURM_STEP_NUM_TASKS}, "
        "SLURM_STEP_TASKS_PER_NODE={SLURM_STEP_TASKS_PER_NODE}. "
        "Start through srun, and set none of these variables.".format_map(variables)
    )


def test_task_0_on_another_node_than_the_first_needs_an_address():
    variables = SLURM | {"SLURM_PROCID": "0"}
    with pytest.raises(
        WorldError, match=r"of node\[1-2\]: got SLURM_PROCID=0 with SLURM_NODEID=1\. Set MASTER"
    ):
        Environment.from_env(variables)
    assert Environment.from_env(variables | {"MASTER_ADDR": "node2"}).master_address == "node2"


@pytest.mark.parametrize(
    ("written", "first"),
    [
        ("host", "host"),
        ("host,other", "host"),
        ("node[1-2,07]", "node1"),
        ("node[07,1-2]", "node07"),
        ("gpu-a[003-010,12]-ib", "gpu-a003-ib"),
        ("gpu-a[003-010,12]-ib,login", "gpu-a003-ib"),
        ("login,gpu[1-2]", "login"),
        ("rack[2-3]node[08,10-11]", "rack2node08"),
        ("n[5]", "n5"),
        ("node1.example.org,node[2-3]", "node1.example.org"),
    ],
)
def test_the_first_host_of_a_list(written, first):
    assert _first_host(written) == first
    assert Environment.from_env(SLURM | {"SLURM_STEP_NODELIST": written}).master_address == first


@pytest.mark.parametrize("written", ["", ",", "node[1-2", "node1-2]", "node[]", "node[a]", "node[1-]", "a b"])
def test_a_node_list_that_slurm_would_not_write_is_shown(written):
    with pytest.raises(
        WorldError, match=re.escape(f"got '{written}'. Set MASTER_ADDR to the host of task 0")
    ):
        Environment.from_env(SLURM | {"SLURM_STEP_NODELIST": written})


# What Open MPI 4.1 and the hydra of MPICH 4.0 set for the last of three processes on two machines.
PLACES = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "PMIX_RANK": "2",
}
HYDRA = {
    "PMI_RANK": "2",
    "MPI_LOCALRANKID": "0",
    "PMI_SIZE": "3",
    "MPI_LOCALNRANKS": "1",
    "PMI_FD": "6",
}
MPI = pytest.mark.parametrize("variables", [OPEN_MPI, HYDRA], ids=["Open MPI", "hydra"])


@MPI
def test_what_mpirun_sets(variables):
    environment = Environment.from_env(variables | PLACES)
    machine = environment.machine
    assert environment == Environment(2, 0, 3, 1, *MEETING, machine=machine, terminal=0)


@MPI
def test_processes_of_mpirun_are_on_one_machine_if_its_name_is_the_same(variables, monkeypatch):
    def machine(host: str, rank: int) -> int:
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        return Environment.from_env(variables | PLACES | {next(iter(variables)): str(rank)}).machine

    assert machine("node1", 0) == machine("node1", 2)
    assert machine("node1", 0) != machine("node2", 1)


@MPI
@pytest.mark.parametrize(
    ("given", "missing"),
    [({}, "MASTER_ADDR and MASTER_PORT"), ({"MASTER_ADDR": "node1"}, "MASTER_PORT")],
)
def test_where_the_processes_of_mpirun_meet_must_be_said(variables, given, missing):
    option = (
        "-x MASTER_ADDR=HOST -x MASTER_PORT=" if variables is OPEN_MPI else "-genv MASTER_ADDR HOST -genv"
    )
    with pytest.raises(
        WorldError, match=f"started 3 processes, .* without {missing}\\. Name .* mpirun {option}"
    ):
        Environment.from_env(variables | given)


@MPI
def test_one_process_of_mpirun_is_no_world(variables):
    rank, local_rank, world_size, local_world_size = list(variables)[:4]
    one = {rank: "0", local_rank: "0", world_size: "1", local_world_size: "1"}
    assert Environment.from_env(variables | one) is None


@MPI
def test_a_missing_variable_of_mpirun_is_named(variables):
    for name in list(variables)[:4]:
        rest = {key: value for key, value in variables.items() if key != name}
        if "SIZE" in name and "LOCAL" not in name:
            assert Environment.from_env(rest) is None
            continue
        with pytest.raises(
            WorldError, match=rf"processes of MPI only in part, without {name}\. Use an mpirun"
        ):
            Environment.from_env(rest | PLACES)


@MPI
def test_contradictions_of_mpirun_are_shown(variables):
    rank, local_rank, world_size, local_world_size = list(variables)[:4]
    expected = f"got {rank}=3 of {world_size}=3 and {local_rank}=0 of {local_world_size}=1."
    with pytest.raises(WorldError, match=expected):
        Environment.from_env(variables | PLACES | {rank: "3"})


def test_torchrun_comes_before_mpirun_and_srun_before_its_own_pmi():
    assert Environment.from_env(OPEN_MPI | PLACES | TORCHRUN) == Environment.from_env(TORCHRUN)
    pmi = {"PMI_RANK": "2", "PMI_SIZE": "3", "PMI_FD": "10"}  # srun --mpi=pmi2
    assert Environment.from_env(SLURM | pmi) == Environment.from_env(SLURM)


@MPI
def test_the_step_in_which_srun_started_the_daemons_of_mpirun_is_not_that_of_the_processes(variables):
    assert Environment.from_env(SLURM | variables | PLACES) == Environment.from_env(variables | PLACES)


NAMES = st.text("abz019-.", min_size=1)
RANGES = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 20), st.integers(0, 5)), min_size=1)


@given(NAMES, RANGES, st.just("") | NAMES, st.lists(NAMES))
def test_the_first_host_of_any_list(prefix, ranges, suffix, others):
    written = []
    for start, more, width in ranges:
        first, last = str(start).zfill(width), str(start + more).zfill(width)
        written.append(f"{first}-{last}" if more else first)
    group = f"{prefix}[{','.join(written)}]{suffix}"
    start, _, width = ranges[0]
    assert _first_host(",".join([group, *others])) == f"{prefix}{start:0{width}}{suffix}"
    assert _first_host(",".join([prefix, group, *others])) == prefix


def test_processes_of_horovodrun_are_told_what_to_write():
    variables = {"HOROVOD_SIZE": "4", "HOROVOD_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}
    with pytest.raises(
        WorldError, match=r"horovodrun started 4 processes.*torchrun --nproc-per-node 2 -m lane"
    ):
        Environment.from_env(variables)
    assert Environment.from_env(variables | TORCHRUN) == Environment.from_env(TORCHRUN)
