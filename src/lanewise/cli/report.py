"""`lanewise report RUN`."""

import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lanewise.cli.arguments import Argument, Arguments, Command, flag, read_path
from lanewise.errors import ConfigError, RunDirError
from lanewise.runs.file import replace_text

_RUNS = Argument[Path]("RUN", "the run_dir of a run", read=read_path, is_repeated=True)
_OUT = Argument[Path]("--output", "the page; report.html if left out", "FILE", read_path, Path("report.html"))
_WATCH = flag("--watch", "rewrites the page while a run continues, until Ctrl-C or until all have ended")
_NEEDED = ("plotly", "tsdownsample")
_SECONDS_BETWEEN_PAGES = 10.0


def report(arguments: Arguments) -> int:
    """Write a page about runs."""
    if any(find_spec(name) is None for name in _NEEDED):
        raise ConfigError(
            f"report needs {' and '.join(_NEEDED)}, which are not installed. "
            "Install them: pip install 'lanewise[report]'."
        )
    from lanewise.runs.report.status import find_runs

    folders = arguments.all_of(_RUNS)
    for folder in folders:
        if list(find_runs(folder)) != [folder]:
            raise RunDirError(
                f"there is no run in {folder}. Name the run_dir of a run; `lanewise runs` lists them."
            )
    while True:
        is_running = _write(folders, arguments[_OUT])
        if not arguments[_WATCH] or not is_running:
            return 0
        time.sleep(_SECONDS_BETWEEN_PAGES)


def _write(folders: Sequence[Path], out: Path) -> bool:
    """Write the page; return whether one of the runs goes on."""
    from lanewise.runs.report.page import write_page
    from lanewise.runs.report.run_data import read_run

    begin = time.monotonic()
    runs = [read_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    replace_text(out, write_page(runs))
    print(f"{out}: {len(runs)} run{'s' * (len(runs) > 1)}, {time.monotonic() - begin:.1f} s")
    return any(run.status.state == "running" for run in runs)


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the last parts of the paths, as many as tell the runs apart."""
    paths = [folder.absolute() for folder in folders]
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"a run is named twice: got {', '.join(map(str, folders))}. Name each once.")


COMMAND = Command(
    name="report",
    text="""\
Writes one HTML file about a run, or about several side by side: metrics, speed, where the time of each
process went, memory, starts and checkpoints, the configuration and what differs, warnings and errors. It
needs no network.""",
    run=report,
    operands=(_RUNS,),
    options=(_OUT, _WATCH),
)
