"""Writes the table of README.md beside it: the models that the CPU and the emulated device leave, as digests.

python -m tests.fake_device.digests [ORDER ...]
"""

import hashlib
import itertools
import sys
from collections.abc import Sequence
from typing import Any

from lanewise.config import RunConfig
from lanewise.testing import run_distributed
from tests.distributed.fake_device.test_fake_device import LAYOUTS, PRECISIONS, configured
from tests.distributed.reduce.test_reducers import Whole
from tests.distributed.tasks import Language, train
from tests.fake_device.run import run
from tests.fake_device.tasks import Pictures

CASES = list(itertools.product((Pictures, Language, Whole), PRECISIONS))


def digests(world: Any, configs: Sequence[RunConfig]) -> list[str]:
    """Train each; return digests of models and losses."""
    return [hashlib.sha256(repr(train(world, config)).encode()).hexdigest()[:12] for config in configs]


def main() -> None:
    """Train everywhere, and print the table."""
    columns = {}
    configs = [configured(task, "single", precision, device_type="cpu") for task, precision in CASES]
    (columns["CPU"],) = run_distributed(digests, 1, configs)
    for order, layout in itertools.product(sys.argv[1:] or ["last"], LAYOUTS):
        configs = [configured(task, layout, precision) for task, precision in CASES]
        first, *others = run(digests, configs[0].distributed.num_processes or 1, configs, order=order)
        assert all(ended.value == first.value for ended in others)
        columns[f"`{layout}`, {order}"] = first.value
    lines = [["task", "precision", *columns], ["---"] * (2 + len(columns))]
    for number, (task, precision) in enumerate(CASES):
        lines.append([task.__name__, precision, *(column[number] for column in columns.values())])
    sys.stdout.writelines(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
