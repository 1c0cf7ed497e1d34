"""Settings of TRL's GRPOTrainer that give the loss and the update of a configuration of hybridflow."""

from typing import Any

from hybridflow.config import Config
from support.errors import BenchmarkError

LOSS_TYPES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}
"""Our loss aggregation -> the loss type of TRL with the same denominator."""


def trl_settings(config: Config) -> dict[str, Any]:
    """Return keyword arguments of GRPOConfig.

    Where the defaults of the two differ, TRL gets our formula: `delta` is our dual clip, and the KL term is multiplied
    by the probability ratio, TRL's default, only with `algorithm.kl_importance_weight`. Raises BenchmarkError for a
    configuration that TRL cannot compute.
    """
    actor, optimizer = config.actor, config.actor.optimizer
    if actor.loss_aggregation not in LOSS_TYPES:
        raise BenchmarkError(
            f"actor.loss_aggregation={actor.loss_aggregation!r} has no equal in TRL; use {', '.join(LOSS_TYPES)}."
        )
    if (optimizer.schedule, optimizer.warmup_steps) != ("constant", 0):
        raise BenchmarkError(
            f"actor.optimizer.schedule={optimizer.schedule!r} with warmup_steps={optimizer.warmup_steps} cannot be "
            "compared with TRL; use schedule = 'constant' and warmup_steps = 0."
        )
    return {
        "temperature": config.rollout.temperature,
        "loss_type": LOSS_TYPES[actor.loss_aggregation],
        "epsilon": actor.clip_ratio_low,
        "epsilon_high": actor.clip_ratio_high,
        "delta": actor.clip_ratio_dual,
        "beta": config.algorithm.kl_coef if config.algorithm.kl_in_loss else 0.0,
        "use_bias_correction_kl": config.algorithm.kl_importance_weight,
        "max_completion_length": config.data.max_response_length,
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.clip_grad_norm,
    }
