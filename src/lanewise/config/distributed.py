"""The section `distributed`: which devices carry the lanes, how gradients are reduced, and what must hold."""

import re
from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, ClassVar, Literal

from lanewise.config.check import A_PATH, Section, above, at_least
from lanewise.config.launchers import (
    LAUNCHERS_WITH_NODES,
    KubernetesConfig,
    LauncherName,
    SlurmConfig,
    SSHConfig,
    mistakes_of_hosts,
)
from lanewise.config.reducers import ALONE, DEFAULT_REDUCER, REDUCERS, ReducerKind, ReducerName

Equality = Literal["close", "exact"]
CompressionName = Literal["bf16", "fp16"]
Backend = Literal["auto", "gloo", "nccl"]
Devices = Annotated[int, at_least(1)] | tuple[Annotated[int, at_least(0)] | str, ...]


# The types of accelerators are torch's, which is not loaded here; they are looked up later.
_TYPE = r"[a-z][a-z0-9_]*"


class FSDPConfig(Section):
    """How the reducer fsdp shards the model; other reducers ignore it."""

    blocks: tuple[str, ...] = ()
    """Which modules are gathered one at a time: names of classes or modules, such as [Block] or [layers.*];
    none: those that a list of modules repeats."""
    param_dtype: Literal["float32", "bf16"] = "float32"
    """Format in which weights travel and are held while a block runs; bf16 needs precision bf16."""
    cpu_offload: bool = False
    """Whether weights, gradients and the optimizer's state are kept in host memory between the blocks."""


def _count(devices: Devices) -> int:
    return devices if isinstance(devices, int) else len(devices)


def _device_type_is_one_word(device_type: str) -> Iterator[str]:
    if not re.fullmatch(_TYPE, device_type):
        yield (
            "distributed.device_type must be auto, cpu, or a type of accelerator such as cuda or mps: got "
            f"{device_type}. To choose among several devices, list them in distributed.devices."
        )


def _devices_are_of_one_type(devices: Devices | None, device_type: str) -> Iterator[str]:
    if devices is None or isinstance(devices, int):
        return
    listed = ", ".join(map(str, devices))
    names = [name for name in devices if isinstance(name, str)]
    types = {device_type if isinstance(name, int) else name.partition(":")[0] for name in devices}
    are_names = all(re.fullmatch(rf"cpu|(?!cpu:){_TYPE}:(0|[1-9]\d{{0,5}})", name) for name in names)
    if not are_names or len(types) != 1:
        yield (
            f"distributed.devices must be a number, or a list of devices of one type: got [{listed}]. "
            "Write [cuda:0, cuda:1], or [cpu, cpu]."
        )
    elif device_type not in ("auto", *types):
        yield (
            f"distributed.device_type contradicts distributed.devices: got {device_type} and [{listed}]. "
            "Leave device_type out."
        )


def _nccl_has_a_gpu_for_each_process(
    devices: Devices | None, device_type: str, backend: Backend
) -> Iterator[str]:
    names = devices if isinstance(devices, tuple) else ()
    if backend == "nccl" and (device_type == "cpu" or "cpu" in names or len(set(names)) < len(names)):
        yield (
            "distributed.backend nccl needs a GPU for each process: "
            f"got [{', '.join(map(str, names)) or 'cpu'}]. "
            "Use distributed.backend=gloo, or other devices."
        )


def _reducer_has_its_devices(
    devices: Devices | None, reducer: ReducerName, launcher: LauncherName
) -> Iterator[str]:
    num_devices = None if devices is None else _count(devices)
    if REDUCERS[reducer].runs_on == "device" and num_devices not in (None, 1):
        yield (
            f"distributed.reducer {reducer} needs distributed.devices 1: got {num_devices} devices. "
            "Use distributed.reducer=ddp, or distributed.devices=1."
        )
    is_alone = num_devices == 1 and launcher == "local"  # else hosts are counted later
    if REDUCERS[reducer].shards_weights and is_alone:
        yield (
            f"distributed.reducer {reducer} shares the weights among processes: got distributed.devices 1. "
            "Use more devices, or distributed.reducer=single."
        )


def _shards_can_do_it(
    reducer: ReducerName, equality: Equality, device_type: str, fsdp: FSDPConfig
) -> Iterator[str]:
    if not REDUCERS[reducer].shards_weights:
        return
    if equality == "exact" and fsdp.param_dtype != "float32":
        yield (
            f"distributed.fsdp.param_dtype {fsdp.param_dtype} rounds weights, so it cannot be exact: got "
            "distributed.equality exact. Use param_dtype=float32, or distributed.equality=close."
        )
    if equality == "exact" and fsdp.cpu_offload:
        yield (
            "distributed.fsdp.cpu_offload cannot be exact: got true and distributed.equality exact. "
            "Use cpu_offload=false, or distributed.equality=close."
        )
    if device_type == "cpu" and fsdp.cpu_offload:
        yield (
            "distributed.fsdp.cpu_offload needs GPUs: got true and distributed.device_type cpu, "
            "where everything is in host memory. Leave it out."
        )


