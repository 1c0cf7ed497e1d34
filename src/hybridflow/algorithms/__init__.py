"""The mathematics of reinforcement learning for language models: pure functions, tensors in, tensors out.

Knows nothing of batches, models or configuration. Columns are keyword-only arguments named as in the glossary of
batch fields, so that a function's signature states which columns it reads. `exports` lists the public names and is
imported at first use, so that the configuration can read `declarations` without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridflow.algorithms.exports import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        exports = import_module("hybridflow.algorithms.exports")
        if name != "__all__" and name not in exports.__all__:
            raise AttributeError(f"module 'hybridflow.algorithms' has no attribute {name!r}")
        return getattr(exports, name)

    def __dir__() -> list[str]:
        return sorted([*globals(), *__getattr__("__all__")])
