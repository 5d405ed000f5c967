from dataclasses import replace
from typing import Any

import pytest

from lanewise.commands.plan import real_sizes
from lanewise.commands.plan.plan import plan
from lanewise.commands.plan.result import Plan
from lanewise.config import ActivationCheckpointingConfig, CompileConfig, MemoryConfig
from tests.unit.commands.plan.test_measure import config_of

MANY = 100_000


@pytest.fixture(scope="module")
def report() -> Plan:
    return plan(config_of("Plain"), [1, 2, MANY], memory_bytes=2**20)


def lines_of(config: Any) -> str:
    return "\n".join(plan(config, [2]).lines())


def test_each_reducer_has_a_row_with_and_without_checkpointing(report):
    settings = [(row.setting.num_devices, row.setting.reducer, row.is_checkpointed) for row in report.rows]
    several = ["data_parallel", "balanced_data_parallel", "ddp", "fsdp"]
    assert settings[:2] == [(1, "single", False), (1, "single", True)]
    assert settings[2:10] == [
        (2, name, is_checkpointed) for is_checkpointed in (False, True) for name in several
    ]
    assert len(settings) == 2 + 8 + 4


def test_more_devices_than_lanes_get_the_smallest_batch_that_fills_them(report):
    assert {row.global_batch_size for row in report.rows if row.setting.num_devices < MANY} == {16}
    filled = [row for row in report.rows if row.setting.num_devices == MANY]
    assert {(row.global_batch_size, row.setting.num_lanes_each) for row in filled} == {(4 * MANY, 1)}
    assert any("100,000 devices are more than the 4 lanes" in line for line in report.lines())


def test_with_parts_a_line_of_each_row_says_whether_it_fits(report):
    assert not all(row.fits for row in report.rows)
    lines = [*replace(report, shows_parts=True).lines()]
    verdicts = [line for line in lines if " does not fit, " in line or " fits, " in line]
    assert lines[-len(report.rows) :] == verdicts


def test_the_operations_of_a_sample_are_told(report):
    flops = report.measured[0].num_flops / report.batch.num_samples
    assert flops > 0
    assert report.to_json()["flops_per_sample"] == flops
    assert f"note: forward and backward of a sample: {flops:.4g} operations, for log.flops_per_sample" in [
        *report.lines()
    ]


def test_every_line_of_the_table_and_of_json_is_a_row(report):
    assert report.table().row_count == len(report.rows) == len(report.to_json()["rows"])


def test_what_is_nothing_in_every_row_has_no_column():
    """A row had 200 characters, which no terminal shows on a line."""
    table = plan(config_of("Plain"), [1, 2]).table()
    names = [str(column.header) for column in table.columns]
    assert names == ["devices", "lanes", "reducer", "recompute", "memory", "sent"]
    assert {len(list(column.cells)) for column in table.columns} == {table.row_count}


def test_operators_that_could_not_be_measured_are_named(monkeypatch):
    monkeypatch.setattr(real_sizes, "free_bytes", lambda *_: 10)
    assert "note: what aten.mean.default, aten.sum.dim_IntList may keep besides" in lines_of(
        config_of("Plain")
    )


def test_compile_is_left_out_and_said():
    config = replace(config_of("Plain"), compile=CompileConfig())
    assert "compile is set, and was left out of all numbers" in lines_of(config)


def test_checkpointing_as_configured_has_the_rows_with_it():
    section = ActivationCheckpointingConfig(blocks=("Linear",))
    config = replace(config_of("Plain"), memory=MemoryConfig(activation_checkpointing=section))
    rows = plan(config, [2]).rows
    assert [row.is_checkpointed for row in rows if row.setting.reducer == "ddp"] == [False, True]


def test_an_accelerator_has_an_allowance_for_fragmentation():
    config = config_of("Plain")
    config = replace(config, distributed=replace(config.distributed, device_type="cuda"))
    (row, *_) = plan(config, [1]).rows
    assert row.fragmentation_bytes == pytest.approx(0.15 * row.num_bytes, rel=0.01)


def test_a_model_that_cannot_be_sharded_has_no_row_of_fsdp():
    config = config_of("Plain")
    fsdp = replace(config.distributed.fsdp, blocks=("Nowhere",))
    config = replace(config, distributed=replace(config.distributed, fsdp=fsdp))
    report = plan(config, [2])
    assert "note: no fsdp: distributed.fsdp.blocks names Nowhere" in "\n".join(report.lines())
    assert "fsdp" not in {row.setting.reducer for row in report.rows}
