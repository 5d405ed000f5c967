"""What a speed depends on."""

import os

from lanewise.commands.bench.machine import describe_machine, describe_versions, describe_work
from tests.distributed.tasks import Smooth, configure


def test_a_measurement_names_the_machine_the_versions_and_the_work():
    assert describe_machine()["cores"] == os.cpu_count()
    assert describe_versions().keys() == {"lanewise", "torch", "python"}
    config = configure(Smooth)
    work = describe_work(config)
    assert work["task"] == config.task.class_path
    assert (work["global_batch_size"], work["precision"]) == (config.batch.global_batch_size, "float32")
