"""What all processes know of a step."""

import math

from lanewise.engine.step.totals import StepTotals
from lanewise.engine.step.wire import LaneRow, Term


def test_a_loss_that_is_not_finite_is_told_as_it_is():
    totals = StepTotals([LaneRow(0, (Term(math.inf, 1.0, 2.0),))])
    assert (totals.lanes[0].loss_sum, totals.is_trainable) == (math.inf, False)
    assert math.isnan(totals.loss_sum)
