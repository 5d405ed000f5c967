"""Writes the page: one HTML file that needs no network, in which all text of a run is text."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from plotly.offline import get_plotlyjs

from lanewise.config.strict_yaml import write_yaml
from lanewise.runs.report.charts import Chart, charts_of, written
from lanewise.runs.report.run_data import RunData
from lanewise.runs.report.status import finite

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Whatever stands in the page, a browser loads nothing for it."""

_MOST_VALUES = 40
"""Of an evaluation, in the table of runs."""


def write_page(runs: Sequence[RunData]) -> str:
    """Return the page of one or several runs."""
    charts, num_left_out = charts_of(runs)
    names = ", ".join(run.name for run in runs)
    own = files("lanewise.runs.report")
    page = "".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            f"<title>{escape(names)}</title>\n",
            f"<style>\n{(own / 'page.css').read_text(encoding='utf-8')}</style>\n</head>\n<body>\n",
            f"<header><h1>{escape(names)}</h1>\n",
            f'<p class="soft">Made by lanewise report, {written(time.time())}.</p></header>\n<main>\n',
            *_overview(runs),
            *_chart_sections(runs, charts, num_left_out),
            *_configurations(runs),
            *_trouble(runs),
            *_tables(runs),
            "</main>\n",
            f'<script type="application/json" id="data">{_embedded(_data(runs, charts))}</script>\n',
            f"<script>{get_plotlyjs()}</script>\n",
            f"<script>\n{(own / 'page.js').read_text(encoding='utf-8')}</script>\n</body>\n</html>\n",
        ]
    )
    return page.encode(errors="backslashreplace").decode()  # a name may have what UTF-8 has not


def _data(runs: Sequence[RunData], charts: Sequence[Chart]) -> dict[str, Any]:
    return {
        "runs": [{"name": run.name, "batch": run.global_batch_size} for run in runs],
        "charts": [{"id": number, **chart._asdict()} for number, chart in enumerate(charts)],
    }


