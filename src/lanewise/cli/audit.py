"""`lanewise audit RUN`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from lanewise.cli.arguments import Argument, Arguments, Command, read_path
from lanewise.errors import wrapped
from lanewise.runs.dir import RunDir

_RUN = Argument("RUN", "the run_dir of a run that was trained with --audit", read=read_path)
_OTHER = Argument[Path | None]("OTHER_RUN", "another one, to compare with", read=read_path, default=None)
_MAX_LINES = 10


def audit(arguments: Arguments) -> int:
    """Check a run, and compare it with another; the exit code is 1 if something is not as planned."""
    from lanewise.commands.verify.audit import Audit

    run, name = Audit(RunDir(arguments[_RUN]).audit), arguments[_OTHER]
    other = None if name is None else Audit(RunDir(name).audit)
    report = run.check()
    _print("note", report.notes)
    _print("found", report.problems)
    differences = [] if other is None else list(run.compare(other))
    _print("found", differences)
    found = (
        f"{report.num_steps:,} steps, {report.num_samples:,} samples, complete epochs: {report.num_epochs:,}"
    )
    if report.is_good and report.is_of_stream:
        _say(f"{found}; the samples of the stream were given to collate once, without a gap")
    elif report.is_good:
        drawn = "what the order drew" if report.draws else "every sample"
        _say(f"{found}; {drawn} was given to collate once, in the planned step and lane")
    else:
        _say(f"{found}; not as planned in {len(report.problems)} places")
    if other is not None:
        compared = f"other tensors in {len(differences)} places" if differences else "equal tensors"
        _say(f"{name}: {compared}")
    return 0 if report.is_good and not differences else 1


def _say(line: str) -> None:
    print(wrapped(line, sys.stdout))


def _print(kind: str, lines: Sequence[str]) -> None:
    for line in lines[:_MAX_LINES]:
        _say(f"{kind}: {line}")
    if len(lines) > _MAX_LINES:
        _say(f"{kind}: and {len(lines) - _MAX_LINES} more like these")


COMMAND = Command(
    name="audit",
    text="""\
Checks what `lanewise train --audit` wrote, over all restarts and numbers of devices: that every sample of
every epoch was read and given to collate once, in the lane and the step that were planned. Nobody planned the
samples of a stream: they must come once, without a gap, in the lane and the step that follow from their
numbers. What collate made of them is hashed; fewer rows than samples are noted. With another run, also that
the lanes of both got equal tensors in every step.""",
    run=audit,
    operands=(_RUN, _OTHER),
)
