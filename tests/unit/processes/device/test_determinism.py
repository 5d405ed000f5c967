"""What `exact` fixes in a process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch._dynamo.exc import FailOnRecompileLimitHit

from lanewise.processes.device import determinism
from lanewise.processes.device.determinism import exact_pins, onednn_instructions, set_determinism

LENGTHS = (5, 17, 40)


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=8), torch._inductor.config.patch(deterministic=False):
        set_determinism("exact", threads=1)
        yield
    torch._dynamo.config.automatic_dynamic_shapes = True
    torch._dynamo.config.fail_on_recompile_limit_hit = False
    torch._dynamo.reset()
    set_determinism("close", threads=1)
    torch.use_deterministic_algorithms(False)


def compiled(made_for: list[Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a compiled function that notes what shapes each of its kernels is for."""

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        made_for.append(tuple(graph.graph.find_nodes(op="placeholder")[-1].meta["example_value"].shape))
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(lambda values: values.exp().sum(-1), backend=backend)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[::-1]])
def test_a_kernel_is_for_one_shape_whichever_came_first(lengths: tuple[int, ...]) -> None:
    # By default the second one is for any length, so what a lane is computed with depends on the lane that
    # its process computed before.
    made_for: list[Any] = []
    function = compiled(made_for)
    for length in lengths:
        function(torch.ones(3, length))
    assert made_for == [(3, length) for length in lengths]


def test_many_shapes_are_compiled_as_well() -> None:
    # By default what comes after the eighth shape runs uncompiled, and gives other bytes.
    made_for: list[Any] = []
    function = compiled(made_for)
    for length in range(2, 14):
        function(torch.ones(3, length))
    assert len(made_for) == 12


def test_more_shapes_than_torch_compiles_are_an_error() -> None:
    function = compiled([])
    with torch._dynamo.config.patch(recompile_limit=2):
        function(torch.ones(3, 2))
        function(torch.ones(3, 3))
        with pytest.raises(FailOnRecompileLimitHit):
            function(torch.ones(3, 4))


def test_no_kernel_is_chosen_by_its_time() -> None:
    # torch does that itself with its deterministic algorithms.
    assert torch._inductor.config.deterministic


@pytest.mark.parametrize(
    ("device", "names"), [("cpu", set()), ("xpu:0", {"gpu"}), ("mps:0", {"gpu"}), ("cuda:1", {"gpu", "tf32"})]
)
def test_the_model_of_an_accelerator_is_pinned(
    monkeypatch: pytest.MonkeyPatch, device: str, names: set[str]
) -> None:
    monkeypatch.setattr(determinism, "device_name", lambda device: f"model of {device}")
    pins = exact_pins(torch.device(device))
    assert pins.keys() == {"torch", "cpu_capability", "onednn"} | names
    assert pins.get("gpu") in (None, f"model of {device}")


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("fpu avx512f avx512_bf16 avx512_fp16 amx_bf16 amx_tile", "avx512_bf16 avx512_fp16 amx_bf16"),
        ("fpu avx512f avx512_bf16 avx512_fp16", "avx512_bf16 avx512_fp16"),
        ("fpu avx2", "none"),
    ],
)
def test_cpus_of_one_capability_that_round_bf16_in_other_ways_have_other_pins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, found: str
) -> None:
    """Two "Intel(R) Xeon(R) Processor" with AVX512, one with AMX, left other bytes of a run in bf16."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: amx_fp16\n")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert onednn_instructions(cpuinfo) == found
    assert onednn_instructions(tmp_path / "none") == "none"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx512_core_bf16")
    assert onednn_instructions(cpuinfo) == "at most AVX512_CORE_BF16"
