"""The loop: from a configuration to a trained model.

Names are imported when they are first used: the user's own loop, in this package as well, needs few of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lanewise.engine.build import build_callbacks, build_run, build_run_loader
    from lanewise.engine.dataset import count_samples
    from lanewise.engine.engine import Engine, build_engine
    from lanewise.engine.evaluate import EvalSet, Evaluator, read_in_order
    from lanewise.engine.evaluation import build_evaluator
    from lanewise.engine.lane import LaneLoss, TaskLane, is_out_of_memory, to_device
    from lanewise.engine.micro_batch import find_micro_batch_size
    from lanewise.engine.model import build_model, build_task
    from lanewise.engine.model_transforms import transform
    from lanewise.engine.optimizer import build_optimizer
    from lanewise.engine.resume import resume_run
    from lanewise.engine.run import Run
    from lanewise.engine.saving import Saving
    from lanewise.engine.step import StepReport, Training, TrainStep

__all__ = [
    "Engine",
    "EvalSet",
    "Evaluator",
    "LaneLoss",
    "Run",
    "Saving",
    "StepReport",
    "TaskLane",
    "TrainStep",
    "Training",
    "build_callbacks",
    "build_engine",
    "build_evaluator",
    "build_model",
    "build_optimizer",
    "build_run",
    "build_run_loader",
    "build_task",
    "count_samples",
    "find_micro_batch_size",
    "is_out_of_memory",
    "read_in_order",
    "resume_run",
    "to_device",
    "transform",
]

_MODULES = {
    "Engine": "engine",
    "EvalSet": "evaluate",
    "Evaluator": "evaluate",
    "LaneLoss": "lane",
    "Run": "run",
    "Saving": "saving",
    "StepReport": "step",
    "TaskLane": "lane",
    "TrainStep": "step",
    "Training": "step",
    "build_callbacks": "build",
    "build_engine": "engine",
    "build_evaluator": "evaluation",
    "build_model": "model",
    "build_optimizer": "optimizer",
    "build_run": "build",
    "build_run_loader": "build",
    "build_task": "model",
    "count_samples": "dataset",
    "find_micro_batch_size": "micro_batch",
    "is_out_of_memory": "lane",
    "read_in_order": "evaluate",
    "resume_run": "resume",
    "to_device": "lane",
    "transform": "model_transforms",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"lanewise.engine.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
