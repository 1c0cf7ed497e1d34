"""Metrics of rewards, advantages and updates in reinforcement learning."""

from hybridflow.observability.glossary.metric import LIMITS, MUCH_PADDING, Metric, spread_of

_GRAD_NORM = "10 times its median, or null (NaN): a bad batch or too large a learning rate."
_LR = "0 after the warm-up: the weights do not change."
_PADDING = f"Above {MUCH_PADDING}: computing is wasted; pack rows (memory.packing)."

LEARNING = {
    "training/epoch": Metric("Epoch of the step's batch, from 0.", "count", "last"),
    **spread_of(
        "critic/score",
        "Score of a response",
        "score",
        mean=f"No rise in 50 steps: no learning signal. Above {LIMITS.solved} of the range of the run's scores: the "
        "task is solved. A sudden rise: read samples, the reward may be exploited.",
        largest="Equal to the smallest: no response differs, so nothing is learned.",
    ),
    **spread_of(
        "critic/rewards",
        "Sum of a response's token rewards, the KL penalty included",
        "score",
        mean="Falls while the score rises: the KL penalty outweighs the score.",
    ),
    **spread_of(
        "critic/advantages",
        "Advantage of a response token",
        "1",
        largest="0, as the smallest: no learning signal. 10 times its median: a few tokens dominate the update.",
    ),
    **spread_of("critic/returns", "Return of a response token", "score"),
    **spread_of(
        "critic/values",
        "Value of a response token",
        "score",
        mean="Outside the range of critic/returns: the critic is wrong, or diverges.",
    ),
    "critic/zero_variance_groups": Metric(
        "Share of groups whose scores are all equal, which have no effect on GRPO.",
        "1",
        worry=f"Above {LIMITS.zero_variance_groups}: prompts are too easy or too hard, or the policy has collapsed.",
    ),
    "critic/kl": Metric(
        "KL penalty in the reward, of the policy from the reference: mean over response tokens.",
        "nats",
        worry=f"Above {LIMITS.kl}: the policy runs away from the reference.",
    ),
    "critic/kl_coeff": Metric(
        "Weight of the KL penalty in this step's rewards.",
        "1",
        "last",
        "Adaptive and 10 times its first value: the KL stays above its target.",
    ),
    "critic/vf_explained_var": Metric(
        "1 - var(returns - values) / var(returns): 1 is a perfect critic.",
        "1",
        worry="Below 0 after the first 100 steps: the critic is worse than a constant. Null: all returns are equal.",
    ),
    "critic/loss": Metric("Loss of the critic.", "score^2", "sum", "Rises for 20 steps: the critic diverges."),
    "critic/clipfrac": Metric(
        "Share of values whose clipped loss is the larger one.",
        "1",
        "sum",
        f"Above {LIMITS.clip_fraction}: values change faster than critic.value_clip allows.",
    ),
    "critic/grad_norm": Metric("Gradient norm of the critic before clipping.", "1", "max", _GRAD_NORM),
    "critic/lr": Metric("Learning rate of the critic's last optimizer step.", "1", "last", _LR),
    "critic/padding_computed": Metric(
        "Share of the tokens computed in the update that are padding.", "1", worry=_PADDING
    ),
    "critic/shared_prompts": Metric(
        "Share of the update's tokens that were not computed, as a prompt is computed once for its group.", "1"
    ),
    "actor/loss": Metric(
        "Total loss of the actor: policy loss, entropy bonus, KL term.", "1", "sum", "Null (NaN): the run has diverged."
    ),
    "actor/policy_loss": Metric("Policy loss without entropy bonus and KL term.", "1", "sum"),
    "actor/kl_loss": Metric(
        "KL term in the loss, before its weight.",
        "nats",
        "sum",
        f"Above {LIMITS.kl}: the policy runs away from the reference.",
    ),
    "actor/teacher_loss": Metric(
        "KL between policy and teacher in the loss, before its weight.",
        "nats",
        "sum",
        "No fall in 50 steps: nothing is learned from the teacher.",
    ),
    "teacher/kl": Metric(
        "Mean of old_log_probs (or rollout_log_probs) - teacher_log_probs: distance to the teacher.",
        "nats",
        worry="No fall in 50 steps: nothing is learned from the teacher.",
    ),
    "actor/entropy": Metric(
        "Entropy of the policy: mean over response tokens.",
        "nats",
        "sum",
        f"Below {LIMITS.entropy} times its first value: collapse, all responses to a prompt are alike. Above 3 times "
        "its first value: responses become noise.",
    ),
    "actor/clipfrac": Metric(
        "Share of tokens whose ratio is clipped.",
        "1",
        "sum",
        f"Above {LIMITS.clip_fraction}: updates too large, or samples too old.",
    ),
    "actor/clipfrac_dual": Metric(
        "Share of tokens bounded by the dual clip.",
        "1",
        "sum",
        "Above 0.01: tokens of bad responses have become much more likely since they were sampled.",
    ),
    "actor/ppo_kl": Metric(
        "Mean of old_log_probs - log_probs: size of this step's policy change.",
        "nats",
        "sum",
        f"Above {LIMITS.policy_change}: updates too large; lower the learning rate or the epochs.",
    ),
    "actor/grad_norm": Metric("Gradient norm of the actor before clipping.", "1", "max", _GRAD_NORM),
    "actor/lr": Metric("Learning rate of the actor's last optimizer step.", "1", "last", _LR),
    "actor/padding_computed": Metric(
        "Share of the tokens computed in the update that are padding.", "1", worry=_PADDING
    ),
    "actor/shared_prompts": Metric(
        "Share of the update's tokens that were not computed, as a prompt is computed once for its group.", "1"
    ),
}
