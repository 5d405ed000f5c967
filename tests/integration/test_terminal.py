"""What commands show on a terminal: nothing is longer than a line of it, so that no word is broken."""

import json
import os
import pty
import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.integration.command import MNIST, Warm, train, write_config
from tests.integration.terminal import lines_left_on

COMMANDS = (
    (
        "train mnist.yaml --train.max_steps=4 --distributed.devices=2 --audit --evaluate.best=held_out/loss "
        "--evaluate.every_steps=2 --distributed.equality=exact"
    ),
    "evaluate runs/mnist",
    "predict runs/mnist --output digits.jsonl",
    "audit runs/mnist",
    "checkpoints runs/mnist",
    "plan mnist.yaml --devices=1,2,16,100000 --memory-gib=1",
    "verify mnist.yaml --devices=2 --steps=1 --distributed.equality=exact",
    "train mnist.yaml --train.run_dir=runs/other --task.init_args.nonsense=1 --optimizer.init_args.lr=fast",
)


def show(command: str, folder: Path, width: int) -> list[str]:
    """Run a command on a terminal of this width; return the lines that are left on it."""
    terminal, end = pty.openpty()
    variables = {"TERM": "xterm", "COLUMNS": str(width), "NO_COLOR": None, "TTY_COMPATIBLE": None}
    with Warm(*command.split(), cwd=folder, output=end, variables=variables) as running:
        os.close(end)
        lines = lines_left_on(terminal)
        os.close(terminal)
        running.finish()
    return lines


@pytest.mark.parametrize("width", [80, pytest.param(120, marks=pytest.mark.slow)])
def test_no_line_is_wider_than_the_terminal(tmp_path, width):
    for file in MNIST.parent.glob("mnist.*"):
        shutil.copy(file, tmp_path)
    lines = {command: show(command, tmp_path, width) for command in COMMANDS}
    for command, shown in lines.items():
        assert any(shown), command
        assert [line for line in shown if len(line) > width or "…" in line] == [], command
    trained, evaluated, _, audited, listed, planned, verified, refused = map("\n".join, lines.values())
    assert re.search(r"best after step \d, lowest held_out/loss \S+: runs/mnist/best.safetensors", trained)
    assert re.search(r" elapsed 0:00:\d\d left 0:00:00\n", trained)
    assert "on samples: 1,000 of held_out" in evaluated
    assert "4 steps, 256 samples" in audited
    assert re.search(r"^ *4  +0.3 .* yes$", listed, re.MULTILINE)
    assert re.search(r"^100,000 +1 +fsdp +\S+ GiB +\S+ GiB$", planned, re.MULTILINE)
    assert "2 processes" in verified
    assert "optimizer.init_args.lr" in refused


def test_lines_of_metrics_can_go_to_the_standard_output(tmp_path):
    done = train(write_config(tmp_path), "--log.console", "json").require_success()
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    assert printed
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for lines in (printed, written):
        for line in lines:
            del line["time"]
    assert printed == written


def test_a_configuration_is_printed_with_its_defaults_and_nothing_runs(tmp_path):
    config = write_config(tmp_path)
    done = train(config, "--train.seed", "7", "--print-config").require_success()
    printed = yaml.safe_load(done.stdout)
    assert printed["train"]["seed"] == 7
    assert printed["distributed"]["threads"] == 1
    assert not (tmp_path / "run").exists()
