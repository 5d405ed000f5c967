"""What is tried, and what there is to paste."""

from dataclasses import replace

import yaml

from lanewise.commands.bench import tune
from lanewise.commands.bench.tune import Trial, to_paste
from lanewise.config import ActivationCheckpointingConfig, CompileConfig, DataConfig, MemoryConfig
from lanewise.config.load import Override
from tests.distributed.tasks import Smooth, configure


def tried(config, block_classes=()) -> list[str]:
    return [f"{change.key}={change.text}" for change in tune._changes(config, block_classes)]


def test_workers_are_tried_up_to_twice_the_cores(monkeypatch):
    monkeypatch.setattr(tune.os, "cpu_count", lambda: 2)
    config = configure(Smooth)
    assert tried(config) == [f"data.num_workers={number}" for number in (1, 2, 4)]
    assert tried(replace(config, data=DataConfig(num_workers=2))) == ["data.num_workers=4"]


def test_blocks_are_tried_where_the_model_has_some(monkeypatch):
    monkeypatch.setattr(tune.os, "cpu_count", lambda: 0)
    config = configure(Smooth, equality="close")
    assert tried(config) == ["data.num_workers=1", "data.num_workers=2", "compile=whole"]
    fsdp = replace(config, distributed=replace(config.distributed, reducer="fsdp"))
    assert tried(fsdp, ("Block", "Layer"))[2:] == [
        "memory.activation_checkpointing=auto",
        "distributed.fsdp.blocks=[Block]",
        "distributed.fsdp.blocks=[Layer]",
        "compile=auto",
    ]
    set_already = replace(
        config,
        memory=MemoryConfig(activation_checkpointing=ActivationCheckpointingConfig()),
        compile=CompileConfig(),
    )
    assert tried(set_already)[2:] == ["memory.activation_checkpointing=null"]


def test_what_was_kept_can_be_pasted():
    text = to_paste(
        [
            Override("data.num_workers", "4"),
            Override("distributed.devices", "2"),
            Override("distributed.fsdp.blocks", "[Block]"),
            Override("compile", "auto"),
        ]
    )
    assert yaml.safe_load(text) == {
        "data": {"num_workers": 4},
        "distributed": {"devices": 2, "fsdp": {"blocks": ["Block"]}},
        "compile": "auto",
    }


def test_a_trial_says_what_came_of_it():
    change = Override("data.num_workers", "2")
    assert str(Trial(change, is_kept=True, gain=1.234)) == "--data.num_workers=2: 1.23 times as fast, kept"
    assert str(Trial(change, is_kept=False, gain=0.9)).endswith("0.90 times as fast, not kept")
    assert str(Trial(change, is_kept=False, failure="why")) == "--data.num_workers=2: why"
