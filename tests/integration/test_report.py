"""`lanewise report` and `runs` as a user sees them: in a browser without a network, and by keyboard."""

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.integration.command import Warm, lanewise, run, train, wait_for, write_config

CHROMIUM = shutil.which("chromium")
MEASURED = """
import resource, sys
from lanewise.cli.main import main
main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # in KiB
"""
PLOTS = """
[...document.querySelectorAll(".plot")].map((plot) =>
  [plot.clientWidth, plot.querySelector(".main-svg")?.clientWidth, plot._fullLayout?.font.color])
"""
"""The width of each chart's place, its own, and its colour; null where it is not drawn."""
DRAWN = """
title => [...document.querySelectorAll(".chart")].find(one => one.querySelector("h3").innerText === title)
    .querySelector(".plot").data
"""
WITH_BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="not installed: chromium (Debian: chromium)")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="not installed: playwright")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run on one process, and one that was stopped and went on on two."""
    folder = tmp_path_factory.mktemp("runs")
    config = write_config(
        folder, "tasks.Line", {"num_samples": 40}, train={"max_steps": 30, "run_dir": "unused"}
    )
    train(config, "--train.run_dir", folder / "one").require_success()
    two = ("--train.run_dir", folder / "two", "--checkpoint.every.steps", "5", "--train.max_grad_norm", "5")
    with Warm("train", config, *two, "--train.max_steps", "100000") as command:
        wait_for((folder / "two" / "checkpoints" / "step-000020").exists)
        os.kill(command.pid, 15)
        assert command.finish().code == 75
    last = max(int(path.name[5:]) for path in (folder / "two" / "checkpoints").glob("step-*"))
    goes_on = ("--resume", "--distributed.devices", "2", "--train.max_steps", last + 10)
    train(config, *two, *goes_on).require_success()
    return folder


def open_page(browser, file: Path, *, scheme="light", width=1280):
    """Open a page; nothing but the file itself may be asked for, and no script may fail."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900}, offline=True)
    context.set_default_timeout(120_000)  # milliseconds: beside other tests a browser may start slowly
    page = context.new_page()
    page.asked, page.failed = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("pageerror", lambda error: page.failed.append(str(error)))
    page.on("console", lambda message: page.failed.append(message.text) if message.type == "error" else None)
    page.goto(f"file://{file}")
    page.wait_for_selector("html[data-ready]")
    page.wait_for_selector(".plot .main-svg")
    return page


def report(folder: Path, *names: str) -> Path:
    out = folder / f"{'-'.join(names)}.html"
    lanewise("report", *(folder / name for name in names), "--output", out).require_success()
    return out


def rows_of(page, title: str) -> list[list[str]]:
    """Open the table of a chart, and read it."""
    page.get_by_text(f"Numbers of {title}", exact=True).click()
    table = page.get_by_role("region", name=f"Numbers of {title}", exact=True).locator("table")
    table.locator("tr").first.wait_for()
    return [row.locator("th, td").all_inner_texts() for row in table.locator("tr").all()]


def metrics_of(run_dir: Path, name: str) -> dict[int, float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[name] for line in lines if name in line}


@WITH_BROWSER
def test_all_charts_are_drawn_and_tables_have_the_numbers_of_metrics_jsonl(browser, runs):
    """Out of sight there was no chart, so that a picture of the whole page had empty places."""
    page = open_page(browser, report(runs, "one"))
    drawn = [(place, width) for place, width, _ in page.evaluate(PLOTS)]
    assert len(drawn) > 5
    assert [width for _, width in drawn] == [place for place, _ in drawn]
    head, *rows = rows_of(page, "Loss")
    assert head == ["step", "train/loss"]
    expected = metrics_of(runs / "one", "train/loss")
    assert {int(step): float(loss) for step, loss in rows} == pytest.approx(expected, rel=1e-5)
    head, *rows = rows_of(page, "Parts of a step, by process")
    assert head == ["process", "data", "forward", "backward", "communication", "optimizer"]
    assert [row[0] for row in rows] == ["rank 0"]
    assert page.asked == [page.url]
    assert page.failed == []


