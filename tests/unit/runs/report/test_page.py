"""The page: its size, and that whatever a run left is text in it."""

import json
import math
import re

import pytest

from lanewise.runs.report.page import write_page
from lanewise.runs.report.run_data import read_run
from tests.unit.runs.report.left import START, end, evaluation, step, write_run

HOSTILE = "</script><img src=x onerror=alert(1)><b>"


def page_of(*runs) -> str:
    return write_page([read_run(folder, name) for folder, name in runs])


def data_in(page: str):
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert text is not None
    return json.loads(text[1])


def without_scripts(page: str) -> str:
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_the_charts_have_the_numbers_of_the_run(tmp_path):
    lines = [step(1, 2.0), step(10, 1.5), evaluation(10, 1.25, 0.5)]
    folder = write_run(tmp_path / "a", [START, end("finished", last_step=10)], lines)
    (folder / "config.yaml").write_text("batch: {global_batch_size: 8}\n")
    (folder / "phases").mkdir()
    phase = {"step": 1, "time": 1.0, "time/data_seconds": 0.25, "memory/peak_gib": 2.0}
    (folder / "phases" / "rank-00000.jsonl").write_text(json.dumps(phase) + "\n")
    (folder / "checkpoints" / "step-000010").mkdir(parents=True)
    page = page_of((folder, "a"))
    data = data_in(page)
    charts = {chart["title"]: chart for chart in data["charts"]}
    assert data["runs"] == [{"name": "a", "batch": 8}]
    assert [(line["name"], line["steps"], line["values"]) for line in charts["Loss"]["lines"]] == [
        ("train/loss", [1, 10], [2, 1.5]),
        ("held_out/loss", [10], [1.25]),
    ]
    assert charts["held_out/accuracy"]["lines"][0]["values"] == [0.5]
    assert charts["Parts of a step, by process"]["lines"][0]["values"] == [0.25]
    assert charts["Memory, by process"]["lines"][0]["labels"] == ["rank 0"]
    kinds = [line["name"] for line in charts["Starts, ends, checkpoints, jumps"]["lines"]]
    assert kinds == ["start", "end", "checkpoint"]
    assert len(page.encode()) < 6 * 10**6


def test_a_jump_of_the_loss_is_marked(tmp_path):
    largest = {"loss": 9.0, "step": 8, "lane": 2, "samples": [4]}
    jump = {"event": "jump", "epoch": 1, "step": 10, "time": 1.8e9, "loss": 7.5, "largest_loss": largest}
    damaged = [{"event": "jump", "step": 3}, {"event": "jump", "step": 3, "time": 1.8e9, "largest_loss": []}]
    folder = write_run(tmp_path / "a", [START], [step(1, 2.0), step(10, 7.5), jump, *damaged])
    charts = {chart["title"]: chart for chart in data_in(page_of((folder, "a")))["charts"]}
    *_, jumps = charts["Starts, ends, checkpoints, jumps"]["lines"]
    assert jumps["name"] == "jump"
    assert f"loss 7.5 up to step 10, the largest: {json.dumps(largest)}" in jumps["texts"]


def test_text_of_a_run_is_text(tmp_path):
    """Everything in a run_dir may be a stranger's."""
    lines = [{**step(1, 2.0), HOSTILE: 3.0}, evaluation(1, 1.0, 0.5)]
    events = [{**START, "devices": {HOSTILE: 1}}, end("error", text=HOSTILE)]
    folder = write_run(tmp_path / "a", events, lines)
    (folder / "config.yaml").write_text(json.dumps({"task": HOSTILE, HOSTILE: 1}))
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-00000.log").write_text(
        f"2026-11-25 03:34:26,415 WARNING a: {HOSTILE}\n2026-11-25 03:34:26,415 ERROR a: {HOSTILE}\n"
    )
    (folder / "x.json").write_text(json.dumps({"layouts": [{"name": HOSTILE}], "verified": HOSTILE}))
    (folder / "y.json").write_text(
        json.dumps({"rows": [{"name": HOSTILE, "failure": HOSTILE}], "bound": HOSTILE})
    )
    page = page_of((folder, HOSTILE), (folder, "b"))
    assert "<img" not in without_scripts(page)
    assert HOSTILE not in page
    assert page.count("<script") == page.count("</script>") == 3
    assert HOSTILE in [chart["title"] for chart in data_in(page)["charts"]]


def test_a_damaged_run_is_shown_as_far_as_it_can_be(tmp_path):
    folder = write_run(tmp_path / "a", [{"event": "start"}, {"event": "end", "time": "x"}], [], text="{half")
    (folder / "config.yaml").write_text("a: [")
    page = page_of((folder, "a"))
    for said in (
        "its last line is half-written",
        "config.yaml cannot be read",
        "phases is not there",
        "logs is not there",
    ):
        assert said in page
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "metrics.jsonl is not there" in page_of((empty, "e"))


