"""Reinforcement-learning post-training of language models, written as a dataflow.

Public names are imported at their first use, so that `import hybridflow` is fast and does not import torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Threads of torch then sleep while they wait for each other, instead of occupying a core, which slows a step several
# times beside one busy program. OpenMP reads it when torch is first imported, here and in processes started from here.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if TYPE_CHECKING:
    from hybridflow.cli.api import Run, dpo, open_run, reward_model, sft, train
    from hybridflow.config import load_config
    from hybridflow.controller import Dispatch, Execute, Worker, register
    from hybridflow.protocol import DataProto, DataProtoFuture

__all__ = [
    "DataProto",
    "DataProtoFuture",
    "Dispatch",
    "Execute",
    "Run",
    "Worker",
    "dpo",
    "load_config",
    "open_run",
    "register",
    "reward_model",
    "sft",
    "train",
]

_MODULES = {
    "DataProto": "hybridflow.protocol",
    "DataProtoFuture": "hybridflow.protocol",
    "Dispatch": "hybridflow.controller",
    "Execute": "hybridflow.controller",
    "Run": "hybridflow.cli.api",
    "Worker": "hybridflow.controller",
    "dpo": "hybridflow.cli.api",
    "load_config": "hybridflow.config",
    "open_run": "hybridflow.cli.api",
    "register": "hybridflow.controller",
    "reward_model": "hybridflow.cli.api",
    "sft": "hybridflow.cli.api",
    "train": "hybridflow.cli.api",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'hybridflow' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
