"""The loop: from a configuration to a trained model."""

from lanewise.engine.build import build_callbacks, build_engine, build_run, build_run_loader
from lanewise.engine.dataset import count_samples
from lanewise.engine.engine import Engine
from lanewise.engine.evaluate import EvalSet, Evaluator, read_in_order
from lanewise.engine.evaluation import build_evaluator
from lanewise.engine.lane import LaneLoss, TaskLane, to_device
from lanewise.engine.micro_batch import find_micro_batch_size
from lanewise.engine.model import build_model, build_task
from lanewise.engine.model_transforms import transform
from lanewise.engine.optimizer import build_optimizer
from lanewise.engine.resume import resume
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
    "read_in_order",
    "resume",
    "to_device",
    "transform",
]
