"""The table of advantage estimators by configuration name (`algorithm.advantage`).

An estimator takes columns and parameters as keyword-only arguments and returns (advantages, returns).
"""

from collections.abc import Callable

from torch import Tensor

from hybridflow.algorithms.distillation import distillation_advantages, no_advantages
from hybridflow.algorithms.gae import gae_advantages
from hybridflow.algorithms.gdpo import gdpo_advantages
from hybridflow.algorithms.gpg import gpg_advantages
from hybridflow.algorithms.grpo import grpo_advantages
from hybridflow.algorithms.opo import opo_advantages
from hybridflow.algorithms.optimal_token_baseline import optimal_token_baseline_advantages
from hybridflow.algorithms.pass_at_k import pass_at_k_advantages
from hybridflow.algorithms.reinforce_plus_plus import (
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
)
from hybridflow.algorithms.remax import remax_advantages
from hybridflow.algorithms.rloo import rloo_advantages

ADVANTAGES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "gae": gae_advantages,
    "grpo": grpo_advantages,
    "rloo": rloo_advantages,
    "reinforce++": reinforce_plus_plus_advantages,
    "reinforce++-baseline": reinforce_plus_plus_baseline_advantages,
    "remax": remax_advantages,
    "opo": opo_advantages,
    "gpg": gpg_advantages,
    "pass@k": pass_at_k_advantages,
    "gdpo": gdpo_advantages,
    "optimal-token-baseline": optimal_token_baseline_advantages,
    "distillation": distillation_advantages,
    "none": no_advantages,
}
