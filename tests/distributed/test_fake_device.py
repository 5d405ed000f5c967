"""Every path of an accelerator, on an emulated one: in `exact` it leaves the bytes of the CPU."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from lanewise.config import DataConfig, DistributedConfig, FSDPConfig, RunConfig
from lanewise.testing import run_distributed
from tests.distributed.tasks import Language, configure, train
from tests.distributed.test_reducers import Whole
from tests.fake_device.build import why_not
from tests.fake_device.device import DEVICE
from tests.fake_device.run import run
from tests.fake_device.tasks import Pictures

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

LAYOUTS = [("single", 1), ("ddp", 2), ("fsdp", 2), ("data_parallel", 2), ("balanced_data_parallel", 2)]
PRECISIONS = ("float32", "bf16", "fp16")


def configured(
    task: type[Any],
    layout: tuple[str, int],
    precision: str = "float32",
    equality: str = "exact",
    device_type: str = DEVICE,
    num_workers: int = 0,
) -> RunConfig:
    reducer, devices = layout
    distributed = DistributedConfig(
        fsdp=FSDPConfig(blocks=("Conv2d",) if task is Pictures else ("TransformerEncoderLayer",)),
        reducer=reducer,  # type: ignore[arg-type]
        devices=devices,
        device_type=device_type,
        equality=equality,  # type: ignore[arg-type]
    )
    config = configure(task, precision=precision, steps=6)  # type: ignore[arg-type]
    return replace(config, distributed=distributed, data=DataConfig(num_workers=num_workers))


@cache
def on_cpu(task: type[Any], precision: str) -> Any:
    (ended,) = run_distributed(train, 1, configured(task, ("single", 1), precision, device_type="cpu"))
    return ended


def on_device(config: RunConfig, order: str = "now") -> Any:
    ended = run(train, config.distributed.num_processes or 1, config, order=order)
    assert all(one.value == ended[0].value for one in ended)
    return ended[0].value


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("task", [Pictures, Language, Whole])
def test_exact_leaves_the_bytes_of_the_cpu(task, layout, precision):
    assert on_device(configured(task, layout, precision)) == on_cpu(task, precision)
