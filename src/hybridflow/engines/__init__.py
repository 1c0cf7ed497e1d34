"""Models that learn: the training engine Protocol and its implementation for one process."""

from hybridflow.engines.base import LossFunction, Outputs, TrainEngine, UpdateResult
from hybridflow.engines.torch_engine import TorchEngine

__all__ = ["LossFunction", "Outputs", "TorchEngine", "TrainEngine", "UpdateResult"]
