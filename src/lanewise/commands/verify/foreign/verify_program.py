"""Runs a program on one process and on several, and compares what its first updates computed."""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from lanewise.commands.verify.diagnose import Finding
from lanewise.commands.verify.foreign.alone import look_at_alone, look_at_joining
from lanewise.commands.verify.foreign.compare import (
    CannotTellError,
    Comparison,
    compare_update,
    find_cause,
    write_replay,
)
from lanewise.commands.verify.foreign.program import Noted, ObservedProgram
from lanewise.commands.verify.foreign.program_report import LayoutReport, ProgramReport
from lanewise.commands.verify.foreign.rows import num_same_rows
from lanewise.errors import ConfigError
from lanewise.launch.launcher import ending_on
from lanewise.launch.scratch import temporary_folder


def verify_program(
    command: Sequence[str],
    devices: Sequence[int],
    *,
    num_updates: int,
    until: str,
    show: Callable[[str], None],
) -> ProgramReport:
    """Compare the gradients of a program on several processes with those on one which reads the same samples.

    Args:
        command: the program; see `ObservedProgram`.
        devices: numbers of processes.
        num_updates: the updates to compare.
        until: what to observe; see `ObservedProgram`.
        show: told what is being run.

    Raises:
        ConfigError: the command cannot be run on as many processes.
        LaunchError: the program failed.
    """
    counts = [count for count in dict.fromkeys(devices) if count != 1]
    if not counts:
        raise ConfigError(
            "verify compares with one process: got --devices 1. Name another number of processes, as 1,2."
        )
    with ending_on((signal.SIGTERM, signal.SIGHUP)), temporary_folder() as folder:
        program = ObservedProgram(command, folder, num_updates, until)
        for count in counts:
            program.arguments(count, folder)  # raises before anything is run
        show("1 process")
        alone = program.run(1, "1")
        layouts = []
        for count in counts:
            show(f"{count} processes")
            ranks = program.run(count, str(count))
            layouts.append(_compare(program, ranks, alone[0], folder / f"{count}.replay", show))
    return ProgramReport(command, num_updates, until, layouts)


def _compare(
    program: ObservedProgram,
    ranks: Sequence[Noted],
    alone: Noted,
    replay: Path,
    show: Callable[[str], None],
) -> LayoutReport:
    """Compare what some ranks noted with one process that reads the same."""
    comparisons: list[Comparison] = []
    findings: list[Finding] = []
    not_compared = ""
    notes: set[str] = {note for noted in ranks for note in noted["notes"]}
    if apart := [*look_at_joining(ranks, notes)]:  # of which everything else that differs is a consequence
        return LayoutReport(len(ranks), [], apart, [], sorted(notes), "")
    try:
        if refused := {what for noted in (*ranks, alone) for what in noted["refused"]}:
            raise CannotTellError(f"the program uses {', '.join(sorted(refused))}")
        single, num_same = alone, program.num_updates
        if any(held["is_training"] for noted in ranks for held in noted["passes"]):
            write_replay(ranks, replay)
            show(f"1 process with the samples of {len(ranks)}")
            single = program.run(1, f"1 as {len(ranks)}", replay)[0]
        else:
            num_same = num_same_rows(ranks, alone)
        notes |= {*single["notes"]}
        if single["refused"]:
            raise CannotTellError(", ".join(single["refused"]))
        num_updates = min(num_same, *(len(noted["updates"]) for noted in (*ranks, single)))
        if not num_updates:
            raise CannotTellError("no update of an optimizer was seen on each process")
        if single["updates"][0]["weights"] != ranks[0]["updates"][0]["weights"]:
            raise CannotTellError("the first weights differ from run to run. Seed what draws them")
        comparisons = [compare_update(ranks, single, number) for number in range(num_updates)]
        wrong = next((held for held in comparisons if not (held.is_right and held.is_reduced)), None)
        if wrong is not None:
            findings.append(find_cause(wrong, sorted(notes)))
    except CannotTellError as error:
        not_compared = str(error)
    is_reduced = all(held.is_reduced for held in comparisons)
    looked = list(look_at_alone(ranks, alone, is_reduced=is_reduced))
    findings += [held for held in looked if isinstance(held, Finding)]
    return LayoutReport(
        len(ranks),
        comparisons,
        findings,
        [held for held in looked if isinstance(held, str)],
        sorted(notes),
        not_compared,
    )
