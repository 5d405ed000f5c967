"""What is printed of a program that was observed."""

import torch

from lanewise.commands.verify.foreign.program_report import LayoutReport, ProgramReport
from tests.unit.commands.verify.foreign.test_compare import OWN, compared


def test_the_table_says_how_many_times_the_expected_gradient_there_is():
    """It had a factor and a residual, which nobody knew who had not read the page."""
    halved = compared(torch.tensor([1.0, 2.0, 3.0, 4.0]), OWN, [torch.tensor([0.5, 1.0, 1.5, 2.0])] * 2)
    layout = LayoutReport(2, [halved], findings=[], alone=["another rate"], notes=[], not_compared="")
    report = ProgramReport(["train.py"], 1, "updates", [layout])
    (cells,) = zip(*(column.cells for column in report.table().columns), strict=True)
    assert cells == ("2 processes", "1", "0.5000 times the expected one", "0%", "differs")
    first, *_ = report.lines()
    assert first == "note, 2 processes, each with the samples that it reads itself: another rate"
