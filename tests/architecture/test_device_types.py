"""No module names a type of accelerator, but for what is true of that type only."""

import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "lanewise"
TYPES = re.compile(r"(?<![a-z])(?:cuda|xpu|mps|mtia|hpu)(?![a-z])", re.IGNORECASE)
ALLOWED = {
    "config/distributed.py": ("examples in errors", {"cuda": 3, "mps": 1}),
    "config/optimizer_rules.py": ("where fused optimizers are the default", {"cuda": 1}),
    "config/run.py": ("what AllenNLP calls distributed.devices", {"cuda": 2}),
    "commands/verify/foreign/program.py": ("how many GPUs an observed program sees", {"cuda": 1}),
    "commands/jobs/launchers.py": ("which devices Ray reserves, as it counts GPUs", {"cuda": 1}),
    "launch/kubernetes.py": ("the cluster's name for Nvidia's GPUs, and how to ask for them", {"cuda": 4}),
    "processes/device/determinism.py": ("tf32 is a format of CUDA's matrix products", {"cuda": 2}),
    "processes/device/accelerator.py": ("what a type lacks or has alone", {"mps": 1, "cuda": 1}),
}
"""Of each module: why, and how often which name occurs in it."""


def names_in(source: str) -> dict[str, int]:
    """Count the names of types in code and in strings, but not in docstrings and comments."""
    found: Counter[str] = Counter()
    starts_statement = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_documentation = token.type == tokenize.COMMENT or (
            token.type == tokenize.STRING and starts_statement
        )
        if not is_documentation:
            found.update(name.lower() for name in TYPES.findall(token.string))
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            starts_statement = token.type in (
                tokenize.NEWLINE,
                tokenize.INDENT,
                tokenize.DEDENT,
                tokenize.ENCODING,
            )
    return dict(found)


def test_types_are_named_where_they_are_allowed_only() -> None:
    found = {
        str(path.relative_to(SRC)): names_in(path.read_text(encoding="utf-8")) for path in SRC.rglob("*.py")
    }
    assert "processes/world/world.py" in found
    allowed = {path: counts for path, (_, counts) in ALLOWED.items() if counts}
    assert {path: counts for path, counts in found.items() if counts} == allowed


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ntorch.cuda.synchronize()\n", {"cuda": 1}),
        ('if device.type == "xpu":\n    pass\n', {"xpu": 1}),
        ('DEVICE = f"mps:{index}"\n', {"mps": 1}),
        ("is_on = tensor.is_cuda\n", {"cuda": 1}),
        ('"""Of cuda and mps."""\n\nx = 1  # of cuda\n"""What cuda has."""\n', {}),
        ('def f():\n    """Of cuda."""\n    return "cuda", torch.cuda\n', {"cuda": 2}),
        ("stamps = timestamps\n", {}),
    ],
)
def test_what_is_counted(source: str, expected: dict[str, int]) -> None:
    assert names_in(source) == expected
