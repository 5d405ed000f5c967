"""Where the processes of a world run: on this machine, or on hosts that a launcher reaches."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from lanewise.config.check import A_PATH, Section, expand_user, show
from lanewise.errors import ConfigError

LauncherName = Literal["local", "ssh", "slurm", "ray", "kubernetes"]
LAUNCHERS_WITH_NODES = ("slurm", "ray", "kubernetes")
"""The launchers that are told a number of hosts; ssh is told their names."""

_HOST = re.compile(r"(?P<name>[^\s:,\[\]-][^\s:,\[\]]*)(?::(?P<slots>[1-9]\d{0,5}))?")
_LINE = re.compile(r"(?P<name>[^\s:]+)(?::(?P<short>\d{1,6})|\s+slots\s*=\s*(?P<slots>\d{1,6}))?\s*")


class Host(NamedTuple):
    """A host, as the user wrote it."""

    name: str
    """As the user would give it to ssh: `gpu1`, `me@gpu1`, or a name of their ~/.ssh/config."""
    num_devices: int | None
    """How many of its devices are used; None: `distributed.devices` says it."""


def _variables_are_text(variables: Mapping[str, object]) -> Iterator[str]:
    for name, value in variables.items():
        if value is not None and not isinstance(value, str):
            yield (
                f"distributed.ssh.variables.{name} must be text, or null for the value here: got "
                f"{show(value)}. Put it in quotes."
            )


class SSHConfig(Section):
    """What the launcher ssh uses on each host."""

    RULES = (_variables_are_text,)

    python: str | None = None
    """The interpreter that has lanewise; unset: the path of the one that runs here."""
    folder: Annotated[str, A_PATH] | None = None
    """The working directory, which holds your code; unset: the path of the one here."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Environment variables of the processes; null: the value here. Their values are never shown."""


class SlurmConfig(Section):
    """What the launcher slurm asks sbatch for."""

    time: str | None = None
    """The time limit, as sbatch's --time takes it: minutes, or 4:00:00; unset: the partition's."""
    partition: str | None = None
    """The partition; unset: Slurm's default."""
    flags: tuple[str, ...] = ()
    """Further options of sbatch, each as one text: [--account=lab, --gres=gpu:8]."""


def _claims_have_paths(claims: Mapping[str, object]) -> Iterator[str]:
    for name, path in claims.items():
        if not isinstance(path, str) or not path.startswith("/"):
            yield (
                f"distributed.kubernetes.claims.{name} must be the path where the pods see it: got "
                f"{show(path)}. Write {name}: /data."
            )


def _resources_are_quantities(resources: Mapping[str, object]) -> Iterator[str]:
    for name, quantity in resources.items():
        if isinstance(quantity, bool) or not isinstance(quantity, int | float | str):
            yield (
                f"distributed.kubernetes.resources.{name} must be a quantity such as 8 or 64Gi: got "
                f"{show(quantity)}."
            )


class KubernetesConfig(Section):
    """What the manifests of the launcher kubernetes say of the pods; edit them for anything else."""

    RULES = (_claims_have_paths, _resources_are_quantities)

    kind: Literal["TrainJob", "JobSet"] = "TrainJob"
    """What runs the pods: a TrainJob of Kubeflow Trainer 2, or a JobSet."""
    image: str | None = None
    """The image, which has lanewise, and your code in its working directory."""
    namespace: str | None = None
    """The namespace; unset: that of kubectl."""
    claims: Mapping[str, Any] = field(default_factory=dict)
    """Persistent volume claims by name, and the path where all pods see each: {shared: /data}."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """What each pod has: {cpu: 16, memory: 64Gi}. Where device_type or devices say cuda, nvidia.com/gpu is
    added for the devices, unless this names an extended resource such as amd.com/gpu itself."""
    secrets: tuple[str, ...] = ()
    """Secrets of the cluster, by name, whose keys are environment variables of the pods."""


def read_hosts(hosts: Sequence[str], hostfile: str | None) -> list[Host]:
    """Return the hosts of `distributed.hosts`, or of the file that `distributed.hostfile` names.

    The file has a host on each line, as DeepSpeed and Open MPI write it (`gpu1 slots=4`), or as `gpu1:4`.

    Raises:
        ConfigError: the file cannot be read, a line is no host, or a host is there twice.
    """
    if hostfile is None:
        found = [
            Host(match["name"], _count(match["slots"])) for match in map(_HOST.fullmatch, hosts) if match
        ]
    else:
        found = list(_read_file(Path(expand_user(hostfile))))
    names = [host.name for host in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(
            f"the hosts of a run must be different: got {', '.join(sorted(twice))} more than once. "
            "Give the number of its devices instead, as in host:4."
        )
    return found


def mistakes_of_hosts(hosts: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with how hosts are written."""
    for host in hosts:
        if not _HOST.fullmatch(host):
            yield f"distributed.hosts must list names such as gpu1, me@gpu1 or gpu1:4: got {show(host)}."


def _count(text: str | None) -> int | None:
    return None if text is None else int(text)


def _read_file(path: Path) -> Iterator[Host]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"distributed.hostfile {os.fspath(path)} cannot be read: {why}.") from None
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        match = _LINE.fullmatch(text)
        slots = match and (match["slots"] or match["short"])
        if text and (match is None or match["name"].startswith("-") or slots == "0"):
            raise ConfigError(f"{path}:{number} must be a host such as 'gpu1 slots=4' or gpu1:4: got {text}.")
        if match:
            yield Host(match["name"], _count(slots))
