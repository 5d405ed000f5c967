"""Writes the page: one HTML file that needs no network, in which all text of a run is text."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import chain
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from lanewise.config.strict_yaml import write_yaml
from lanewise.config.tree import flat
from lanewise.runs.report.charts import Chart, charts_of, written
from lanewise.runs.report.run_data import RunData
from lanewise.runs.report.status import finite

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Whatever stands in the page, a browser loads nothing for it."""

_MOST_VALUES = 40
"""The most values of an evaluation in the table of runs."""


def write_page(runs: Sequence[RunData]) -> str:
    """Return the page of one or several runs, which `page.html` lays out."""
    charts, num_left_out = charts_of(runs)
    own = {
        file.name: file.read_text("utf-8") for file in files(__package__).iterdir() if "page." in file.name
    }
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(own["page.html"]).render(
        names=", ".join(run.name for run in runs),
        made=written(time.time()),
        policy=_POLICY,
        runs=runs,
        overview=[_overview(run) for run in runs],
        notes=list(_notes(runs)),
        problems=[f"{run.name}: {problem}" for run in runs for problem in run.problems],
        charts=charts,
        num_left_out=num_left_out,
        differing=_differing([run.config for run in runs]),
        write_yaml=lambda config: write_yaml(dict(config)),
        tables=list(_tables(runs)),
        css=Markup(own["page.css"]),  # noqa: S704 - our own, as the program below
        data=Markup(_embedded(_data(runs, charts))),  # noqa: S704
        plotly=Markup(get_plotlyjs()),  # noqa: S704
        js=Markup(own["page.js"]),  # noqa: S704
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


def _overview(run: RunData) -> list[str]:
    """Return the row of a run in the table of how each stands."""
    status = run.status
    values = [f"{name} {value:.6g}" for name, value in status.evaluation.items()]
    more = [f"and {len(values) - _MOST_VALUES:,} more"] if len(values) > _MOST_VALUES else []
    return [
        run.name,
        status.state,
        "" if status.started is None else written(status.started),
        f"{status.step or 0:,}" + (f" of {status.last_step:,}" if status.last_step else ""),
        status.devices,
        ", ".join(values[:_MOST_VALUES] + more),
        "" if status.best is None else f"{status.best[0]} {status.best[2]:.6g} after {status.best[1]:,}",
    ]


def _notes(runs: Sequence[RunData]) -> Iterator[str]:
    yield from (f"{run.name}: {run.status.error}" for run in runs if run.status.error)
    yield from (
        f"{run.name}: resume with {run.status.next_command}" for run in runs if run.status.next_command
    )


def _differing(configs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return each key of configurations that differs between them, with the value of each as JSON."""
    found = [
        {key: json.dumps(value, default=str, ensure_ascii=False) for key, value in flat(config).items()}
        for config in configs
    ]
    rows = [[key, *(one.get(key, "") for one in found)] for key in dict.fromkeys(chain(*found))]
    return [row for row in rows if len(set(row[1:])) > 1]


def _tables(runs: Sequence[RunData]) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """Yield what verify and bench wrote into the folders: the caption, the names of the columns, the rows."""
    for name, tree in ((f"{run.name}/{name}", tree) for run in runs for name, tree in run.tables):
        if "layouts" in tree:
            said = "verified" if tree.get("verified") is True else "not verified"
            rows = [_layout(layout) for layout in _mappings(tree.get("layouts"))]
            yield f"{name}: {said}", ["run on", "processes", "what differs"], rows
        else:
            rows = [_mode(mode) for mode in _mappings(tree.get("rows"))]
            yield f"{name}: {tree.get('bound')}", ["mode", "samples/s", "speed-up", "failure"], rows


def _mappings(values: Any) -> Iterator[Mapping[str, Any]]:
    yield from (value for value in (values if isinstance(values, list) else ()) if isinstance(value, Mapping))


def _layout(row: Mapping[str, Any]) -> list[str]:
    differences = row.get("differences")
    differing = ", ".join(map(str, differences)) if isinstance(differences, Mapping) else ""
    what = differing or str(row.get("failure") or "nothing")
    return [str(row.get("name")), str(row.get("num_processes")), what]


def _mode(row: Mapping[str, Any]) -> list[str]:
    speed, speed_up = row.get("samples_per_second"), row.get("speed_up")
    median = speed.get("median") if isinstance(speed, Mapping) else None
    return [str(row.get("name")), _number(median), _number(speed_up), str(row.get("failure") or "")]


def _number(value: Any) -> str:
    number = finite(value)
    return "" if number is None else f"{number:,.4g}"