@pytest.mark.parametrize(
    "line",
    [
        {"step": 1, "train/loss": 1.0},
        {"step": 1, "time": math.inf, "train/loss": 1.0},
        {"step": 1, "time": 1.0, "val/\ud800": 1.0},
        {"step": 10**400, "time": 1.0, "memory/peak_gib": 10**400},
    ],
    ids=["no time", "infinite time", "surrogate", "huge"],
)
def test_a_line_may_have_anything(tmp_path, line):
    folder = write_run(tmp_path / "a", [], [line])
    (folder / "run.jsonl").unlink()
    (folder / "phases").mkdir()
    (folder / "phases" / "rank-00000.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    page = page_of((folder, "a"))
    assert page.encode()
    assert data_in(page)["charts"]


LISTS = "".join(f"a{number + 1}: &a{number + 1} [{f'*a{number}, ' * 9}]\n" for number in range(8))


@pytest.mark.parametrize(
    "config",
    [f"a0: &a0 [1]\n{LISTS}", f"a: 0x{'1' * 6000}", f"a: {'1' * 6000}"],
    ids=["aliases", "hex", "digits"],
)
def test_a_configuration_that_nobody_can_show_is_said(tmp_path, config):
    """The aliases stood for more than memory holds, and the report hung; the digits were a traceback."""
    folder = write_run(tmp_path / "a", [START], [step(1, 1.0)])
    (folder / "config.yaml").write_text(config)
    assert "config.yaml cannot be read: config.yaml holds " in page_of((folder, "a"))


def test_of_very_many_metrics_some_are_shown_and_the_rest_is_counted(tmp_path):
    """100,000 lines in a chart took a minute."""
    values = {
        f"{kind}{number}/{end}": 1.0 for number in range(50) for kind, end in (("a", "loss"), ("b", "x"))
    }
    folder = write_run(tmp_path / "a", [START], [{"epoch": 1, "step": 1, "time": 1.0, **values}])
    phases = {"step": 1, **{f"time/{number}_seconds": 1.0 for number in range(50)}}
    (folder / "phases").mkdir()
    (folder / "phases" / "rank-00000.jsonl").write_text(json.dumps(phases) + "\n")
    page = page_of((folder, "a"))
    charts = {chart["title"]: chart["lines"] for chart in data_in(page)["charts"]}
    assert len(charts["Loss"]) == len(charts["Parts of a step, by process"]) == 40
    assert sum(title.startswith("b") for title in charts) == 40
    assert "20 more metrics are in metrics.jsonl." in page
    assert "and 60 more</td>" in page


def test_what_differs_between_runs_is_a_table(tmp_path):
    folders = [write_run(tmp_path / name, [START], [step(1, 1.0)]) for name in "ab"]
    for folder, rate in zip(folders, (0.1, 0.2), strict=True):
        (folder / "config.yaml").write_text(f"train: {{seed: 1}}\noptimizer: {{lr: {rate}}}\n")
    page = page_of(*((folder, folder.name) for folder in folders))
    assert re.search(r"<td>optimizer\.lr</td><td>0\.1</td><td>0\.2</td>", page)
    assert "<td>train.seed</td>" not in page


HUGE = f'{{"rows": [{{"speed_up": 1{"0" * 400}}}], "bound": 1}}'


@pytest.mark.parametrize("tree", ["1", "[]", '{"rows": 3, "bound": 1}', '{"layouts": [3, {}]}', HUGE])
def test_a_json_file_may_be_anything(tmp_path, tree):
    folder = write_run(tmp_path / "a", [START], [step(1, 1.0)])
    (folder / "some.json").write_text(tree)
    assert page_of((folder, "a"))


def test_texts_and_images_are_shown_as_what_they_are(tmp_path):
    run = write_run(tmp_path / "run", lines=[step(1, 2.0)])
    media = [
        {"epoch": 0, "step": 0, "name": "sample", "text": "<b>bold</b>"},
        {"epoch": 1, "step": 3, "name": 'di"git', "png": 'iVBORw=="><script>'},
        {"step": 3, "name": {"a": 1}, "text": 5},
        {"nothing": 1},
    ]
    (run / "media.jsonl").write_text("".join(json.dumps(line) + "\n" for line in media))
    page = without_scripts(page_of((run, "run")))
    assert '<pre tabindex="0">&lt;b&gt;bold&lt;/b&gt;</pre>' in page
    assert "run: sample after step 0" in page
    assert 'src="data:image/png;base64,iVBORw==&#34;&gt;&lt;script&gt;"' in page
