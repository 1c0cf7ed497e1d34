"""The table of policy losses by configuration name (`actor.policy_loss`).

A policy loss takes columns and parameters as keyword-only arguments and returns a `PolicyLoss`.
"""

from collections.abc import Callable

from hybridflow.algorithms.ppo import ppo_policy_loss
from hybridflow.algorithms.token_losses import PolicyLoss

POLICY_LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "ppo": ppo_policy_loss,
}
