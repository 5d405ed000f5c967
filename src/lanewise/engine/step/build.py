"""Builds the pass over the lanes of a model."""

from collections.abc import Callable, Collection, Sequence

from torch import nn

from lanewise.config import Equality
from lanewise.engine.buffers.buffers import LaneBuffers, StepState
from lanewise.engine.buffers.pack import find_places
from lanewise.engine.precision import LossScale
from lanewise.engine.step.after_update import has_after_update
from lanewise.engine.step.guard.attributes import Attributes
from lanewise.engine.step.guard.changed_parameters import ChangedParameters, held_parameters
from lanewise.engine.step.guard.collectives import CollectiveDetector
from lanewise.engine.step.guard.first_step import FirstStep
from lanewise.engine.step.guard.foreign_gradients import ForeignGradients, TrainedParameters
from lanewise.engine.step.guard.foreign_leaves import ForeignLeaves
from lanewise.engine.step.guard.look import Look
from lanewise.engine.step.guard.shared_generators import SharedGenerators
from lanewise.engine.step.joining import Joining
from lanewise.engine.step.lanes import LaneFeed
from lanewise.engine.step.message import StepMessage
from lanewise.engine.step.phases import Phases
from lanewise.engine.step.step import Pass
from lanewise.lanes import LaneTurn, Placement
from lanewise.processes.world.world import World
from lanewise.reduce import Reducer
from lanewise.task import Task


def build_pass(  # noqa: PLR0913 - the parts of a run, as arguments
    reducer: Reducer,
    world: World,
    phases: Phases,
    *,
    placement: Placement,
    equality: Equality,
    loss_scale: LossScale | None,
    modules: Sequence[Collection[nn.Module]],
    metric_names: Collection[str] = (),
    task: Task | None = None,
    step_state: StepState = (),
) -> Pass:
    """Build it, with all that is looked at in the first steps.

    Args:
        reducer: has the model, and sums the gradients.
        world: the processes.
        phases: measures the phases of the step.
        placement: which process carries which lanes.
        equality: the grade that the run promises.
        loss_scale: keeps fp16 gradients in range; None where losses are not scaled.
        modules: for each replica, all modules whose forward runs in a lane; their buffers are merged. Modules
            may be added until the first step.
        metric_names: names of metrics that losses reported before the run was resumed.
        task: of the run; its attributes are looked at in the first steps, as the model's are.
        step_state: without a task, which buffers no lane writes; see `LaneBuffers`.
    """
    collectives = CollectiveDetector(reducer, world, placement, equality)
    holders: dict[str, object] = {} if task is None else {"task": task}
    held = held_parameters(reducer.replicas[0], holders)
    if task is not None:
        step_state = [find_places(replica, task.step_state) for replica in reducer.replicas]
    looks: list[Look] = [
        collectives,
        ForeignGradients(reducer),
        ChangedParameters(reducer, world, held),
        ForeignLeaves(reducer, modules[0], held),
        FirstStep(reducer, world),
        attributes := Attributes(reducer, world, holders, step_state),
    ]
    if len(reducer.replicas) > 1:
        looks.append(SharedGenerators(equality, reducer))
    rules: list[Callable[[LaneTurn], None]] = [TrainedParameters(reducer)]
    if world.world_size > 1:
        rules.append(collectives.require_even)
    buffers = LaneBuffers(modules, world, placement, step_state)
    feed = LaneFeed(reducer, world, buffers, phases, rules, looks, attributes)
    joining = Joining(reducer, world, placement, is_on=task is not None and has_after_update(task))
    return Pass(feed, StepMessage(world, placement, loss_scale, metric_names, equality, joining=joining))
