"""How hosts are written, and what is said of them where they make no sense."""

import pytest

from lanewise.config import DistributedConfig
from lanewise.config.launchers import Host, KubernetesConfig, SSHConfig, read_hosts
from lanewise.errors import ConfigError


def test_hosts_are_what_one_types_after_ssh_with_a_number_of_devices():
    assert read_hosts(["gpu1", "me@gpu2.lab:4"], None) == [Host("gpu1", None), Host("me@gpu2.lab", 4)]


@pytest.mark.parametrize(
    "written",
    ["", "gpu1:", "gpu1:0", "gpu1:four", "a b", "-oProxyCommand=x", "a,b", "[a]", f"a:{'1' * 6000}"],
)
def test_what_is_no_host_is_a_mistake_before_ssh_sees_it(written):
    with pytest.raises(ConfigError, match="must list names such as gpu1, me@gpu1 or gpu1:4: got"):
        DistributedConfig(launcher="ssh", hosts=(written,))


def test_a_hostfile_is_as_deepspeed_and_open_mpi_write_it(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# all of them\ngpu1 slots=4\n\ngpu2:2  # the small one\ngpu3\n gpu4 slots = 1 \n")
    assert read_hosts([], str(file)) == [
        Host("gpu1", 4),
        Host("gpu2", 2),
        Host("gpu3", None),
        Host("gpu4", 1),
    ]


@pytest.mark.parametrize(
    "line",
    ["gpu1 slots=0", "gpu1 4", "gpu1:x", "gpu1 slots=4 more=8", "-oX slots=1", "a slots=10000000"],
)
def test_a_line_that_is_no_host_is_named(tmp_path, line):
    file = tmp_path / "hosts"
    file.write_text(f"gpu0\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_hosts([], str(file))
    assert str(caught.value) == f"{file}:2 must be a host such as 'gpu1 slots=4' or gpu1:4: got {line}."


def test_a_hostfile_that_cannot_be_read_is_a_mistake(tmp_path):
    with pytest.raises(ConfigError, match="hosts cannot be read: No such file or directory"):
        read_hosts([], str(tmp_path / "hosts"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="binary cannot be read: it is not text"):
        read_hosts([], str(tmp_path / "binary"))


def test_a_host_that_is_there_twice_is_a_mistake():
    with pytest.raises(
        ConfigError, match=r"got gpu1 more than once\. Give the number of its devices instead"
    ):
        read_hosts(["gpu1", "gpu2", "gpu1:2"], None)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"launcher": "ssh"}, "distributed.launcher ssh needs hosts"),
        ({"hosts": ("a",)}, "distributed.hosts is for distributed.launcher ssh: got local"),
        ({"launcher": "slurm", "hostfile": "x"}, "distributed.hostfile is for distributed.launcher ssh: got"),
        ({"launcher": "ssh", "hosts": ("a",), "hostfile": "x"}, "both name hosts: got [a] and x"),
        (
            {"launcher": "ssh", "hosts": ("a",), "nodes": 2},
            "nodes is for distributed.launcher slurm",
        ),
    ],
)
def test_each_launcher_has_its_own_way_to_say_where(keys, says):
    with pytest.raises(ConfigError) as caught:
        DistributedConfig(**keys)
    assert says in str(caught.value)


def test_a_variable_is_text_and_its_value_stays_unseen():
    assert SSHConfig(variables={"A": "1", "B": None}).variables == {"A": "1", "B": None}
    with pytest.raises(ConfigError, match=r"ssh\.variables\.A must be text, or null.*Put it in quotes"):
        SSHConfig(variables={"A": 1})


@pytest.mark.parametrize("path", ["data", "", 1, None])
def test_a_claim_has_a_path_in_the_pods(path):
    with pytest.raises(ConfigError, match=r"claims\.shared must be the path where the pods see it: got"):
        KubernetesConfig(claims={"shared": path})
    assert KubernetesConfig(claims={"shared": "/data"}).claims == {"shared": "/data"}


@pytest.mark.parametrize("quantity", [True, None, [8], {"gpu": 1}])
def test_a_resource_has_a_quantity(quantity):
    with pytest.raises(ConfigError, match=r"resources\.cpu must be a quantity such as 8 or 64Gi: got"):
        KubernetesConfig(resources={"cpu": quantity})
    for fits in (8, 0.5, "500m"):
        assert KubernetesConfig(resources={"cpu": fits}).resources == {"cpu": fits}


def test_the_pods_run_in_one_of_two_ways():
    with pytest.raises(ConfigError, match="kind must be one of TrainJob, JobSet: got"):
        KubernetesConfig(kind="Job")
