"""Submits a batch job to Slurm, which runs the launcher on the first of its nodes."""

import os
import pty
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from lanewise.config.check import is_one_line, show
from lanewise.config.launchers import SlurmConfig
from lanewise.errors import ConfigError, LaunchError
from lanewise.launch.launcher import count_processes

ALLOCATION = "SLURM_JOB_ID"
"""The variable that is set inside of an allocation."""
_SECONDS_OF_SLURM = 60
"""How late Slurm may notice that a time limit comes near."""


@final
@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """What Slurm is asked for."""

    file: Path
    """What the job reads; its script is written beside it, and so is the log."""
    cwd: Path
    """The working directory."""
    num_nodes: int
    num_processes: int
    """The processes of each node."""
    num_cores: int
    """The CPU cores of each node."""
    seconds_to_save: int
    """How long before the time limit the run is told to save at the latest."""
    slurm: SlurmConfig

    @property
    def script(self) -> Path:
        """The batch script."""
        return self.file.with_suffix(".sh")

    def log(self, number: str) -> Path:
        """Return where the job with this number logs, also when it is started again."""
        return self.file.with_name(f"{number}.log")

    def write(self) -> str:
        """Write the batch script; the flags of the configuration come last, so that they count.

        Raises:
            ConfigError: an option would take more than its line.
        """
        slurm = self.slurm
        log = str(self.log("%j").parent).replace("%", "%%")
        options = [
            "--job-name=lanewise",
            f"--nodes={self.num_nodes}",
            "--ntasks-per-node=1",
            f"--cpus-per-task={self.num_cores}",
            *([f"--time={slurm.time}"] if slurm.time else []),
            *([f"--partition={slurm.partition}"] if slurm.partition else []),
            f"--signal=TERM@{self.seconds_to_save + _SECONDS_OF_SLURM}",
            "--requeue",
            "--open-mode=append",
            f"--chdir={self.cwd}",
            f"--output={log}/%j.log",
            *slurm.flags,
        ]
        if broken := [option for option in options if not is_one_line(option)]:
            raise ConfigError(
                f"an option of sbatch must be one line: got {show(broken[0])}. Write distributed.slurm so, "
                "and start the run in a folder whose path is one line."
            )
        lines = [f"#SBATCH {shlex.quote(option)}" for option in options]
        # -P: what lies in the user's folder must not take the place of a module.
        program = shlex.join([sys.executable, "-P", "-m", "lanewise.commands.jobs.batch", str(self.file)])
        return "\n".join(["#!/bin/sh", *lines, f"exec {program}", ""])

    def command(self, *options: str) -> list[str]:
        """Return the command that submits the script."""
        return ["sbatch", "--parsable", *options, str(self.script)]

    def describe(self) -> str:
        """Say what would be submitted."""
        number = f"{self.num_nodes} node{'s' * (self.num_nodes != 1)}"
        what = f"{number} with {count_processes(self.num_processes)} each"
        return f"{shlex.join(self.command())}  # {what}, by this script:\n{self.write()}".rstrip()

    def write_file(self, content: bytes) -> None:
        """Write what the job reads, which nobody else may read or write, and the script.

        Raises:
            LaunchError: there is no sbatch.
            ConfigError: see `write`.
        """
        script = self.write()
        if shutil.which("sbatch") is None:
            raise _missing("sbatch")
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.touch(mode=0o600)
        self.file.write_bytes(content)
        self.script.write_text(script, encoding="utf-8")

    def submit(self) -> str:
        """Submit the script; return the number of the job.

        Raises:
            LaunchError: sbatch refuses the job.
        """
        return run_slurm(*self.command()).split(";")[0].strip()

    def submit_and_wait(self) -> tuple[str, int]:
        """Submit the script, and wait until the job has ended, however often Slurm starts it.

        Returns:
            The number of the job, and its exit code.

        Raises:
            LaunchError: sbatch refuses the job.
            KeyboardInterrupt: after the job was cancelled.
        """
        ours, theirs = pty.openpty()  # into a pipe sbatch would write the number at its end only
        with (
            os.fdopen(ours, "r", encoding="utf-8") as lines,
            start_slurm(*self.command("--wait"), stdout=theirs) as sbatch,
        ):
            os.close(theirs)
            number = ""
            try:
                with suppress(OSError):  # it has ended
                    number = lines.readline().split(";")[0].strip()
                if not number.isdigit():
                    raise _refused("sbatch", sbatch.communicate()[1])
                print(self.tell(number), file=sys.stderr)  # noqa: T201 - it may take days
                return number, sbatch.wait()
            except KeyboardInterrupt:
                sbatch.kill()
                if number.isdigit():
                    run_slurm("scancel", number)
                raise

    def tell(self, number: str) -> str:
        """Say how to watch and how to end the job."""
        return "\n".join(
            [
                f"job {number} is submitted.",
                f"  squeue --job {number}  # its state",
                f"  tail -F {shlex.quote(str(self.log(number)))}  # what it says",
                f"  scancel {number}  # saves a checkpoint and ends it",
            ]
        )


def allocated_nodes() -> list[str]:
    """Return the names of the nodes of the allocation in which this process is.

    Raises:
        LaunchError: Slurm does not tell them.
    """
    return run_slurm("scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")).split()


def start_slurm(*command: str, stdout: int = subprocess.PIPE) -> "subprocess.Popen[str]":
    """Start one of Slurm's commands.

    Raises:
        LaunchError: it is not installed.
    """
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True
        )
    except FileNotFoundError:
        raise _missing(command[0]) from None


def run_slurm(*command: str) -> str:
    """Run one of Slurm's commands; return what it says.

    Raises:
        LaunchError: it is not installed, or fails.
    """
    process = start_slurm(*command)
    said, errors = process.communicate()
    if process.returncode:
        raise _refused(command[0], errors)
    return said


def _missing(program: str) -> LaunchError:
    return LaunchError(
        f"{program} is not installed on this machine. Start the run where Slurm's commands are, or choose "
        "another distributed.launcher."
    )


def _refused(program: str, errors: str) -> LaunchError:
    return LaunchError(f"{program} failed: {errors.strip() or 'it gave no reason.'}")
