"""Models that learn: the training engine Protocol and its implementation, on one process or many."""

from hybridflow.engines.base import LossFunction, Outputs, TrainEngine, UpdateResult
from hybridflow.engines.process_group import join_process_group
from hybridflow.engines.torch_engine import TorchEngine

__all__ = [
    "LossFunction",
    "Outputs",
    "TorchEngine",
    "TrainEngine",
    "UpdateResult",
    "join_process_group",
]