def _reducer_has_options(
    reducer: ReducerName,
    equality: Equality,
    shard_optimizer: bool,
    compression: CompressionName | None,
    sync_batch_norm: bool,
) -> Iterator[str]:
    kind, shards = REDUCERS[reducer], "which shares out the optimizer's state by itself"
    why = shards if kind.shards_weights else "where one process has the optimizer"
    got = {
        "shard_optimizer": f"{reducer}, {why}" if shard_optimizer else "",
        "compression": f"{compression} and {reducer}" if compression else "",
        "sync_batch_norm": reducer if sync_batch_norm else "",
    }
    for name, value in got.items():
        if value and not kind.has_options:
            yield (
                f"distributed.{name} is for distributed.reducer ddp: got {value}. "
                f"Use distributed.reducer=ddp, or leave {name} out."
            )
    if compression and kind.has_options and equality == "exact":
        yield (
            f"distributed.compression rounds what processes send, so it cannot be exact: got {compression} "
            "and distributed.equality exact. Leave compression out, or use distributed.equality=close."
        )
    if sync_batch_norm and kind.has_options and equality == "exact":
        yield (
            "distributed.sync_batch_norm depends on the number of processes, so it cannot be exact: got "
            "distributed.equality exact. Leave sync_batch_norm out: BatchNorm's statistics are merged over "
            "the lanes after each step. Or use distributed.equality=close."
        )


def _launcher_has_its_hosts(
    launcher: LauncherName, hosts: tuple[str, ...], hostfile: str | None, nodes: int | None
) -> Iterator[str]:
    yield from mistakes_of_hosts(hosts)
    if hosts and hostfile is not None:
        yield (
            f"distributed.hosts and distributed.hostfile both name hosts: got [{', '.join(hosts)}] and "
            f"{hostfile}. Leave one out."
        )
    if launcher == "ssh" and not hosts and hostfile is None:
        yield "distributed.launcher ssh needs hosts. Add distributed.hosts: [a, b], or distributed.hostfile."
    if launcher != "ssh" and (hosts or hostfile is not None):
        given = "hostfile" if hostfile is not None else "hosts"
        yield f"distributed.{given} is for distributed.launcher ssh: got {launcher}. Set launcher to ssh."
    if launcher not in LAUNCHERS_WITH_NODES and nodes is not None:
        yield (
            f"distributed.nodes is for distributed.launcher {', '.join(LAUNCHERS_WITH_NODES)}: "
            f"got {launcher}. Set launcher to one of them, or leave nodes out."
        )


def _hosts_may_come_and_go(
    min_nodes: int | None, launcher: LauncherName, sync_batch_norm: bool
) -> Iterator[str]:
    if min_nodes is None:
        return
    if launcher != "ssh":
        yield (
            f"distributed.min_nodes is for distributed.launcher ssh: got {launcher}. Leave it out: torchrun "
            "takes hosts in and lets them go by itself (docs/elastic.md), and Slurm starts a job again on "
            "other nodes with --requeue."
        )
    if sync_batch_norm:
        yield (
            "distributed.sync_batch_norm depends on the number of processes, which changes with "
            f"distributed.min_nodes: got {min_nodes}. Leave one of them out."
        )


def _pods_have_an_image(launcher: LauncherName, kubernetes: KubernetesConfig) -> Iterator[str]:
    if launcher == "kubernetes" and not kubernetes.image:
        yield (
            "distributed.launcher kubernetes needs an image that has lanewise and your code. "
            "Set distributed.kubernetes.image."
        )


