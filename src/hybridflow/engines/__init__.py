"""Training engines: the `TrainEngine` Protocol and its implementation in PyTorch, on one process or many."""

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
