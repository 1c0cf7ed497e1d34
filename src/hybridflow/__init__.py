"""Reinforcement-learning post-training of language models, written as a dataflow.

Names are imported when they are first used, so that `import hybridflow` is instant and loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hybridflow.config import load_config
    from hybridflow.controller import Dispatch, Execute, Worker, register
    from hybridflow.protocol import DataProto, DataProtoFuture

__all__ = ["DataProto", "DataProtoFuture", "Dispatch", "Execute", "Worker", "load_config", "register"]

_HOMES = {
    "DataProto": "hybridflow.protocol",
    "DataProtoFuture": "hybridflow.protocol",
    "Dispatch": "hybridflow.controller",
    "Execute": "hybridflow.controller",
    "Worker": "hybridflow.controller",
    "load_config": "hybridflow.config",
    "register": "hybridflow.controller",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hybridflow' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
