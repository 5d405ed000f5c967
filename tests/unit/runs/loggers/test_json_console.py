"""Lines of metrics on the standard output."""

import json
import math

from lanewise.runs.callback import LargestLoss
from lanewise.runs.loggers.json_console import JsonConsoleLogger


def test_each_line_is_that_of_metrics_jsonl(capsys):
    logger = JsonConsoleLogger()
    logger.on_largest_loss(1, 10, LargestLoss(2.0, 7, 0, [3]))
    logger.on_step(1, 10, {"train/loss": math.nan, "train/weight": 4.0})
    logger.on_epoch(1, 10, {"data/read_bytes": 5.0})
    logger.on_evaluation(1, 10, {"held_out/loss": 0.5})
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.pop("time") > 0 for line in lines] == [True] * 3
    largest = {"loss": 2.0, "step": 7, "lane": 0, "samples": [3]}
    assert lines == [
        {"epoch": 1, "step": 10, "train/loss": None, "train/weight": 4.0, "largest_loss": largest},
        {"epoch": 1, "step": 10, "data/read_bytes": 5.0},
        {"epoch": 1, "step": 10, "held_out/loss": 0.5},
    ]
