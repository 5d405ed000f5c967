"""The configuration of a run: a tree of frozen dataclasses whose field names are the keys of the file."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from lanewise.config.check import Above, AtLeast, Below, PathLike, Section, expand_user

Reducer = Literal["ddp", "fsdp", "single", "data_parallel", "balanced_data_parallel"]
Equality = Literal["close", "exact"]
DeviceType = Literal["auto", "cpu", "cuda"]
PrecisionName = Literal["float32", "tf32", "bf16", "fp16"]
Mode = Literal["max", "min"]
Backend = Literal["auto", "gloo", "nccl"]

MAY_DIFFER = ("lanes", "dataset", "seed", "max_grad_norm", "ema_decay")
"""What may differ on resume from what the checkpoint is of, if the user says so; the rest never may."""


@dataclass(frozen=True, kw_only=True)
class ClassConfig(Section):
    """An object to build: its class and its constructor's arguments."""

    class_path: str
    """The class, as `module.Class`."""
    init_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the constructor by name; those that only the running program knows are left out."""


def _global_batch_is_whole_micro_batches(global_batch_size: int, micro_batch_size: int) -> str | None:
    rest = global_batch_size % micro_batch_size
    if rest == 0:
        return None
    multiples = {global_batch_size - rest, global_batch_size - rest + micro_batch_size} - {0}
    nearest_first = sorted(multiples, key=lambda size: abs(size - global_batch_size))
    return (
        f"batch.global_batch_size must be a multiple of batch.micro_batch_size: "
        f"got {global_batch_size} and {micro_batch_size}. "
        f"Use global_batch_size={' or '.join(map(str, nearest_first))}, or another micro_batch_size."
    )


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Section):
    """How many samples a step and a lane see; together they fix the number of lanes."""

    RULES = (_global_batch_is_whole_micro_batches,)

    global_batch_size: Annotated[int, AtLeast(1)]
    """Samples of one optimizer step, over all lanes."""
    micro_batch_size: Annotated[int, AtLeast(1)]
    """Samples of one lane's forward."""

    @property
    def num_lanes(self) -> int:
        """The number of lanes of the run, on any number of devices."""
        return self.global_batch_size // self.micro_batch_size


