"""The loop: from a configuration to a trained model."""

from lanewise.engine.build import build_engine
from lanewise.engine.engine import Engine
from lanewise.engine.step import StepReport, TrainStep

__all__ = ["Engine", "StepReport", "TrainStep", "build_engine"]
