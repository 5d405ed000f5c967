"""Sets what `exact` needs for a whole process."""

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

import torch

from lanewise.config import Equality
from lanewise.processes.device.accelerator import device_name

_HALF_PRECISION = ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")
"""Instructions by which oneDNN chooses how it computes in bf16 and fp16, whatever torch says of the CPU."""


def set_determinism(equality: Equality, threads: int, *, trains: bool = True) -> None:
    """Fix how this process computes.

    Args:
        equality: in `exact`, operators without a deterministic implementation raise, no algorithm is chosen
            by timing it, and what `torch.compile` makes depends on a function and its shapes alone; `close`
            leaves all of it to torch.
        threads: intra-op threads. Never derived from the number of processes: the order of float additions
            depends on it.
        trains: whether an optimizer will step, which imports torch's compiler, and that takes a second; else
            call `fix_imported_compiler` when the user's code was imported.
    """
    torch.set_num_threads(threads)
    if equality == "exact":
        torch.set_deterministic_debug_mode("error")
        # Filling every new tensor with NaN finds reads of uninitialised memory, but costs a write each.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
        # In evaluation nn.TransformerEncoder takes a fused path, but not where modules have hooks.
        torch.backends.mha.set_fastpath_enabled(False)
        if trains:
            _fix_compilation()


def fix_imported_compiler() -> None:
    """Do `_fix_compilation` where something has imported torch's compiler."""
    if "torch._dynamo" in sys.modules:
        _fix_compilation()


def _fix_compilation() -> None:
    """Let a compiled function depend on its code and its shapes, not on what this process compiled before.

    By default the first shapes get a kernel of their own, and the second ones a kernel for any shapes. Which
    shapes come first depends on the lanes that a process carries. Decision 0006 has the figures.
    """
    from torch._dynamo import config  # noqa: PLC0415 - takes a second

    torch.use_deterministic_algorithms(True)  # tells torch's compiler as well
    config.automatic_dynamic_shapes = False
    # The default lets the ninth shape run uncompiled, whichever that is.
    config.recompile_limit = config.accumulated_recompile_limit
    config.fail_on_recompile_limit_hit = True


def exact_pins(device: torch.device) -> dict[str, str]:
    """Return what the bytes of a run depend on besides its configuration, by name."""
    capability = torch.backends.cpu.get_cpu_capability()
    pins = {"torch": torch.__version__, "cpu_capability": capability, "onednn": onednn_instructions()}
    if device.type != "cpu":
        pins["gpu"] = device_name(device)
    if device.type == "cuda":
        pins["tf32"] = str(torch.backends.cuda.matmul.allow_tf32)
    return pins


def onednn_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the limit that is set for oneDNN, or what this CPU has of the instructions that decide."""
    if limit := os.environ.get("ONEDNN_MAX_CPU_ISA"):
        return f"at most {limit.upper()}"
    found = None
    with suppress(OSError):
        found = re.search(r"^flags\s*: (.*)", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    flags = found[1].split() if found else ()
    return " ".join(name for name in _HALF_PRECISION if name in flags) or "none"
