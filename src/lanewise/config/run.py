"""The configuration of a run: a tree of frozen dataclasses whose field names are the keys of the file."""

import re
from collections.abc import Iterator
from dataclasses import field
from pathlib import PurePath
from typing import Annotated, ClassVar, Literal

from lanewise.config.better import Mode
from lanewise.config.check import A_PATH, Section, above, at_least, below, expand_user
from lanewise.config.class_path import ClassConfig
from lanewise.config.data import DataConfig
from lanewise.config.distributed import DistributedConfig
from lanewise.config.init_from import InitFromConfig
from lanewise.config.memory import CompileConfig, MemoryConfig
from lanewise.config.optimizer import OptimizerConfig
from lanewise.config.scheduler import SchedulerConfig

PrecisionName = Literal["float32", "tf32", "bf16", "fp16"]
PLACEHOLDERS = ("{time}", "{number}")
"""What `train.run_dir` may contain."""

MAY_DIFFER = ("lanes", "dataset", "seed", "num_steps", "max_grad_norm", "ema_decay", "optimizer")
"""What the user may allow to differ from the checkpoint on resume; nothing else may differ."""


def _global_batch_is_whole_micro_batches(global_batch_size: int, micro_batch_size: int) -> Iterator[str]:
    if rest := global_batch_size % micro_batch_size:
        multiples = {global_batch_size - rest, global_batch_size - rest + micro_batch_size} - {0}
        nearest_first = sorted(multiples, key=lambda size: abs(size - global_batch_size))
        yield (
            f"batch.global_batch_size must be a multiple of batch.micro_batch_size: "
            f"got {global_batch_size} and {micro_batch_size}. "
            f"Use global_batch_size={' or '.join(map(str, nearest_first))}, or another micro_batch_size."
        )


class BatchConfig(Section):
    """How many samples a step and a lane see; together they fix the number of lanes."""

    RULES = (_global_batch_is_whole_micro_batches,)
    GONE: ClassVar = {
        "micro_batch_size": (
            "auto",
            "Write the number that `lanewise plan CONFIG --largest-micro-batch` prints.",
        )
    }

    global_batch_size: Annotated[int, at_least(1)]
    """Samples of one optimizer step, over all lanes."""
    micro_batch_size: Annotated[int, at_least(1)]
    """Samples of one lane's forward, on which the model depends. `lanewise plan CONFIG --largest-micro-batch`
    finds the largest that fits."""

    @property
    def num_lanes(self) -> int:
        """The number of lanes of the run, on any number of devices."""
        return self.global_batch_size // self.micro_batch_size

    def describe_lanes(self) -> str:
        """Say how many lanes there are, and why."""
        return (
            f"{self.num_lanes} lanes (batch.global_batch_size {self.global_batch_size} / "
            f"batch.micro_batch_size {self.micro_batch_size})"
        )


def _some_end_is_given(epochs: int | None, max_steps: int | None) -> Iterator[str]:
    if epochs is None and max_steps is None:
        yield (
            "train.epochs or train.max_steps must be given: got null for both. "
            "Set one, or both: whichever comes first ends the run."
        )


def _placeholders_are_known(run_dir: str) -> Iterator[str]:
    given = re.findall(r"\{[^{}]*\}", run_dir)
    if len(given) > 1 or not all(name in PLACEHOLDERS and name in PurePath(run_dir).name for name in given):
        yield (
            f"train.run_dir may have {' or '.join(PLACEHOLDERS)} in its last part, once: got {run_dir}. "
            "Write one of them there, or a path without braces."
        )


def _profiled_steps_are_a_range(profile_steps: tuple[int, ...]) -> Iterator[str]:
    if profile_steps and (len(profile_steps) != 2 or profile_steps[0] > profile_steps[1]):
        yield (
            f"train.profile_steps must be the first and the last step to profile: got {list(profile_steps)}. "
            "Write [10, 15]."
        )


