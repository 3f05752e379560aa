"""One training step, and what it becomes in a graph."""

from graphmod.train.step.step import TrainStep

__all__ = ["TrainStep"]