def _some_end_is_given(epochs: int | None, max_steps: int | None) -> str | None:
    if epochs is not None or max_steps is not None:
        return None
    return (
        "train.epochs or train.max_steps must be given: got null for both. "
        "Set one, or both: whichever comes first ends the run."
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """How long to train, from which seed, and where the results go."""

    RULES = (_some_end_is_given,)

    run_dir: Annotated[str, PathLike()]
    """Folder that the run writes into, relative to the working directory; ~ is the user's folder."""
    epochs: Annotated[int, AtLeast(1)] | None = None
    """Passes over the training data after which the run ends; unset: no limit."""
    max_steps: Annotated[int, AtLeast(1)] | None = None
    """Optimizer steps after which the run ends; unset: no limit."""
    seed: Annotated[int, AtLeast(0), Below(2**63)] = 0
    """Seed of the weights, the sample order and every lane's random numbers."""
    max_grad_norm: Annotated[float, Above(0)] | None = None
    """Largest L2 norm of the whole gradient, which is scaled down beyond it; unset: no clipping."""
    warmup_steps: Annotated[int, AtLeast(1)] | None = None
    """Steps over which the learning rate rises linearly to its value; the scheduler begins after them."""
    ema_decay: Annotated[float, Above(0), Below(1)] | None = None
    """Keep an exponential moving average of the weights, which is what gets evaluated; unset: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "run_dir", expand_user(self.run_dir))


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """How samples are ordered and loaded."""

    num_workers: Annotated[int, AtLeast(0)] = 0
    """Loader processes of each device; 0: samples are loaded in the training process."""
    shuffle: bool = True
    """Whether each epoch has an order of its own."""
    drop_last: bool = False
    """Whether to drop the partial last step of an epoch instead of weighting it."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Section):
    """When the task's eval datasets are evaluated, besides at the end, and which model is the best."""

    every_epochs: Annotated[int, AtLeast(1)] = 1
    """Epochs from one evaluation to the next."""
    every_steps: Annotated[int, AtLeast(1)] | None = None
    """Optimizer steps from one evaluation to the next, instead of epochs."""
    best: str | None = None
    """Metric by which the best model is kept, as `set/metric`; unset: only the last model is kept."""
    best_mode: Mode = "max"
    """Whether more of that metric is better, or less."""


@dataclass(frozen=True, kw_only=True)
class EveryConfig(Section):
    """How often; several together mean whichever comes first."""

    steps: Annotated[int, AtLeast(1)] | None = None
    """Optimizer steps from one to the next."""
    epochs: Annotated[int, AtLeast(1)] | None = None
    """Epochs from one to the next."""
    seconds: Annotated[float, Above(0)] | None = None
    """Seconds from one to the next, by the clock of rank 0."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """When the state of the run is saved, besides at its end, and how many checkpoints are kept."""

    every: EveryConfig = field(default_factory=lambda: EveryConfig(seconds=600.0))
    """How often to save; every ten minutes by default."""
    keep_last: Annotated[int, AtLeast(1)] = 2
    """How many of the newest checkpoints are kept."""
    keep_best: Annotated[int, AtLeast(0)] = 0
    """How many are kept besides, of those with the best value of evaluate.best."""
    preempt_seconds: Annotated[float, Above(0)] = 60.0
    """How long a save may take after SIGTERM or SIGUSR1."""


Devices = Annotated[int, AtLeast(1)] | tuple[str, ...]


def _count(devices: Devices) -> int:
    return devices if isinstance(devices, int) else len(devices)


def _device_names_are_of_one_kind(
    devices: Devices | None, device_type: DeviceType, backend: Backend
) -> str | None:
    if devices is None or isinstance(devices, int):
        return None
    listed = ", ".join(devices)
    kinds = {name.partition(":")[0] for name in devices}
    if (
        not devices
        or not all(re.fullmatch(r"cpu|cuda:(0|[1-9]\d*)", name) for name in devices)
        or len(kinds) > 1
    ):
        return (
            f"distributed.devices must be a number, or a list of GPUs, or of cpu: got [{listed}]. "
            "Write [cuda:0, cuda:1], or [cpu, cpu]."
        )
    if device_type != "auto" and {device_type} != kinds:
        return (
            f"distributed.device_type contradicts distributed.devices: got {device_type} and [{listed}]. "
            "Leave device_type out."
        )
    if backend == "nccl" and len(set(devices)) < len(devices):
        return (
            f"distributed.backend nccl needs a GPU for each process: got [{listed}]. "
            "Use distributed.backend=gloo, or other devices."
        )
    return None


def _single_reduces_one_device(devices: Devices | None, reducer: Reducer) -> str | None:
    if reducer != "single" or devices is None or _count(devices) == 1:
        return None
    return (
        f"distributed.reducer single needs distributed.devices 1: got {_count(devices)} devices. "
        f"Use distributed.reducer=ddp, or distributed.devices=1."
    )


def _nccl_runs_on_gpus(devices: Devices | None, device_type: DeviceType, backend: Backend) -> str | None:
    is_on_cpu = device_type == "cpu" or (isinstance(devices, tuple) and "cpu" in devices)
    if backend != "nccl" or not is_on_cpu:
        return None
    return (
        "distributed.backend nccl needs GPUs: got processes on the CPU. "
        "Use distributed.backend=gloo, or distributed.device_type=cuda."
    )


@dataclass(frozen=True, kw_only=True)
class FSDPConfig(Section):
    """How the reducer fsdp shards the model; the others don't look at it."""

    blocks: tuple[str, ...] = ()
    """Classes of the modules that are gathered one at a time, by name, such as [Block]; none: those that a
    list of modules repeats."""
    param_dtype: Literal["float32", "bf16"] = "float32"
    """Format in which weights travel and are held while a block runs; bf16 needs precision bf16."""
    cpu_offload: bool = False
    """Whether weights, gradients and the optimizer's state are kept in host memory between the blocks."""


def _fsdp_shares_among_processes(devices: Devices | None, reducer: Reducer) -> str | None:
    if reducer != "fsdp" or devices is None or _count(devices) > 1:
        return None
    return (
        "distributed.reducer fsdp shares the weights among processes: got distributed.devices 1. "
        "Use more devices, or distributed.reducer=single."
    )


def _exact_shards_are_plain(reducer: Reducer, equality: Equality, fsdp: FSDPConfig) -> str | None:
    if reducer != "fsdp" or equality != "exact":
        return None
    if fsdp.param_dtype != "float32":
        return (
            "distributed.fsdp.param_dtype rounds weights as no other reducer does, so it cannot be exact: "
            f"got {fsdp.param_dtype} and distributed.equality exact. "
            "Use param_dtype=float32, or distributed.equality=close."
        )
    if fsdp.cpu_offload:
        return (
            "distributed.fsdp.cpu_offload cannot be exact: got true and distributed.equality exact. "
            "Use cpu_offload=false, or distributed.equality=close."
        )
    return None


def _offloads_from_gpus(reducer: Reducer, device_type: DeviceType, fsdp: FSDPConfig) -> str | None:
    if reducer != "fsdp" or device_type != "cpu" or not fsdp.cpu_offload:
        return None
    return (
        "distributed.fsdp.cpu_offload needs GPUs: got true and distributed.device_type cpu, "
        "where everything is in host memory. Leave it out."
    )


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(Section):
    """Which devices carry the lanes, and how gradients are reduced; the model does not depend on it."""

    RULES = (
        _device_names_are_of_one_kind,
        _single_reduces_one_device,
        _nccl_runs_on_gpus,
        _fsdp_shares_among_processes,
        _exact_shards_are_plain,
        _offloads_from_gpus,
    )

    devices: Devices | None = None
    """Devices of each machine, as a number or as a list such as [cuda:0, cuda:0]; each has a process, but for
    data_parallel and balanced_data_parallel; unset: one, or what the joined world has."""
    reducer: Reducer = "ddp"
    """How lane gradients become one."""
    equality: Equality = "close"
    """What stays the same on another number of devices: all but rounding (close), or every byte (exact)."""
    device_type: DeviceType = "auto"
    """Where to train; auto: on GPUs if there are any."""
    backend: Backend = "auto"
    """Library of the collectives; auto: nccl on GPUs, gloo on CPUs."""
    threads: Annotated[int, AtLeast(1)] = 1
    """Intra-op CPU threads of each process; never derived, since it changes the order of float additions."""
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """How the reducer fsdp shards the model."""
    max_restarts: Annotated[int, AtLeast(0)] = 0
    """How often the processes are started again when one fails; they go on from the newest checkpoint."""

    @property
    def num_devices(self) -> int | None:
        """Devices of each machine; None where `devices` is unset."""
        return None if self.devices is None else _count(self.devices)

    @property
    def is_one_process(self) -> bool:
        """Whether one process drives all devices."""
        return self.reducer in ("data_parallel", "balanced_data_parallel")

    @property
    def num_processes(self) -> int | None:
        """Processes of each machine; None where `devices` is unset and each has one."""
        return 1 if self.is_one_process else self.num_devices

    @property
    def device_names(self) -> tuple[str, ...]:
        """The device of each process, where they were named; else empty."""
        return self.devices if isinstance(self.devices, tuple) else ()


def _best_checkpoints_have_a_metric(checkpoint: CheckpointConfig, evaluate: EvaluateConfig) -> str | None:
    if not checkpoint.keep_best or evaluate.best is not None:
        return None
    return (
        f"checkpoint.keep_best needs a metric to compare by: got {checkpoint.keep_best} and evaluate.best "
        "unset. Set evaluate.best, for example to held_out/loss."
    )


def _every_device_has_a_lane(batch: BatchConfig, distributed: DistributedConfig) -> str | None:
    num_devices = distributed.num_devices
    if num_devices is None or num_devices <= batch.num_lanes:
        return None
    return (
        f"distributed.devices must be at most the number of lanes, as each device needs at least one lane: "
        f"got {num_devices} devices and {batch.num_lanes} lanes (batch.global_batch_size "
        f"{batch.global_batch_size} / batch.micro_batch_size {batch.micro_batch_size}). "
        f"Use distributed.devices={batch.num_lanes}, or a smaller micro_batch_size."
    )


def _weights_travel_as_they_are_used(distributed: DistributedConfig, precision: PrecisionName) -> str | None:
    dtype = distributed.fsdp.param_dtype
    if distributed.reducer != "fsdp" or dtype in ("float32", precision):
        return None
    return (
        f"distributed.fsdp.param_dtype {dtype} needs precision {dtype}: got precision {precision}. "
        f"Use precision={dtype}, or param_dtype=float32."
    )


def _shards_are_updated_as_whole_tensors(
    distributed: DistributedConfig, optimizer: ClassConfig
) -> str | None:
    if (
        distributed.reducer != "fsdp"
        or distributed.equality != "exact"
        or not optimizer.init_args.get("fused")
    ):
        return None
    return (
        "optimizer.init_args.fused cannot be exact with distributed.reducer fsdp: got true. "
        "torch's fused SGD, for one, rounds the last elements of a tensor otherwise, and a shard ends "
        "elsewhere. Leave fused out, or use distributed.equality=close."
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Everything that a run was asked for."""

    RULES = (
        _every_device_has_a_lane,
        _best_checkpoints_have_a_metric,
        _weights_travel_as_they_are_used,
        _shards_are_updated_as_whole_tensors,
    )

    task: ClassConfig
    """The user's Task."""
    batch: BatchConfig
    """Batch sizes, and with them the lanes."""
    train: TrainConfig
    """Length, seed and folder of the run."""
    optimizer: ClassConfig
    """The optimizer; its parameters are given at run time."""
    scheduler: ClassConfig | None = None
    """The learning-rate scheduler; its optimizer is given at run time; unset: a constant learning rate."""
    precision: PrecisionName = "float32"
    """Number format of forward and loss; weights and gradients are float32."""
    data: DataConfig = field(default_factory=DataConfig)
    """Order and loading of the samples."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    """Evaluation during training."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints, from which a run goes on."""
    callbacks: tuple[ClassConfig, ...] = ()
    """What observes the run on rank 0, besides the progress bar, metrics.jsonl and TensorBoard's events."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """Devices and reduction."""
    search_path: Annotated[str, PathLike()] | None = None
    """Folder that class_path modules are imported from first; load_config makes it absolute, and takes the
    folder of the configuration file if it is unset."""