def _embedded(tree: Any) -> str:
    """Write JSON that cannot end the script in which it stands."""
    text = json.dumps(tree, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _overview(runs: Sequence[RunData]) -> Iterator[str]:
    yield '<section aria-labelledby="overview"><h2 id="overview">Runs</h2>\n'
    rows = []
    for run in runs:
        status = run.status
        progress = f"{status.step or 0:,}" + (f" of {status.last_step:,}" if status.last_step else "")
        best = (
            "" if status.best is None else f"{status.best[0]} {status.best[2]:.6g} after {status.best[1]:,}"
        )
        values = [f"{name} {value:.6g}" for name, value in status.evaluation.items()]
        more = [f"and {len(values) - _MOST_VALUES:,} more"] if len(values) > _MOST_VALUES else []
        last = ", ".join(values[:_MOST_VALUES] + more)
        started = "" if status.started is None else written(status.started)
        rows.append([run.name, status.state, started, progress, status.devices, last, best])
    yield _table(
        "How each run stands", ["run", "state", "started", "steps", "devices", "evaluation", "best"], rows
    )
    notes = [f"{run.name}: {run.status.error}" for run in runs if run.status.error]
    notes += [f"{run.name}: go on with {one}" for run in runs if (one := run.status.next_command)]
    yield _list(notes)
    problems = [f"{run.name}: {problem}" for run in runs for problem in run.problems]
    if problems:
        yield f"<h3>What could not be read</h3>\n{_list(problems)}"
    yield "</section>\n"


def _chart_sections(runs: Sequence[RunData], charts: Sequence[Chart], num_left_out: int) -> Iterator[str]:
    yield '<section aria-labelledby="charts-title"><h2 id="charts-title">Charts</h2>\n'
    yield '<form id="controls" aria-label="What the charts show"><label>Over <select name="axis">'
    yield '<option value="step">steps</option><option value="samples">samples</option>'
    yield '<option value="time">time</option></select></label>\n'
    yield '<label><input type="checkbox" name="log"> logarithmic</label>\n'
    if len(runs) > 1:
        yield "<fieldset><legend>Runs</legend>"
        for number, run in enumerate(runs):
            box = f'<input type="checkbox" name="run-{number}" checked>'
            yield f"<label>{box} {escape(run.name)}</label>"
        yield "</fieldset>\n"
    yield '</form>\n<div id="charts">\n'
    for number, chart in enumerate(charts):
        title = escape(chart.title)
        yield f'<section class="chart" aria-labelledby="title-{number}">'
        yield f'<h3 id="title-{number}">{title}</h3>\n'
        label = f"Chart of {title}; its numbers are in the table below"
        yield f'<div class="plot" id="plot-{number}" role="img" aria-label="{label}"></div>\n'
        yield f'<details id="numbers-{number}"><summary>Numbers of {title}</summary>'
        yield f'<div class="scroll" tabindex="0" role="region" aria-label="Numbers of {title}">'
        yield "<table></table></div></details></section>\n"
    yield "</div>\n"
    if num_left_out:
        yield f'<p class="soft">{num_left_out:,} more metrics are in metrics.jsonl.</p>\n'
    yield "</section>\n"


def _configurations(runs: Sequence[RunData]) -> Iterator[str]:
    yield '<section aria-labelledby="configuration"><h2 id="configuration">Configuration</h2>\n'
    flat = [dict(_flatten(run.config)) for run in runs]
    if len(runs) > 1:
        keys = dict.fromkeys(key for one in flat for key in one)
        differing = [key for key in keys if len({one.get(key, "") for one in flat}) > 1]
        rows = [[key, *(one.get(key, "") for one in flat)] for key in differing]
        yield (
            _table("What differs", ["key", *(run.name for run in runs)], rows)
            if rows
            else ("<p>The configurations are equal.</p>\n")
        )
    for run in runs:
        if run.config:
            text = escape(write_yaml(dict(run.config)))
            yield f"<details><summary>{escape(run.name)}</summary>"
            yield f'<pre tabindex="0">{text}</pre></details>\n'
    yield "</section>\n"


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, json.dumps(tree, default=str, ensure_ascii=False)


def _trouble(runs: Sequence[RunData]) -> Iterator[str]:
    found = [run for run in runs if run.findings.warnings or run.findings.errors]
    if not found:
        return
    yield '<section aria-labelledby="trouble"><h2 id="trouble">Warnings and errors</h2>\n'
    for run in found:
        rows = [[str(count), text] for text, count in run.findings.warnings.most_common()]
        if rows:
            yield _table(f"Warnings of {run.name}", ["times", "warning"], rows)
        for rank, text in run.findings.errors.items():
            yield f"<details><summary>{escape(run.name)}: the first error of rank {rank}</summary>"
            yield f'<pre tabindex="0">{escape(text)}</pre></details>\n'
    yield "</section>\n"


def _tables(runs: Sequence[RunData]) -> Iterator[str]:
    """Yield what verify and bench wrote into the folders."""
    found = [(f"{run.name}/{name}", tree) for run in runs for name, tree in run.tables]
    if not found:
        return
    yield '<section aria-labelledby="tables"><h2 id="tables">Verify and bench</h2>\n'
    for name, tree in found:
        if "layouts" in tree:
            rows = [_layout(one) for one in _mappings(tree.get("layouts"))]
            said = "verified" if tree.get("verified") is True else "not verified"
            yield _table(f"{name}: {said}", ["layout", "processes", "what differs"], rows)
        else:
            rows = [_mode(one) for one in _mappings(tree.get("rows"))]
            yield _table(f"{name}: {tree.get('bound')}", ["mode", "samples/s", "speed-up", "failure"], rows)
    yield "</section>\n"


def _mappings(values: Any) -> Iterator[Mapping[str, Any]]:
    yield from (one for one in (values if isinstance(values, list) else ()) if isinstance(one, Mapping))


def _layout(row: Mapping[str, Any]) -> list[str]:
    differences = row.get("differences")
    differing = ", ".join(map(str, differences)) if isinstance(differences, Mapping) else ""
    return [
        str(row.get("name")),
        str(row.get("num_processes")),
        differing or str(row.get("failure") or "nothing"),
    ]


def _mode(row: Mapping[str, Any]) -> list[str]:
    speed, speed_up = row.get("samples_per_second"), row.get("speed_up")
    median = speed.get("median") if isinstance(speed, Mapping) else None
    return [str(row.get("name")), _number(median), _number(speed_up), str(row.get("failure") or "")]


def _number(value: Any) -> str:
    number = finite(value)
    return "" if number is None else f"{number:,.4g}"


def _table(caption: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>\n{body}</tbody></table></div>\n"
    )


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>\n" if items else ""
