"""`lanewise audit RUN`."""

from collections.abc import Sequence
from pathlib import Path

from lanewise.cli.option import Syntax, read_arguments
from lanewise.run_dir import RunDir

_HELP = """\
usage: lanewise audit RUN [OTHER_RUN]

Checks what `lanewise train --audit` wrote, over all restarts and numbers of devices: that every sample of
every epoch was read and given to collate once, in the lane and the step that were planned. What collate made
of them is hashed; fewer rows than samples are noted. With another run, also that the lanes of both got equal
tensors in every step.
"""
_SYNTAX = Syntax("audit", ("RUN", "[OTHER_RUN]"))
_MAX_LINES = 10


def audit(arguments: Sequence[str]) -> int:
    """Run the subcommand and return the exit code: 1 if something is not as planned."""
    given = read_arguments(arguments, _SYNTAX)
    if given.wants_help or not given.names:
        print(_HELP, end="")
        return 0 if given.wants_help else 2
    from lanewise.verify.audit import Audit

    audits = [Audit(RunDir(Path(run)).audit) for run in given.names]
    report = audits[0].check()
    _print("note", report.notes)
    _print("found", report.problems)
    differences = list(audits[0].compare(audits[1])) if len(audits) > 1 else []
    _print("found", differences)
    found = f"{report.num_steps} steps, {report.num_samples} samples, complete epochs: {report.num_epochs}"
    if report.is_good:
        print(f"{found}; collate got every sample where and when it was planned, none twice, none left out")
    else:
        print(f"{found}; not as planned in {len(report.problems)} places")
    if len(audits) > 1:
        print(
            f"{given.names[1]}: "
            + (f"other tensors in {len(differences)} places" if differences else "equal tensors")
        )
    return 0 if report.is_good and not differences else 1


def _print(kind: str, lines: Sequence[str]) -> None:
    for line in lines[:_MAX_LINES]:
        print(f"{kind}: {line}")
    if len(lines) > _MAX_LINES:
        print(f"{kind}: and {len(lines) - _MAX_LINES} more like these")
