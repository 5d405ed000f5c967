"""Layouts that differ or fail where no other diagnosis says why, and settings by which they must differ."""

from collections.abc import Iterator

from lanewise.commands.recording.comparison import compare
from lanewise.commands.verify.diagnoses.forward import HIDDEN_STATE, RESET_IT
from lanewise.commands.verify.evidence import Evidence, LayoutResult, also_changed, diagnosis, listed


@diagnosis("unexplained", "the run fails on another number of processes", "See what the error says.")
def failed_layout(evidence: Evidence) -> Iterator[str]:
    """Find layouts that fail, though one process does not."""
    return (f"{layout.name}: {layout.failure}" for layout in evidence.layouts if layout.failure)


@diagnosis(
    "unexplained",
    "ranks hold different weights",
    "Leave the weights to the optimizer, and let nothing of it depend on the rank.",
)
def unequal_ranks(evidence: Evidence) -> Iterator[str]:
    """Find ranks of one layout that hold different weights after a step."""
    for layout in evidence.layouts:
        for rank, result in enumerate(layout.results):
            found = compare(layout.trace.steps, result.trace.steps).differing
            if weights := found.get("weights"):
                where = f"between ranks 0 and {rank} of {layout.name} after step {weights.first_unequal}"
                also = f", and so does {listed(found['optimizer'].names)}" if "optimizer" in found else ""
                yield f"{weights.names[0]} differs {where}{also}."


@diagnosis("unexplained", HIDDEN_STATE, RESET_IT)
def state_in_steps(evidence: Evidence) -> Iterator[str]:
    """Find state that the steps changed, where they differ on several processes."""
    for layout in evidence.layouts[2:]:
        names = sorted({*evidence.layouts[0].trace.changed, *layout.trace.changed})
        if layout.differences and names:
            yield f"{_first_difference(layout)}; only this is kept from lane to lane: {listed(names)}."


@diagnosis(
    "unexplained",
    "a step depends on the rank, on the number of processes or on state that was not seen",
    "Look at what makes it: forward and loss, a hook for gradients, the optimizer or after_update for "
    "weights, a metric for an evaluation. Nothing there may ask for a rank or a world size, of torch or of "
    "the environment, or keep something in a file.",
)
def of_the_rank(evidence: Evidence) -> Iterator[str]:
    """Conclude from what the other diagnoses did not find: one process, started again, gives the same."""
    for layout in evidence.layouts[2:]:
        if layout.differences and not evidence.layouts[1].differences:
            names = also_changed(layout.hidden_differences or layout.trace.changed)
            again = "one process gives the same each time that it is started"
            yield f"{_first_difference(layout)}{names}; {again}."


@diagnosis(
    "unexplained",
    "the runs diverge for an unknown reason",
    "Look for a dependence on the process, on the time or on earlier forwards.",
)
def of_unknown_cause(evidence: Evidence) -> Iterator[str]:
    """Find any layout that differs."""
    for layout in evidence.layouts[1:]:
        if layout.differences:
            names = also_changed(layout.hidden_differences or layout.trace.changed)
            yield f"{_first_difference(layout)}{names}."


def _first_difference(layout: LayoutResult) -> str:
    check, difference = next(iter(layout.differences.items()))
    return (
        f"{layout.name} and one process first differ in {check}, at {difference}: {difference.values[0]} "
        f"in one process, {difference.values[1]} there"
    )


@diagnosis(
    "configuration",
    "the configuration asks for results that depend on the number of devices",
    "Leave it out where any number of devices must compute the same.",
)
def left_out(evidence: Evidence) -> Iterator[str]:
    """Find settings by which results depend on the layout."""
    if evidence.left_out:
        yield f"it was left out of what was run: {' and '.join(evidence.left_out)}."
