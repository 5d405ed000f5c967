"""What is said of a step that cannot be trained on."""

import math

import pytest
import torch

from lanewise.data import LaneBatch
from lanewise.engine.step.message import StepMessage
from lanewise.engine.step.terms import LaneLoss
from lanewise.engine.step.totals import StepTotals
from lanewise.errors import NonFiniteLossError, WorldError
from lanewise.lanes import LaneTurn
from lanewise.processes.world.world import LocalWorld
from tests.unit.engine.step.test_message import NUM_LANES, message, message_of


def explain(told: StepMessage, totals: StepTotals, turn: LaneTurn) -> None:
    told._judgement.explain_no_update(totals, turn, told.evidence)


def test_other_lanes_than_those_of_the_step_are_an_error():
    """A row whose lane came as NaN was dropped: nothing was updated, and the run ended with exit code 0."""

    class Two(LocalWorld):
        world_size = 2

        def all_gather_tree(self, value):
            return [value, value]

        def start_all_gather(self, numbers):
            return lambda: torch.stack([numbers, numbers])

    told = message_of(Two(torch.device("cpu")), 2)
    told.begin()
    turn = LaneTurn(0, 0, 0, range(1), present=range(2), is_last=True)
    batch = LaneBatch(turn, (0,), None, 1)
    told.add(batch, LaneLoss(torch.tensor(1.0), 1.0, 1.0))
    told.send(batch)
    with pytest.raises(WorldError, match=r"reported the lanes \[0, 0\], and the step has \[0, 1\]"):
        told.receive()


def test_of_many_samples_and_lanes_the_first_are_named():
    """A model that returned NaN for all of 16 lanes of 256 samples filled the terminal with 4,096 numbers."""
    told = message(NUM_LANES)
    told.begin()
    for lane in range(NUM_LANES):
        indices = tuple(range(1000 * lane, 1000 * lane + 100))
        turn = LaneTurn(1, 7, lane, range(100), present=range(NUM_LANES), is_last=lane == NUM_LANES - 1)
        batch = LaneBatch(turn, indices, None, 100)
        told.add(batch, LaneLoss(torch.tensor(math.nan, requires_grad=True), 100.0, 100.0))
    told.send(batch)
    with pytest.raises(NonFiniteLossError) as caught:
        explain(told, told.receive(), turn)
    first, *lanes, rest, remedy = str(caught.value).splitlines()
    assert first == "the loss is not finite in step 8 (epoch 2), so the weights were not updated."
    assert len(lanes) == 8
    assert lanes[1] == f"  lane 1: loss nan, samples {list(range(1000, 1008))} and 92 more"
    assert rest == "  and 32 more of 40 lanes"
    assert remedy == "Look at these samples, or lower the learning rate."


def test_a_mean_over_no_targets_is_told_so():
    """The error said to look at the samples, or to lower the learning rate, where both were right."""
    told = message(2)
    told.begin()
    for lane, targets in enumerate((torch.tensor([0, -100]), torch.tensor([-100, -100]))):
        turn = LaneTurn(9, 0, lane, range(2), present=range(2), is_last=lane == 1)
        batch = LaneBatch(turn, (2 * lane, 2 * lane + 1), None, 2)
        logits = torch.zeros(2, 3, requires_grad=True)
        told.add(batch, LaneLoss(torch.nn.functional.cross_entropy(logits, targets), 2.0, 2.0))
    told.send(batch)
    with pytest.raises(NonFiniteLossError) as caught:
        explain(told, told.receive(), turn)
    _, lane, remedy = str(caught.value).splitlines()
    assert lane == "  lane 1: loss nan, samples [2, 3]"
    assert remedy.startswith(
        "In the lanes [1] it is a mean over no targets. Return lanewise.Loss(sum, weight), "
    )
