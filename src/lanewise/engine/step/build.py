"""Builds the pass over the lanes of a model."""

from collections.abc import Callable

from lanewise.engine.buffers.buffers import LaneBuffers
from lanewise.engine.precision import LossScale
from lanewise.engine.step.guard.changed_parameters import ChangedParameters, held_parameters
from lanewise.engine.step.guard.collectives import CollectiveDetector
from lanewise.engine.step.guard.equal_state import EqualState
from lanewise.engine.step.guard.first_step import FirstStep
from lanewise.engine.step.guard.foreign_gradients import ForeignGradients, TrainedParameters
from lanewise.engine.step.guard.foreign_leaves import ForeignLeaves
from lanewise.engine.step.guard.look import Look
from lanewise.engine.step.guard.second_run import SecondRun
from lanewise.engine.step.guard.shared_generators import SharedGenerators
from lanewise.engine.step.joining import Joining
from lanewise.engine.step.judgement import Judgement
from lanewise.engine.step.message import StepMessage
from lanewise.engine.step.metrics import LogInterval
from lanewise.engine.step.own_update import own_updates
from lanewise.engine.step.phases import Phases
from lanewise.engine.step.step import Pass
from lanewise.engine.step.wire import Spread, Votes
from lanewise.lanes import LaneTurn
from lanewise.reduce import Reducer
from lanewise.task import Task


def build_pass(
    reducer: Reducer,
    spread: Spread,
    phases: Phases,
    buffers: LaneBuffers,
    *,
    loss_scale: LossScale | None,
    task: Task | None = None,
    log: LogInterval | None = None,
    vote: Callable[[], Votes] = Votes,
) -> Pass:
    """Build it, with all that is looked at in the first steps.

    Args:
        reducer: has the model, and sums the gradients.
        spread: which process carries which lanes.
        phases: measures the phases of the step.
        buffers: gives the lanes their buffers, and merges these.
        loss_scale: keeps fp16 gradients in range; None where losses are not scaled.
        task: of the run, which may hold state besides the model.
        log: tells which steps are logged; None: none is.
        vote: returns what this process wants after a step.
    """
    world, placement, equality = spread.world, spread.placement, spread.equality
    collectives = CollectiveDetector(reducer, world, placement, equality)
    holders: dict[str, object] = {} if task is None else {"task": task}
    held = held_parameters(reducer.model, holders)
    looks: list[Look] = [
        collectives,
        ForeignGradients(reducer),
        ChangedParameters(reducer, world, held),
        ForeignLeaves(reducer, buffers.modules[0], held),
        FirstStep(reducer, world),
        EqualState(reducer, world, buffers.step_state),
        SecondRun(reducer, buffers, equality, holders),
    ]
    if len(reducer.replicas) > 1:
        looks.append(SharedGenerators(equality, reducer))
    rules: list[Callable[[LaneTurn], None]] = [TrainedParameters(reducer)]
    if world.world_size > 1:
        rules.append(collectives.require_even)
    joining = Joining(reducer, world, placement, is_on=task is not None and bool(own_updates(task)))
    names = () if log is None else log.metric_names
    judgement = Judgement(spread, joining)
    message = StepMessage(spread, loss_scale, names, joining=joining, judgement=judgement)
    return Pass(reducer, spread, buffers, phases, message, judgement, rules, looks, log, vote)
