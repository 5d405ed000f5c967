"""`lanewise diff RUN_A RUN_B`."""

from lanewise.cli.arguments import Argument, Arguments, Command, read_path
from lanewise.cli.evaluate import TRUST
from lanewise.cli.result import JSON, show_result, showing_progress
from lanewise.processes.world.environment import require_no_world

_RUNS = tuple(Argument(name, "the run_dir of a run", read=read_path) for name in ("RUN_A", "RUN_B"))


def diff(arguments: Arguments) -> int:
    """Compare two runs; the exit code is 1 if they differ."""
    require_no_world("diff starts its own processes")
    with showing_progress() as show:
        from lanewise.commands.diff.diff import diff as compare

        runs = [arguments[run] for run in _RUNS]
        report = compare(runs, arguments.overrides, trust=arguments[TRUST], show=show)
        show_result(report, f"{runs[0]} and {runs[1]}, {report.last_step:,} steps", arguments[JSON])
    return 0 if report.is_same else 1


COMMAND = Command(
    name="diff",
    text="""\
Says where two runs part, and why: in configuration, sources, versions, data, the samples of their lanes, and
what digests (integrity.digest_every_steps) and metrics tell. In `exact`, each run is then replayed from the
last equal digest, and the first step after which they differ is traced: to a lane, a parameter and an
operator, or to a run that wrote something else than its replay gives. Nothing is written into the runs.

Exit codes are those of diff: 0 the same, 1 different, 2 trouble.""",
    run=diff,
    operands=_RUNS,
    options=(TRUST, JSON),
    has_overrides=True,
)
