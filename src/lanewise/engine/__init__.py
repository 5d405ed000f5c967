"""The loop: from a configuration to a trained model."""

from lanewise.engine.build import build_callbacks, build_engine, build_evaluator, build_model, build_task
from lanewise.engine.engine import Engine
from lanewise.engine.resume import resume
from lanewise.engine.saving import Saving
from lanewise.engine.step import StepReport, TrainStep

__all__ = [
    "Engine",
    "Saving",
    "StepReport",
    "TrainStep",
    "build_callbacks",
    "build_engine",
    "build_evaluator",
    "build_model",
    "build_task",
    "resume",
]
