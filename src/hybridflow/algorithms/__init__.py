"""The mathematics of reinforcement learning for language models: pure functions, tensors in, tensors out.

Knows neither batches, models nor configuration. Columns are keyword-only arguments named as in the glossary of
batch fields, so that a function's signature says what it reads. The public names are listed in `exports` and imported
when one of them is first used, so that the configuration reads `declarations` without torch.
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
