"""The tables in 80 columns, and the lines below them."""

import io
import json
from dataclasses import replace

from rich.console import Console

from lanewise.commands.bench.bench_report import BenchReport
from lanewise.commands.bench.modes import Mode
from lanewise.commands.bench.row import BenchRow
from lanewise.commands.bench.training import Trained
from lanewise.config import DistributedConfig
from tests.distributed.tasks import Smooth, configure
from tests.unit.commands.bench.measured import first, row

CONFIG = configure(Smooth, equality="close")
ALONE, DDP = Mode("single", 1, "close"), Mode("ddp", 2, "close")
FSDP, CEILING = Mode("fsdp", 2, "close"), Mode("single", 2, "close")


def report(*rows: BenchRow, config=CONFIG, **given) -> BenchReport:
    return BenchReport(config, {one.mode: one for one in rows}, **given)


def drawn(shown: BenchReport) -> str:
    file = io.StringIO()
    Console(file=file, width=80, highlight=False).print(shown.table())
    return file.getvalue()


def test_the_widest_rows_fit_into_80_columns():
    rows = []
    for num_devices, reducer in ((1, "single"), (1024, "balanced_data_parallel"), (1024, "single")):
        for equality in ("exact", "close"):
            one = row(Mode(reducer, num_devices, equality), [1e-5, 1.2e-5, 3e-5, 4e-5, 5e-5])
            one.planned_bytes, one.flops_per_sample = 81_559_000_000, 1e9
            one.firsts = [first(device="NVIDIA H200")]
            for turns in one.rounds:
                for turn in turns:
                    object.__setattr__(turn, "num_units", 6400.0)
            rows.append(one)
    text = drawn(report(*rows))
    assert max(map(len, text.splitlines())) <= 80
    assert "balanced_data_parallel" in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


def test_what_was_trained_is_a_table_with_every_value_of_the_evaluation():
    rows = [row(ALONE, [2.0] * 5), row(DDP, [1.0] * 5)]
    values = {"recommended/loss": 1.5, "recommended/ndcg@10": 0.352, "recommended/mrr": 0.45678}
    for measured in rows:
        measured.trained = Trained(250, 61.26, {**values, "recommended/recall@10": 0.3}, "c0ffee123")
    text = drawn(report(*rows))
    assert max(map(len, text.splitlines())) <= 80
    assert "\nafter 250 steps and an evaluation, in close\n" in text
    assert ["ddp", "2", "61.3", "c0ffee12", "1.5", "0.352", "0.45678"] in list(
        map(str.split, text.splitlines())
    )
    title, _, heading, of_single, of_ddp = text.splitlines()[-5:]
    assert title == "further values of that evaluation"
    assert heading.split() == ["reducer", "devices", "recall@10"]
    assert [of_single.split(), of_ddp.split()] == [["single", "1", "0.3"], ["ddp", "2", "0.3"]]


def test_trainings_that_differ_in_exact_are_told():
    rows = [row(mode._replace(equality="exact"), [1.0] * 5) for mode in (ALONE, DDP)]
    for measured in rows:
        measured.trained = Trained(250, 1.0, {}, measured.mode.reducer)
    assert "the models of exact differ, and must not: `lanewise verify` says why" in list(
        report(*rows).lines()
    )


def test_of_few_rounds_no_spread_is_written():
    """Of a single round it was +-0.0%."""
    text = drawn(report(row(ALONE, [1.0] * 4), row(DDP, [1.0] * 5)))
    few, enough = text.splitlines()[2:4]
    assert "+-" not in few
    assert "* " in few
    assert "+-0.0% " in enough


def test_speed_ups_are_over_one_device_of_the_same_grade():
    shown = report(row(ALONE, [2.0] * 5), row(DDP, [1.0] * 5), row(CEILING, [1.0] * 5))
    assert shown.speed_up(shown.rows[DDP]) == 2
    assert "ddp" in drawn(shown)
    assert report(row(DDP, [1.0] * 5)).speed_up(shown.rows[DDP]) is None


def test_the_fastest_row_with_most_devices_is_what_the_bound_is_of():
    shown = report(row(ALONE, [0.5] * 5), row(DDP, [1.0] * 5), row(FSDP, [1.5] * 5), row(CEILING, [0.1] * 5))
    assert shown.best is shown.rows[DDP]
    *_, last = shown.lines()
    assert last == "what bounds ddp on 2 devices, close: compute: forward and backward are 90% of a step"


def test_models_that_differ_in_exact_are_told():
    exact = [row(one._replace(equality="exact"), [1.0] * 5, model=one.reducer * 2) for one in (ALONE, DDP)]
    assert "the models of exact differ, and must not: `lanewise verify` says why" in list(
        report(*exact).lines()
    )


def test_equal_failures_are_one_line_and_noisy_rows_are_marked():
    failed = [BenchRow(DDP._replace(equality=equality), failure="why") for equality in ("exact", "close")]
    shown = report(*failed, row(ALONE, [1.0, 2.0]))
    lines = list(shown.lines())
    assert lines[0] == "ddp on 2 devices, exact; ddp on 2 devices, close: why"
    assert lines[1].startswith("* 1 of 3 rows are noisy")
    assert "failed" in drawn(shown)


def test_what_was_interrupted_before_anything_was_measured_has_no_table():
    shown = report(BenchRow(ALONE), BenchRow(DDP), is_interrupted=True)
    assert drawn(shown).strip() == ""
    assert list(shown.lines()) == ["interrupted: this is what was measured until then"]


def test_what_a_mode_cannot_have_is_named():
    config = replace(CONFIG, distributed=DistributedConfig(shard_optimizer=True))
    shown = report(row(ALONE, [1.0] * 5), config=config)
    assert "distributed.shard_optimizer: left out where the mode cannot have it" in list(shown.lines())


def test_all_of_it_is_json_with_machine_and_versions():
    written = json.loads(json.dumps(report(row(ALONE, [2.0] * 5), row(DDP, [1.0] * 5)).to_json()))
    assert written["rows"][1]["speed_up"] == 2
    assert written["machine"]["cores"]
    assert written["versions"].keys() == {"lanewise", "torch", "python"}
    assert written["work"]["global_batch_size"] == 16
    assert written["bound"].startswith("ddp on 2 devices, close: compute")
