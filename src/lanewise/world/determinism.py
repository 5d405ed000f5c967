"""Process-wide switches that `exact` needs."""

import torch


def set_determinism(equality: str, threads: int) -> None:
    """Fix how this process computes.

    Args:
        equality: in `exact`, operators without a deterministic implementation raise, and cuDNN does not
            choose algorithms by timing them; `close` leaves both to torch.
        threads: intra-op threads. Never derived from the number of processes: the order of float additions
            depends on it.
    """
    torch.set_num_threads(threads)
    if equality == "exact":
        torch.use_deterministic_algorithms(True)
        # Filling every new tensor with NaN finds reads of uninitialised memory, but costs a write each.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
        # The fused path of nn.TransformerEncoder in evaluation is taken by modules without hooks only.
        torch.backends.mha.set_fastpath_enabled(False)


def exact_pins(device: torch.device) -> dict[str, str]:
    """Name what equal bytes depend on besides the configuration: another value may give other bytes."""
    pins = {"torch": torch.__version__, "cpu_capability": torch.backends.cpu.get_cpu_capability()}
    if device.type == "cuda":
        pins["gpu"] = torch.cuda.get_device_name(device)
        pins["tf32"] = str(torch.backends.cuda.matmul.allow_tf32)
    return pins
