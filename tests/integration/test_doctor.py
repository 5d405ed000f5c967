"""`lanewise doctor`: on a healthy machine and on healthy hosts, and with a fault planted on one of them."""

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import lanewise
from tests.integration import ssh
from tests.integration.command import lanewise as run_here
from tests.integration.command import wait_for, write_config
from tests.integration.ssh import running_ssh
from tests.patience import patient

SOURCE = Path(lanewise.__file__).parents[1]
WITH_HOSTS = pytest.mark.skipif(ssh.WHY_NOT is not None, reason=str(ssh.WHY_NOT))
HOSTS = ("--distributed.launcher", "ssh", "--distributed.hosts", "[node0, 'node1:2']")
DROP_CALLS = (
    "add table inet g; "
    "add chain inet g in { type filter hook input priority 0; }; "
    "add rule inet g in tcp dport 1024-65535 tcp flags syn / syn,ack drop"
)
NO_MEASUREMENT = "import sys; sys.modules['lanewise.commands.doctor.measure'] = None"
LATE_CLOCK = """
import time
now = time.time
time.time = lambda: now() - 3600
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_ssh(tmp_path_factory.mktemp("ssh")) as running:
        yield running


def needs(program: str, package: str):
    missing = f"not installed: {program} (Debian: {package})"
    return pytest.mark.skipif(shutil.which(program) is None, reason=missing)


def python_of(folder: Path) -> Path:
    """Write an interpreter for the hosts; that of node1 looks for modules in `folder / "node1"` first."""
    path = folder / "python"
    path.write_text(
        textwrap.dedent(f"""\
            #!/bin/sh
            export PYTHONPATH={SOURCE}
            [ "$(hostname)" = node1 ] && export PYTHONPATH={folder}/node1:{SOURCE}
            exec {sys.executable} "$@"
            """)
    )
    path.chmod(0o755)
    (folder / "node1").mkdir()
    return path


def examine(cluster, folder: Path, *arguments: object, code: int = 0):
    """Run doctor from the network of the first host; return what it printed and wrote."""
    report = folder / "report.json"
    config = write_config(folder)
    options = (*HOSTS, "--distributed.ssh.python", folder / "python", "--json", report, *arguments)
    with cluster.start("doctor", config, *options) as command:
        done = command.finish()
    wait_for(lambda: not cluster.pids())
    assert done.code == code, f"{done.code}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    assert not (folder / "run").exists()
    return done.stdout, json.loads(report.read_text())


def faults(report) -> set[tuple[str, str]]:
    return {(fault["host"], fault["kind"]) for fault in report["faults"]}


def rates(report) -> dict[tuple[str, str], float]:
    return {(link["source"], link["target"]): link["bytes_per_second"] * 8e-9 for link in report["links"]}


@pytest.mark.slow
def test_this_machine_alone_has_nothing_to_measure(tmp_path):
    done = run_here("doctor", "--json", tmp_path / "report.json").require_success()
    assert "there is nothing to measure between processes" in done.stdout
    assert done.stdout.splitlines()[-1] == "no fault was found"
    (host,) = json.loads((tmp_path / "report.json").read_text())["hosts"]
    assert host["torch"] in done.stdout
    assert host["equipment"]["memory_bytes"] > 2**28


def test_processes_of_this_machine_are_measured_in_both_directions(tmp_path):
    report = tmp_path / "report.json"
    config = write_config(tmp_path)
    run_here("doctor", config, "--distributed.devices", 2, "--json", report).require_success()
    found = json.loads(report.read_text())
    assert rates(found).keys() == {("rank 0", "rank 1"), ("rank 1", "rank 0")}
    assert found["all_reduce"]["world_size"] == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_link_below_what_was_expected_is_a_fault(tmp_path):
    options = ("--distributed.devices", 2, "--expect-gbit", 1e6)
    done = run_here("doctor", write_config(tmp_path), *options)
    assert done.code == 1
    assert "1e+06 Gbit/s were expected" in done.stdout
    assert done.stdout.splitlines()[-1] == "at fault: rank 0 (link), rank 1 (link)"


@WITH_HOSTS
@pytest.mark.slow
def test_two_healthy_hosts_have_no_fault(cluster, tmp_path):
    python_of(tmp_path)
    printed, report = examine(cluster, tmp_path)
    assert printed.splitlines()[-1] == "no fault was found"
    assert report["is_sound"]
    assert rates(report).keys() == {("node0", "node1"), ("node1", "node0")}
    assert all(0.1 < rate < 1000 for rate in rates(report).values())
    assert all(0 < link["latency_seconds"] < patient(0.1) for link in report["links"])
    assert report["all_reduce"]["world_size"] == 3
    assert [host["address"] for host in report["hosts"]] == [
        f"{host.address} {host.interface}" for host in cluster.hosts
    ]
    assert all(abs(host["clock"]["offset_seconds"]) < patient(0.5) for host in report["hosts"])


@WITH_HOSTS
@needs("nft", "nftables")
@pytest.mark.slow
def test_a_host_whose_ports_are_closed_is_named(cluster, tmp_path):
    python_of(tmp_path)
    (tmp_path / "node1" / "sitecustomize.py").write_text(LATE_CLOCK)
    subprocess.run(cluster.hosts[1].enter("nft", DROP_CALLS), check=True)
    try:
        printed, report = examine(cluster, tmp_path, code=1)
    finally:
        subprocess.run(cluster.hosts[1].enter("nft", "delete table inet g"), check=True)
    assert faults(report) == {("node1", "network"), ("node1", "clock")}  # one does not hide the other
    assert "node1: node0 can't connect to a port of it" in printed
    assert "note: nothing is measured to node1" in printed


@WITH_HOSTS
@pytest.mark.slow
def test_a_host_whose_clock_is_late_is_named(cluster, tmp_path):
    python_of(tmp_path)
    (tmp_path / "node1" / "sitecustomize.py").write_text(LATE_CLOCK)
    printed, report = examine(cluster, tmp_path, code=1)
    assert faults(report) == {("node1", "clock")}
    assert "node1: its clock is 3600.0 s behind the others." in printed
    assert len(report["links"]) == 2


@WITH_HOSTS
@pytest.mark.slow
def test_a_host_with_another_torch_is_named(cluster, tmp_path):
    python_of(tmp_path)
    info = tmp_path / "node1" / "torch-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.0.1\n")
    printed, report = examine(cluster, tmp_path, code=1)
    assert faults(report) == {("node1", "versions")}
    assert "there has torch 0.0.1, and this machine has " in printed


@WITH_HOSTS
@pytest.mark.slow
def test_a_host_where_the_measurement_fails_is_named(cluster, tmp_path):
    python_of(tmp_path)
    (tmp_path / "node1" / "sitecustomize.py").write_text(NO_MEASUREMENT)
    printed, report = examine(cluster, tmp_path, code=1)
    assert faults(report) == {("node1", "measurement")}
    assert "on node1 failed in start:" in printed


@WITH_HOSTS
@pytest.mark.slow
def test_a_host_that_is_not_there_hides_nothing_of_the_other(cluster, tmp_path):
    python_of(tmp_path)
    hosts = ("--distributed.hosts", "[nowhere, node0:2]")
    _, report = examine(cluster, tmp_path, *hosts, "--train.run_dir", "/proc/run", code=1)
    assert faults(report) == {("nowhere", "connection"), ("node0", "run_dir")}
    assert rates(report).keys() == {("rank 0", "rank 1"), ("rank 1", "rank 0")}


@WITH_HOSTS
@needs("tc", "iproute2")
@pytest.mark.slow
def test_a_host_that_sends_slowly_is_named(cluster, tmp_path):
    python_of(tmp_path)
    host = cluster.hosts[1]
    of_link = ("dev", host.interface, "root")
    slow = ("tbf", "rate", "40mbit", "burst", "32kbit", "latency", "400ms")
    subprocess.run(host.enter("tc", "qdisc", "add", *of_link, *slow), check=True)
    try:
        printed, report = examine(cluster, tmp_path, code=1)
    finally:
        subprocess.run(host.enter("tc", "qdisc", "delete", *of_link), check=True)
    assert faults(report) == {("node1", "link")}
    assert rates(report)["node1", "node0"] == pytest.approx(0.04, rel=0.25)
    assert "node1: it sends only " in printed
