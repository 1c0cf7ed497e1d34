"""The table of advantage estimators by configuration name (`algorithm.advantage`).

An estimator takes columns and parameters as keyword-only arguments and returns (advantages, returns).
"""

from collections.abc import Callable

from torch import Tensor

from hybridflow.algorithms.gae import gae_advantages
from hybridflow.algorithms.grpo import grpo_advantages

ADVANTAGES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "gae": gae_advantages,
    "grpo": grpo_advantages,
}
