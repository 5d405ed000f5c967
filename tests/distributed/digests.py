"""Small runs of which a committed table keeps digests of models and losses: see test_digests.py.

python -m tests.distributed.digests    writes the digests of this kind of machine
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lanewise.config import (
    DistributedConfig,
    OptimizerConfig,
    RunConfig,
    SchedulerConfig,
    pin_environment,
)
from lanewise.processes.device.determinism import onednn_instructions
from lanewise.processes.world.world import World
from lanewise.testing import run_distributed
from tests.distributed import kinds, optimizers
from tests.distributed.contrastive import LOSSES, ByRows, Complex, Contrastive
from tests.distributed.data.test_missing_samples import TASKS as GAPPY
from tests.distributed.data.test_missing_samples import gappy
from tests.distributed.data.test_orders import ORDERS, config_for
from tests.distributed.data.test_streams import streaming
from tests.distributed.engine.test_kinds import RIGHT, own_loop
from tests.distributed.engine.test_several_losses import TwoLosses, Unknown
from tests.distributed.engine.test_state import ByBatch, Queue
from tests.distributed.engine.test_state import ByRows as QueueByRows
from tests.distributed.reduce.test_exact import DrawsInBackward, DrawsLate
from tests.distributed.reduce.test_reducers import NotContiguous, Whole
from tests.distributed.streams import KINDS as STREAMS
from tests.distributed.tasks import Language, Smooth, configure, train

TABLE = Path(__file__).with_suffix(".json")
PRECISIONS: Any = ("float32", "bf16", "fp16")
OWN_LOOPS = (kinds.Plain, kinds.Statistics, kinds.NoiseInBackward, kinds.QueueInLoss)


def _of_tasks() -> Iterable[tuple[str, RunConfig]]:
    for task in (Language, Whole, TwoLosses, Unknown, Contrastive, ByRows):
        for precision in PRECISIONS:
            yield f"{task.__qualname__} {precision}", configure(task, precision=precision)
    for task in (Queue, ByBatch, QueueByRows):
        for precision in PRECISIONS:
            yield f"state {task.__qualname__} {precision}", configure(task, num_lanes=4, precision=precision)
    for task in (Smooth, NotContiguous, DrawsLate, Complex):
        yield task.__qualname__, configure(task)
    yield "DrawsInBackward", configure(DrawsInBackward, first=0)
    for loss in LOSSES:
        yield f"loss {loss}", configure(Contrastive, loss=loss)
    for task in RIGHT:
        yield f"kind {task.__qualname__}", configure(task, num_lanes=4, optimizer="torch.optim.SGD", lr=0.1)
    for task in GAPPY:
        yield f"missing {task.__qualname__}", gappy(task)


def _of_options() -> Iterable[tuple[str, RunConfig]]:
    for number, order in enumerate(ORDERS):
        yield f"order {number}", config_for(order)
    for kind in STREAMS:
        yield f"stream {kind}", streaming(kind=kind)
        yield f"stream {kind} shuffled", streaming(kind=kind, shuffle_buffer=5)
    for name in ("SGD", "Adagrad", "Adam", "RMSprop", "NAdam"):
        yield f"optimizer {name}", configure(Whole, optimizer=f"torch.optim.{name}")
    for optimizer in (optimizers.ScheduleFree, optimizers.Noisy):
        yield f"optimizer {optimizer.__name__}", configure(Whole, optimizer=_path(optimizer))
    for class_path in (_path(optimizers.Sharpness), "torch.optim.LBFGS"):
        closure = OptimizerConfig(class_path=class_path, init_args={"lr": 0.1}, closure=True)
        yield f"closure {class_path}", replace(configure(Language, steps=4), optimizer=closure)
    plain = configure(Whole)
    for name, init_args in {"CosineAnnealingLR": {"T_max": 9}, "StepLR": {"step_size": 2}}.items():
        scheduler = SchedulerConfig(class_path=f"torch.optim.lr_scheduler.{name}", init_args=init_args)
        yield f"scheduler {name}", replace(plain, scheduler=scheduler)
    for name, value in {"seed": 5, "ema_decay": 0.9, "max_grad_norm": None}.items():
        yield f"train {name}", replace(plain, train=replace(plain.train, **{name: value}))
    for num_lanes, micro_batch_size in ((3, 5), (5, 3), (16, 1)):
        name = f"lanes {num_lanes} of {micro_batch_size}"
        yield name, configure(Language, num_lanes=num_lanes, micro_batch_size=micro_batch_size)


def _path(optimizer: type) -> str:
    return f"{optimizer.__module__}.{optimizer.__qualname__}"


def _of_nine_steps(config: RunConfig) -> RunConfig:
    return replace(config, train=replace(config.train, max_steps=9))


RUNS = {
    name: config if name.startswith("closure ") else _of_nine_steps(config)
    for name, config in (*_of_tasks(), *_of_options())
}
NAMES = (*RUNS, *(f"own loop {kind.__qualname__}" for kind in OWN_LOOPS))


def laid_out(config: RunConfig, reducer: Any, num_devices: int) -> RunConfig:
    """Return the same run on other devices."""
    section = DistributedConfig(
        reducer=reducer,
        devices=num_devices,
        device_type="cpu",
        equality="exact",
    )
    return replace(config, distributed=section)


def digests_of(world: World, reducer: str, names: Iterable[str]) -> dict[str, str]:
    """Train each, and return digests of the bytes of models and losses, or of an error its name."""
    found = {}
    own_loops = {f"own loop {kind.__qualname__}": kind for kind in OWN_LOOPS}
    for name in names:
        try:
            if name in RUNS:
                result: Any = train(world, laid_out(RUNS[name], reducer, world.world_size))
            else:
                result = own_loop(world, own_loops[name])
        except Exception as error:  # noqa: BLE001 - the others are trained in any case
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = hashlib.sha256(repr(result).encode()).hexdigest()[:12]
    return found


def machine() -> str:
    """Return what decides how floating point numbers are rounded here."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    amx = ", AMX" if "amx" in onednn_instructions() else ""
    return f"torch {torch.__version__}, {models[:1]}, {torch.backends.cpu.get_cpu_capability()}{amx}"


def remembered() -> Mapping[str, Mapping[str, str]]:
    """Return the digests of each kind of machine."""
    return json.loads(TABLE.read_text())


def main() -> None:
    """Write the digests of one process."""
    pin_environment(threads=1, equality="exact")
    (found,) = run_distributed(digests_of, 1, "single", NAMES, timeout_seconds=600)
    table = {**(remembered() if TABLE.exists() else {}), machine(): found}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