class TrainConfig(Section):
    """How long to train, from which seed, and where the results go."""

    RULES = (_some_end_is_given, _placeholders_are_known, _profiled_steps_are_a_range)
    MOVED: ClassVar = {"warmup_steps": "scheduler.warmup"}

    run_dir: Annotated[str, A_PATH]
    """Folder that the run writes into, relative to the working directory; ~ is the user's folder. In its
    name {time} stands for the time at which the run begins, and {number} for the next number: each run then
    has a folder of its own, and --resume takes the newest one."""
    epochs: Annotated[int, at_least(1)] | None = None
    """Passes over the training data after which the run ends; unset: no limit."""
    max_steps: Annotated[int, at_least(1)] | None = None
    """Optimizer steps after which the run ends; unset: no limit."""
    seed: Annotated[int, at_least(0), below(2**63)] = 0
    """Seed of the weights, the sample order and every lane's random numbers."""
    init_from: InitFromConfig | None = None
    """Weights with which the run begins: a file, or another run. A run that goes on takes those of its
    checkpoint. Unset: those that build_model returns."""
    max_grad_norm: Annotated[float, above(0)] | None = None
    """Largest L2 norm of the whole gradient, which is scaled down beyond it; unset: no clipping."""
    ema_decay: Annotated[float, above(0), below(1)] | None = None
    """Keep an exponential moving average of the weights, which is what gets evaluated; unset: none."""
    profile_steps: tuple[Annotated[int, at_least(1)], ...] = ()
    """The first and the last step, such as [10, 15], that torch's profiler records on every rank: a trace for
    Perfetto and a table of the most expensive operators, in run_dir/profile. Unset: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "run_dir", expand_user(self.run_dir))


ConsoleName = Literal["bar", "json"]


class LogConfig(Section):
    """How often metrics are written and shown, besides after the first step and the last one."""

    every_steps: Annotated[int, at_least(1)] = 10
    """Optimizer steps from one line to the next; progress is shown as often, so set 1 for slow steps."""
    console: ConsoleName = "bar"
    """What the console shows: a bar, without a terminal a line now and then; or each line of metrics as JSON,
    on the standard output."""
    gradients: bool = False
    """Whether a line has the norm of each parameter's gradient, before clipping."""
    flops_per_sample: Annotated[float, above(0)] | None = None
    """Floating-point operations of forward and backward for a sample, which `lanewise plan` counts: a line
    then has what a device computes in a second, and how much of its peak that is. Unset: neither."""


class EarlyStoppingConfig(Section):
    """When a run ends before its last step, since evaluations no longer find anything better."""

    metric: str
    """Metric that is followed, as `set/metric`, or `train/loss_epoch`; see evaluate.best."""
    mode: Mode | None = None
    """Whether more of that metric is better, or less; unset: as of evaluate.best_mode."""
    patience: Annotated[int, at_least(1)]
    """How many evaluations one after the other may find nothing better; the last of them ends the run."""
    min_delta: Annotated[float, at_least(0)] = 0.0
    """A value counts as better if it is better than the best one before it by more than this."""


class EvaluateConfig(Section):
    """When the task's eval datasets are evaluated, besides at the end, and which model is the best."""

    every_epochs: Annotated[int, at_least(1)] = 1
    """Epochs from one evaluation to the next."""
    every_steps: Annotated[int, at_least(1)] | None = None
    """Optimizer steps from one evaluation to the next, instead of epochs."""
    best: str | None = None
    """Metric by which the best model is kept, as `set/metric`; or `train/loss_epoch`, the mean loss of the
    training since the last evaluation. Unset: only the last model is kept."""
    best_mode: Mode | None = None
    """Whether more of that metric is better, or less; unset: what its higher_is_better says, or a name that
    ends in a known loss, error or score. Where neither tells, it must be given."""
    early_stopping: EarlyStoppingConfig | None = None
    """Ends the run when a metric no longer gets better; unset: the run goes on to its end."""


class EveryConfig(Section):
    """How often; several together mean whichever comes first."""

    steps: Annotated[int, at_least(1)] | None = None
    """Optimizer steps from one to the next."""
    epochs: Annotated[int, at_least(1)] | None = None
    """Epochs from one to the next."""
    seconds: Annotated[float, above(0)] | None = None
    """Seconds from one to the next, by the clock of rank 0."""


class CheckpointConfig(Section):
    """When the state of the run is saved, besides at its end, and how many checkpoints are kept."""

    every: EveryConfig = field(default_factory=lambda: EveryConfig(seconds=600.0))
    """How often to save; every ten minutes by default."""
    keep_last: Annotated[int, at_least(1)] = 2
    """How many of the newest checkpoints are kept."""
    keep_best: Annotated[int, at_least(0)] = 0
    """How many are kept besides, of those with the best value of evaluate.best."""
    preempt_seconds: Annotated[float, above(0)] = 60.0
    """How long a save may take after SIGTERM, SIGUSR1 or SIGUSR2."""


def _best_checkpoints_have_a_metric(checkpoint: CheckpointConfig, evaluate: EvaluateConfig) -> Iterator[str]:
    if checkpoint.keep_best and evaluate.best is None:
        yield (
            f"checkpoint.keep_best needs a metric to compare by: got {checkpoint.keep_best} and "
            "evaluate.best unset. Set evaluate.best, for example to held_out/loss."
        )


def _every_device_has_a_lane(batch: BatchConfig, distributed: DistributedConfig) -> Iterator[str]:
    # Hosts such as gpu1:4 say themselves how many devices they have.
    num_hosts = distributed.nodes or sum(":" not in host for host in distributed.hosts) or 1
    of_host = distributed.num_devices or 1
    if num_hosts * of_host > batch.num_lanes:
        yield (
            f"each device needs at least one lane: got {f'{num_hosts} hosts x ' * (num_hosts > 1)}{of_host} "
            f"devices and {batch.describe_lanes()}. Use at most {batch.num_lanes} devices"
            f"{' in all' * (num_hosts > 1)}, a larger global_batch_size or a smaller micro_batch_size."
        )