class DistributedConfig(Section):
    """Which devices carry the lanes, and how gradients are reduced; the model does not depend on it."""

    RULES = (
        _device_type_is_one_word,
        _devices_are_of_one_type,
        _nccl_has_a_gpu_for_each_process,
        _reducer_has_its_devices,
        _shards_can_do_it,
        _reducer_has_options,
        _launcher_has_its_hosts,
        _hosts_may_come_and_go,
        _pods_have_an_image,
    )

    devices: Devices | None = None
    """Devices of each machine, as a number or as a list such as [cuda:0, cuda:0], or [2, 3] of device_type;
    each has a process, but for data_parallel and balanced_data_parallel; unset: one, or what the joined world
    has."""
    reducer: ReducerName = DEFAULT_REDUCER
    """How lane gradients become one."""
    equality: Equality = "close"
    """What stays the same on another number of devices: all but rounding (close), or every byte (exact)."""
    device_type: str = "auto"
    """Where to train: cpu, or the type of accelerator that torch finds: cuda (ROCm's name too), xpu, mps
    or another; auto: on the accelerator if there is one."""
    backend: Backend = "auto"
    """Library of the collectives; auto: torch's default for the device type, such as nccl for cuda and gloo
    for cpu; gloo where processes share a device."""
    threads: Annotated[int, at_least(1)] = 1
    """Intra-op CPU threads of each process; never derived, since it changes the order of float additions."""
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """How the reducer fsdp shards the model."""
    shard_optimizer: bool = False
    """Whether the reducer ddp shares the optimizer's state out among the processes: each updates some of the
    parameters, and sends them to the others."""
    compression: CompressionName | None = None
    """How the reducer ddp sends gradients in close: rounded to bf16 or fp16; the result is approximate.
    Unset: as they are."""
    sync_batch_norm: bool = False
    """Whether BatchNorm normalises over the lanes that processes run at once, as torch's SyncBatchNorm does.
    Results depend on the number of devices. Needs reducer ddp in close, accelerators, and data.drop_last."""
    max_restarts: Annotated[int, at_least(0)] = 0
    """How often the processes are started again when one fails; they go on from the newest checkpoint."""
    stall_seconds: Annotated[float, above(0)] | None = 300.0
    """After how many seconds without progress of any process the run ends, with a report of who waits for
    whom; a lane, a micro-batch of an evaluation and a saved file are progress. Unset: never."""
    start_seconds: Annotated[float, above(0)] | None = 1800.0
    """The same until the first step has ended: data may be prepared, and the model compiled. Unset: never."""

    OF_LAUNCHERS: ClassVar = (
        *("launcher", "hosts", "hostfile", "nodes", "min_nodes", "host_seconds"),
        *("ssh", "slurm", "kubernetes"),
    )
    """The keys that say something to launchers alone, and nothing in the processes that these start."""

    launcher: LauncherName = "local"
    """What starts the processes: local, on this machine; ssh, on `hosts`; slurm, a batch job; ray, a cluster
    that runs; kubernetes, of which --dry-run prints the manifests. In a world that torchrun, srun or mpirun
    prepared the processes are there, and this key changes nothing."""
    hosts: tuple[str, ...] = ()
    """With the launcher ssh: the hosts, each with its number of devices if `devices` does not say it, as in
    [gpu1, me@gpu2:4]; rank 0 is on the first."""
    hostfile: Annotated[str, A_PATH] | None = None
    """A file that lists them instead, one on each line: gpu1 slots=4, or gpu1:4."""
    nodes: Annotated[int, at_least(1)] | None = None
    """With the launchers slurm, ray and kubernetes: the number of hosts; unset: one."""
    min_nodes: Annotated[int, at_least(1)] | None = None
    """With the launcher ssh: the fewest hosts with which a run goes on where others are lost, drained or left
    out. Unset: it waits for all of them."""
    host_seconds: Annotated[float, above(0)] = 30.0
    """With `min_nodes`: after how many seconds without a word a host is lost."""
    ssh: SSHConfig = field(default_factory=SSHConfig)
    """What the launcher ssh uses on each host."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    """What the launcher slurm asks sbatch for."""
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    """What the manifests of the launcher kubernetes say of the pods."""

    def on_this_machine(self) -> "DistributedConfig":
        """Return the same without what is for a launcher."""
        kept = {key: value for key, value in vars(self).items() if key not in self.OF_LAUNCHERS}
        return DistributedConfig(**kept)

    @property
    def lost_seconds(self) -> float | None:
        """After how long without a word a host is lost; None: never."""
        return self.stall_seconds if self.min_nodes is None else self.host_seconds

    @property
    def collective_seconds(self) -> float | None:
        """How long a collective may take; None: for ever.

        That is longer than the run may make no progress: it is the watch that ends the run, as it names the
        rank for which the others wait.
        """
        if self.stall_seconds is None or self.start_seconds is None:
            return None
        return max(self.stall_seconds, self.start_seconds) + 60

    @property
    def num_devices(self) -> int | None:
        """Devices of each machine; None where `devices` is unset."""
        return None if self.devices is None else _count(self.devices)

    @property
    def kind(self) -> ReducerKind:
        """What the reducer says of itself."""
        return REDUCERS[self.reducer]

    @property
    def reducer_of_several(self) -> ReducerName:
        """The reducer on several devices: this one, or the default in place of that of a single device."""
        return DEFAULT_REDUCER if self.reducer == ALONE else self.reducer

    @property
    def is_one_process(self) -> bool:
        """Whether one process drives all devices."""
        return self.kind.runs_on == "process"

    @property
    def num_processes(self) -> int | None:
        """Processes of each machine; None where `devices` is unset and each has one."""
        return 1 if self.is_one_process else self.num_devices

    @property
    def device_names(self) -> tuple[str, ...]:
        """The device of each process, where they were listed, such as `cuda:0` or `auto:0`; else empty."""
        listed = self.devices if isinstance(self.devices, tuple) else ()
        return tuple(
            f"{self.device_type}:{device}" if isinstance(device, int) else device for device in listed
        )
