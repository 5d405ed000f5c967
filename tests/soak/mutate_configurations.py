"""Damages good configurations at random, and checks that each loads or is refused in a few short lines.

    make soak

The only argument is the seed. `make test` does the same with fewer of them.
"""

import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random, SystemRandom
from types import FrameType
from typing import Any

import yaml

from lanewise.cli.arguments import read_arguments
from lanewise.cli.train import COMMAND
from lanewise.config.load import dump_config, load_config
from lanewise.errors import ConfigError

NUM_MUTATIONS = 5000
MAX_SECONDS = 60
"""For one mutation, on a busy machine; a Jsonnet program alone may take ten."""

TREE: dict[str, Any] = {
    "task": {
        "class_path": "my_project.Mnist",
        "init_args": {"width": 32, "names": ["a", "b"], "model": None},
    },
    "batch": {"global_batch_size": 256, "micro_batch_size": 32},
    "train": {"epochs": 3, "run_dir": "runs/mnist", "seed": 1, "max_grad_norm": 0.5},
    "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3, "betas": [0.9, 0.999]}},
    "checkpoint": {"every": {"steps": 10, "seconds": 60.5}, "keep_last": 2},
    "callbacks": [{"class_path": "my_project.Show", "init_args": {"deep": {"deeper": [{"x": True}]}}}],
    "distributed": {"devices": ["cpu", "cpu"], "fsdp": {"blocks": ["Block"]}},
    "precision": "bf16",
}
TOML = """\
precision = "bf16"
task = { class_path = "my_project.Mnist", init_args = { width = 32, names = ["a", 'b'] } }
optimizer.class_path = "torch.optim.AdamW"
optimizer.init_args = { lr = 1e-3, betas = [0.9, 0.999] }
[batch]
global_batch_size = 256
micro_batch_size = 0x20
[train]
epochs = 3
run_dir = \"""
runs\"""
[checkpoint.every]
seconds = 60.5
[[callbacks]]
class_path = "my_project.Show"
"""
ALIASED = """\
task: {class_path: my_project.Mnist, init_args: &args {width: 32, "a b": [1, 2.5, .inf, ~]}}
batch: {global_batch_size: 256, micro_batch_size: 0x20}
train:
  epochs: 3   # a comment
  run_dir: >-
    runs
optimizer: {class_path: torch.optim.AdamW, init_args: *args}
"""
JSONNET = "local lanes = 8;\n%s + { batch+: { global_batch_size: lanes * super.micro_batch_size } }"
GOOD = [
    (".yaml", yaml.safe_dump(TREE)),
    (".yaml", ALIASED),
    (".json", json.dumps(TREE, indent=1)),
    (".toml", TOML),
]
PROGRAM = (".jsonnet", JSONNET % json.dumps(TREE))  # rarer than the others: it is a process