def _weights_travel_as_they_are_used(
    distributed: DistributedConfig, precision: PrecisionName
) -> Iterator[str]:
    dtype = distributed.fsdp.param_dtype
    if distributed.kind.shards_weights and dtype not in ("float32", precision):
        yield (
            f"distributed.fsdp.param_dtype {dtype} needs precision {dtype}: got precision {precision}. "
            f"Use precision={dtype}, or param_dtype=float32."
        )


def _whole_models_have_no_blocks(
    memory: MemoryConfig,
    compile: CompileConfig | None,  # noqa: A002
    distributed: DistributedConfig,
) -> Iterator[str]:
    if compile is None or compile.blocks == "auto":
        return
    if memory.activation_checkpointing is not None:
        yield (
            "memory.activation_checkpointing runs blocks again, and compile.blocks whole leaves none: got "
            "both. Use compile.blocks=auto."
        )
    if distributed.kind.shards_weights:
        yield (
            "distributed.reducer fsdp gathers weights between the blocks, and compile.blocks whole compiles "
            "them into one function: got both. Use compile.blocks=auto, or distributed.reducer=ddp."
        )


def _inputs_are_offloaded_from_accelerators(
    memory: MemoryConfig, distributed: DistributedConfig
) -> Iterator[str]:
    checkpointing = memory.activation_checkpointing
    if checkpointing is not None and checkpointing.offload and distributed.device_type == "cpu":
        yield (
            "memory.activation_checkpointing.offload needs an accelerator: got true and "
            "distributed.device_type cpu, where everything is in host memory. Leave it out."
        )


def _processes_run_equally_many_lanes(
    batch: BatchConfig, data: DataConfig, distributed: DistributedConfig
) -> Iterator[str]:
    if not distributed.sync_batch_norm:
        return
    if batch.num_lanes % (distributed.num_devices or 1):
        yield (
            f"distributed.sync_batch_norm needs as many lanes on each device: got {batch.describe_lanes()} "
            f"and distributed.devices {distributed.num_devices}. Use a number of devices that divides the "
            "lanes."
        )
    elif not data.drop_last:
        yield (
            "distributed.sync_batch_norm needs as many lanes on each device in every step, which the partial "
            "last one of an epoch may not have: got data.drop_last false. Use data.drop_last=true."
        )


class IntegrityConfig(Section):
    """Whether silent errors of devices and memory are looked for; docs/failure.md says which are found."""

    digest_every_steps: Annotated[int, at_least(1)] | None = None
    """Optimizer steps from one line of metrics.jsonl with digests of the state to the next; each checkpoint
    has them too. What several processes hold alike is compared. Unset: never."""


class RunConfig(Section):
    """Everything that a run was asked for."""

    RULES = (
        _every_device_has_a_lane,
        _best_checkpoints_have_a_metric,
        _weights_travel_as_they_are_used,
        _whole_models_have_no_blocks,
        _inputs_are_offloaded_from_accelerators,
        _processes_run_equally_many_lanes,
    )

    ELSEWHERE: ClassVar = {
        **dict.fromkeys(("lr", "learning_rate"), "optimizer.init_args.lr"),
        **dict.fromkeys(
            ("gpus", "num_gpus", "cuda_device", "cuda_devices", "nproc_per_node", "nproc-per-node"),
            "distributed.devices",
        ),
    }

    task: ClassConfig
    """The user's Task."""
    batch: BatchConfig
    """Batch sizes, and with them the lanes."""
    train: TrainConfig
    """Length, seed and folder of the run."""
    optimizer: OptimizerConfig
    """What updates the parameters."""
    scheduler: SchedulerConfig | None = None
    """How the learning rate changes; unset: not at all."""
    precision: PrecisionName = "float32"
    """Number format of forward and loss; weights and gradients keep that of the model's parameters."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """What is traded for memory."""
    compile: CompileConfig | None = None
    """What torch.compile makes faster; unset: nothing. It may be `auto` or `whole` alone."""
    data: DataConfig = field(default_factory=DataConfig)
    """Order and loading of the samples."""
    log: LogConfig = field(default_factory=LogConfig)
    """Metrics and progress."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    """Evaluation during training."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints, from which a run goes on."""
    integrity: IntegrityConfig = field(default_factory=IntegrityConfig)
    """Digests of the state, which tell of silent errors."""
    callbacks: tuple[ClassConfig, ...] = ()
    """What observes the run on rank 0, besides the progress bar, metrics.jsonl and TensorBoard's events."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """Devices and reduction."""
    search_path: Annotated[str, A_PATH] | None = None
    """Folder that class_path modules are imported from first, relative to the folder of the configuration
    file, on the command line to the working directory; unset: the folder of the configuration file."""