@pytest.mark.slow
@WITH_BROWSER
def test_a_run_that_went_on_on_another_number_shows_its_starts(browser, runs):
    page = open_page(browser, report(runs, "two"))
    head, *rows = rows_of(page, "Starts, ends, checkpoints, jumps")
    assert head == ["run", "when", "what"]
    said = [row[2] for row in rows]
    assert said[0] == "start on 1 process, from step 1"
    assert any(one.startswith("start on 2 processes, from step ") for one in said)
    assert any(one.startswith("checkpoint after step ") for one in said)
    assert any(one.startswith("preempted after step ") for one in said)
    assert said[-1].startswith("finished after step ") or said[-1].startswith("checkpoint after step ")


@pytest.mark.slow
@WITH_BROWSER
def test_equal_runs_are_seen_as_two_and_a_part_of_a_step_has_one_colour(browser, runs):
    """The line of the second run hid that of the first; the parts of each run had the next colours."""
    shutil.copytree(runs / "one", runs / "same")
    page = open_page(browser, report(runs, "one", "same", "two"), width=500)
    drawn = {title: page.evaluate(DRAWN, title) for title in ("Loss", "Parts of a step, by process")}
    width_of = {line["name"].partition(":")[0]: line["line"]["width"] for line in drawn["Loss"]}
    assert width_of["one"] > width_of["same"] == width_of["two"]
    parts = drawn["Parts of a step, by process"]
    colours = {(bar["name"], bar["marker"]["color"]) for bar in parts}
    assert len(colours) == len({name for name, _ in colours}) == sum(bar["showlegend"] for bar in parts)
    assert len(parts) == 3 * len(colours)
    table = page.locator(".wide").first
    assert table.evaluate("one => one.scrollWidth > one.clientWidth")  # it scrolls, and the page does not
    assert page.evaluate("document.documentElement.scrollWidth") <= 500


@pytest.mark.slow
@WITH_BROWSER
def test_runs_beside_each_other_can_be_hidden_by_keyboard(browser, runs):
    expect = pytest.importorskip("playwright.sync_api").expect  # which waits for the page to follow
    page = open_page(browser, report(runs, "one", "two"))
    assert rows_of(page, "Loss")[0] == ["step", "one: train/loss", "two: train/loss"]
    page.get_by_label("Over").focus()
    page.keyboard.press("t")  # chooses time
    expect(page.get_by_label("Over")).to_have_value("time")
    page.wait_for_function(
        "document.querySelector('.plot').innerText.includes('seconds since the first start')"
    )
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    expect(page.get_by_label("logarithmic")).to_be_checked()
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    expect(page.get_by_label("one", exact=True)).not_to_be_checked()
    table = page.get_by_role("region", name="Numbers of Loss", exact=True).locator("table")
    expect(table.locator("th")).to_have_text(["step", "two: train/loss"])
    page.get_by_text("Numbers of Learning rate").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="Numbers of Learning rate")).to_be_visible()
    differing = page.get_by_role("region", name="What differs").locator("tbody tr").all_inner_texts()
    assert any(one.startswith("train.max_grad_norm") for one in differing)
    assert page.failed == []


@pytest.mark.slow
@WITH_BROWSER
@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)]
)
def test_nobody_is_kept_out(browser, runs, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="not installed: axe")
    page = open_page(browser, report(runs, "one", "two"), scheme=scheme, width=width)
    rows_of(page, "Loss")
    found = axe.Axe().run(page).response["violations"]
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in serious] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
@WITH_BROWSER
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_paper_all_charts_are_drawn_and_dark_on_white(browser, runs, scheme):
    """Those that had not come into sight were once empty."""
    page = open_page(browser, report(runs, "one"), scheme=scheme)
    page.evaluate(f"addEventListener('beforeprint', () => {{ window.printed = {PLOTS}; }})")
    page.pdf()
    printed = page.evaluate("window.printed")
    assert len(printed) > 5
    assert [width for _, width, _ in printed] == [place for place, _, _ in printed]
    assert max(place for place, _, _ in printed) < 700
    assert {color for _, _, color in printed} == {"#1b1f24"}
    back = page.evaluate(PLOTS)
    assert [width for _, width, _ in back] == [place for place, _, _ in back]
    assert {color for _, _, color in back} == {"#1b1f24" if scheme == "light" else "#e6edf3"}
    assert page.failed == []