NASTY: list[Any] = [
    None,
    True,
    "",
    "null",
    "~",
    "~nobody/x",
    "\0",
    "a\nb",
    "\x1b[31m",
    "\u2028\u202e",
    "x" * 5000,
    0,
    -1,
    10**99,
    10**100,
    -(10**400),
    1e308,
    float("inf"),
    float("nan"),
    [],
    {},
    [[]],
    {"class_path": "x"},
    {"": {"": 1}},
]
TOKENS = [
    *(
        "!!float abc",
        "!!int 1.5",
        "!!bool maybe",
        "!!timestamp x",
        "!!binary x",
        "!!set {a, b}",
        "!!omap [a]",
    ),
    *("!!python/name:os.system x", "!x y", "! z", "&a [*a]", "&a {*a : 1}", "*args", "*nothing", "<<: *args"),
    *("---", "...", "%YAML 9.9\n---", "? [1]\n: 2", "|\n x", ">-", "'", '"', '"""', "'''", "#", "//", "/*"),
    *("9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000, "0o" + "7" * 400, "1e999", "-1e-999", ".nan", "NaN"),
    *("Infinity", "1_000", "2024-01-31", "2024-01-31T00:00:00Z", "00:30", "true", "None", "1.", "+.e+3", "."),
    *("[" * 100, "]" * 100, "{" * 100, '{"a":' * 5000, "[" * 100_000, "- " * 2000, "a." * 2000 + "a = 1\n"),
    *("\0", "\ufeff", "\x85", "\u2028", "\U0001f600", "\x1b[2J", "\t", "\r", "\r\n", "\\", '"\\ud800"'),
    *(
        "a: 1\na: 2\n",
        '"a": 1, "a": 2',
        "[a]\n[a]\n",
        "[[a]]\n",
        "a = 1\n",
        ": ",
        ", ",
        "= ",
        " ",
        "\n",
        "x" * 3000,
    ),
    *(
        "error 'no' + ",
        "import '/dev/zero'",
        "local f(x) = f(x + 1); f(0)",
        "std.repeat('x', 100000)",
        "$.task",
    ),
]
KEYS = [
    *(
        "task",
        "task.init_args",
        "task.init_args.width",
        "batch.global_batch_size",
        "train.seed",
        "train.run_dir",
    ),
    *(
        "callbacks.0",
        "callbacks.0.init_args.deep",
        "callbacks." + "9" * 5000,
        "search_path",
        "distributed.devices",
    ),
    *(
        "trian.seed",
        "",
        ".",
        "a" * 3000,
        "a." * 3000 + "a",
        "optimizer.init_args.betas.1",
        "\udcff",
        "train.x\ny",
    ),
]


def mutate(random: Random) -> tuple[str, bytes, list[str]]:
    """Return the ending and the bytes of a damaged configuration, and overrides that are hardly better."""
    ending, text = PROGRAM if random.random() < 0.06 else random.choice(GOOD)
    if ending != ".toml" and random.random() < 0.3:
        text = json.dumps(swap(TREE, random))  # which is YAML and Jsonnet as well
    data = text.encode("utf-8", "surrogatepass")
    for _ in range(random.choice([0, 1, 1, 1, 2, 5])):
        data = random.choice(DAMAGES)(data, random)
    return ending, data, override(random)


def swap(tree: Any, random: Random) -> Any:
    """Copy a tree with some values replaced."""
    if random.random() < 0.05:
        return random.choice(NASTY)
    if isinstance(tree, dict):
        return {key: swap(value, random) for key, value in tree.items()}
    return [swap(value, random) for value in tree] if isinstance(tree, list) else tree


def place(data: bytes, random: Random) -> tuple[int, int]:
    """Choose a short part, mostly at the borders of words."""
    start = random.randrange(len(data) + 1)
    return start, min(len(data), start + random.choice([0, 1, 1, 3, 20]))


def flip(data: bytes, random: Random) -> bytes:
    """Change one bit."""
    start = random.randrange(len(data) + 1)
    return (
        data[:start]
        + bytes(byte ^ 1 << random.randrange(8) for byte in data[start : start + 1])
        + data[start + 1 :]
    )


def insert(data: bytes, random: Random) -> bytes:
    """Put a token in the place of a short part."""
    start, end = place(data, random)
    return data[:start] + random.choice(TOKENS).encode() + data[end:]


def give_value(data: bytes, random: Random) -> bytes:
    """Put a token in the place of what follows a colon or an equals sign."""
    starts = [number + 1 for number, byte in enumerate(data) if byte in b":="]
    start = random.choice(starts or [0])
    end = next((number for number in range(start, len(data)) if data[number] in b",}\n"), len(data))
    return data[:start] + b" " + random.choice(TOKENS).encode() + data[end:]


def exchange(data: bytes, random: Random) -> bytes:
    """Exchange two words."""
    words = data.split(b" ")
    one, other = random.randrange(len(words)), random.randrange(len(words))
    words[one], words[other] = words[other], words[one]
    return b" ".join(words)


def truncate(data: bytes, random: Random) -> bytes:
    """Keep the beginning."""
    return data[: random.randrange(len(data) + 1)]


def repeat(data: bytes, random: Random) -> bytes:
    """Write some lines twice: their keys are repeated."""
    lines = data.splitlines(keepends=True)
    start = random.randrange(len(lines) + 1)
    return b"".join([*lines[: start + random.randrange(4)], *lines[start:]])


DAMAGES: list[Callable[[bytes, Random], bytes]] = [
    flip,
    insert,
    give_value,
    give_value,
    exchange,
    truncate,
    repeat,
]


def override(random: Random) -> list[str]:
    """Make up some arguments of a command line."""
    arguments = []
    for _ in range(random.choice([0, 0, 0, 1, 1, 3])):
        value = random.choice([*TOKENS, json.dumps(random.choice(NASTY[:-10]))])
        option = f"--{random.choice(KEYS)}"
        arguments += random.choice([[f"{option}={value}"], [option, value], [option], [value]])
    return arguments


def load(folder: Path, mutation: tuple[str, bytes, list[str]]) -> str:
    """Load a mutation, check what comes of it, and say which of both it was."""
    ending, data, overrides = mutation
    path = folder / f"config{ending}"
    path.write_bytes(data)
    try:
        given = read_arguments(COMMAND, [str(path), *overrides])
        config = load_config(str(path), given.overrides)
    except ConfigError as error:
        lines = str(error).split("\n")
        assert lines[0], "an error says something"
        assert len(lines) <= 11, f"{len(lines)} lines"
        assert all(len(line) <= 700 and line.isprintable() for line in lines), lines
        return "refused"
    # What was loaded is written into run_dir, and loads from there.
    path = folder / "resolved.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert repr(load_config(str(path))) == repr(config)
    return "loaded"


def give_up(_: int, __: FrameType | None) -> None:
    """End a mutation that hangs."""
    raise TimeoutError(f"a configuration is not loaded after {MAX_SECONDS} s")


def main() -> None:
    """Load one mutation after the other; exits with an error at the first that goes wrong, and keeps it."""
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else SystemRandom().randrange(1000)
    print(f"seed {seed}", flush=True)
    random, counts = Random(seed), Counter[str]()
    folder = Path(tempfile.mkdtemp(prefix="lanewise-mutations-"))
    signal.signal(signal.SIGALRM, give_up)
    for _ in range(NUM_MUTATIONS):
        mutation = mutate(random)
        (folder / "overrides").write_bytes(b"\0\n".join(map(os.fsencode, mutation[2])))
        signal.alarm(MAX_SECONDS)
        try:
            counts[load(folder, mutation)] += 1
        except BaseException:
            print(f"the configuration and its overrides are in {folder}", flush=True)
            raise
        signal.alarm(0)
    print(
        f"{NUM_MUTATIONS} damaged configurations: {counts['loaded']} loaded, {counts['refused']} were refused"
    )


if __name__ == "__main__":
    main()
