"""Names what a speed depends on: the machine, the versions, and what a step trains."""

import os
import platform
import re
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lanewise.config import RunConfig
from lanewise.processes.device.accelerator import device_name
from lanewise.processes.device.choice import accelerator_type, count_accelerators


def describe_machine() -> dict[str, Any]:
    """Return the processor, its cores and the accelerators."""
    processor = platform.processor() or platform.machine()
    with suppress(OSError):
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        processor = found[1] if found else processor
    kind = accelerator_type()
    devices = [device_name(torch.device(f"{kind}:{index}")) for index in range(count_accelerators())]
    return {"processor": processor, "cores": os.cpu_count(), "accelerators": devices}


def describe_work(config: RunConfig) -> dict[str, Any]:
    """Return what a step trains, as far as another value makes it another step."""
    return {
        "task": config.task.class_path,
        **asdict(config.batch),
        "precision": config.precision,
        "threads": config.distributed.threads,
    }


def describe_versions() -> dict[str, str]:
    """Return those of this library, of torch and of Python."""
    return {name: version(name) for name in ("lanewise", "torch")} | {"python": platform.python_version()}
