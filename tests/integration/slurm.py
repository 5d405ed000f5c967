"""A real Slurm of two nodes on this machine, in namespaces of its own, so that nothing of it stays behind."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.command import BIN, MARKER, Cold, Done, wait_for
from tests.listening import reserve_port

# The nodes' names resolve in here only. Its /proc has its own pids: Slurm looks there for a task's children.
NAMESPACE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")

CONFIG = """
ClusterName=lanewise
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
# The nodes have as many CPUs as is said here, not as the machine has.
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0
# Seconds from SIGTERM to SIGKILL; Slurm's default is 30.
KillWait=5
# A job of the second partition takes the nodes of those of the first.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=ALL Default=YES PriorityTier=1
PartitionName=urgent Nodes=ALL PriorityTier=2
"""

# The first process of a pid namespace takes all others with it when it ends. Munged needs --force because the
# socket lies in a folder that is not open to everyone.
DAEMONS = """
mount --bind hosts /etc/hosts
munged --foreground --force --origin=127.0.0.1 --key-file="$PWD/munge.key" --socket="$PWD/munge.socket" \
    --pid-file="$PWD/munged.pid" --log-file="$PWD/munged.log" --seed-file="$PWD/munged.seed" &
slurmctld -D &
slurmd -D -N node1 &
slurmd -D -N node2 &
wait
"""


def why_not() -> str | None:
    """What this machine lacks for a Slurm of its own, or None."""
    programs = ("munged", "slurmctld", "slurmd", "srun", "unshare", "setpriv")
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: slurm-wlm, munge)"
    if os.geteuid() != 0 or subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode:
        return "Slurm's daemons need root, and the right to make namespaces"
    return None


@dataclass(frozen=True)
class Slurm:
    """A running cluster of the nodes `node1` and `node2`."""

    folder: Path

    def run(self, *arguments: object, **options: Any) -> Done:
        """Run one of Slurm's commands to its end; see `start`."""
        with self.start(*arguments, **options) as command:
            return command.finish()

    def start(self, *arguments: object, variables: Mapping[str, str] | None = None, **options: Any) -> Cold:
        """Start one of Slurm's commands, with `lanewise` on the path; see `Cold`."""
        given: dict[str, str | None] = {name: None for name in os.environ if name.startswith("SLURM_")}
        given["SLURM_CONF"] = str(self.folder / "slurm.conf")
        given["PATH"] = os.pathsep.join([str(BIN), os.environ["PATH"]])
        given["SBATCH_EXPORT"] = f"ALL,{MARKER}="  # a job outlives the command that submits it
        return Cold(*arguments, variables={**given, **(variables or {})}, **options)

    def run_batch(self, *arguments: object, cwd: Path) -> str:
        """Submit a batch script and return the state in which it ended; --wait would look only rarely."""
        job = self.run("sbatch", "--parsable", *arguments, cwd=cwd).require_success().stdout.strip()
        return self.wait_for_end(job)

    def start_again(self, job: str) -> None:
        """Wait until a job is back in the queue, and spare it the two minutes that it would have to wait."""
        wait_for(lambda: self.show(job)["JobState"] == "PENDING", every_seconds=0.1)
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now").require_success()

    def wait_for_end(self, job: str) -> str:
        """Return the state in which a job ended."""

        def ended() -> str | None:
            state = self.show(job)["JobState"]
            return None if state in ("PENDING", "RUNNING", "COMPLETING") else state

        return wait_for(ended, every_seconds=0.2)

    def show(self, job: str) -> dict[str, str]:
        """Return what Slurm says of a job."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job).require_success().stdout
        return dict(item.partition("=")[::2] for item in shown.split())

    def is_ready(self) -> bool:
        """Tell whether both nodes wait for work."""
        return self.run("sinfo", "--noheader", "--Node", "--partition=all", "--format=%T").stdout.split() == [
            "idle",
            "idle",
        ]


@contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """Start the daemons in a folder, and kill whatever runs in their namespace in the end."""
    ports = [reserve_port() for _ in range(3)]
    host = socket.gethostname().partition(".")[0]
    for name in ("state", "spool-node1", "spool-node2"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(CONFIG.format(host=host, ports=ports, folder=folder))
    (folder / "hosts").write_text(f"127.0.0.1 localhost {host} node1 node2\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    with (folder / "daemons.log").open("w") as log:
        program = ("setpriv", "--pdeathsig", "KILL", *NAMESPACE, "sh", "-ec", DAEMONS)
        variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        with Cold(*program, variables=variables, cwd=folder, stdout=log, stderr=log):
            slurm = Slurm(folder)
            try:
                wait_for(slurm.is_ready, every_seconds=0.2)
            except AssertionError:
                print((folder / "daemons.log").read_text())
                raise
            yield slurm