@pytest.mark.slow
@WITH_BROWSER
def test_a_line_of_one_value_stands_on_an_axis_from_zero(browser, runs):
    """That of a learning rate of 0.001 went from -1 to 1."""
    page = open_page(browser, report(runs, "one"))
    page.get_by_role("heading", name="Learning rate").scroll_into_view_if_needed()
    (rate,) = set(metrics_of(runs / "one", "train/learning_rate").values())
    plot = "document.querySelector('[aria-label^=\"Chart of Learning rate\"]')"
    page.wait_for_function(f"{plot}._fullLayout")
    low, high = page.evaluate(f"{plot}._fullLayout.yaxis.range")
    assert (low, rate <= high < 2 * rate) == (0, True)


@pytest.mark.slow
@WITH_BROWSER
def test_a_name_with_html_in_it_is_shown_as_text(browser, runs, tmp_path):
    hostile = "<img src=x onerror=document.title='taken'>"
    folder = tmp_path / "<b>bold<b>"
    shutil.copytree(runs / "one", folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 31, "time": time.time(), hostile: 1.0}) + "\n")
    out = tmp_path / "report.html"
    lanewise("report", folder, "--output", out).require_success()
    page = open_page(browser, out)
    page.get_by_role("heading", name=hostile).scroll_into_view_if_needed()
    assert page.locator("img").count() == 0
    assert page.title() == "<b>bold<b>"
    assert rows_of(page, hostile)[0] == ["step", hostile]
    assert page.failed == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_million_lines_take_a_minute_and_a_gibibyte_at_most(runs, tmp_path):
    folder = tmp_path / "long"
    shutil.copytree(runs / "one", folder)
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 1_000_001):
            file.write(json.dumps({**line, "step": step, "train/loss": 1 / step}) + "\n")
    out = tmp_path / "report.html"
    begin = time.monotonic()
    done = run(sys.executable, "-c", MEASURED, "report", folder, "--output", out).require_success()
    assert time.monotonic() - begin < 60
    assert int(done.stdout.splitlines()[-1]) < 2**20
    assert out.stat().st_size < 6 * 10**6


@pytest.mark.slow
def test_the_page_is_written_anew_while_a_run_goes_on(runs, tmp_path):
    config = write_config(tmp_path, train={"max_steps": 1_000_000, "run_dir": str(tmp_path / "run")})
    out = tmp_path / "report.html"
    with Warm("train", config) as command:
        wait_for((tmp_path / "run" / "metrics.jsonl").exists)
        with Warm("report", tmp_path / "run", "--output", out, "--watch") as watch:
            wait_for(out.exists)
            os.kill(command.pid, 15)
            assert command.finish().code == 75
            done = watch.finish()
    assert done.code == 0
    assert len(done.stdout.splitlines()) == 2
    assert "preempted" in out.read_text()


def test_runs_lists_them_with_what_to_do_next(runs):
    done = lanewise("runs", runs, "--json", runs / "runs.json").require_success()
    written = {Path(one["run_dir"]).name: one for one in json.loads((runs / "runs.json").read_text())["runs"]}
    assert {name: one["state"] for name, one in written.items()} == {"one": "finished", "two": "finished"}
    assert written["two"]["num_starts"] == 2
    assert re.search(r"two: 2 x cpu, ddp; took \d:\d\d:\d\d; [\d,.]+ samples/s; started 2 times", done.stdout)
    assert "one: 1 x cpu; took" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report"], "report needs RUN: got none."),
        (["report", "nowhere"], "there is no run in nowhere."),
        (["runs", "nowhere"], "there is no run in nowhere."),
    ],
)
def test_bad_input_is_one_error(tmp_path, arguments, said):
    done = lanewise(*arguments, cwd=tmp_path)
    assert done.code != 0
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_the_same_run_twice_is_an_error(runs):
    done = lanewise("report", runs / "one", runs / "one")
    assert "a run is named twice" in done.stderr
