"""Metrics of generation and rewards: log-prob mismatch, age of samples, weight sync, lengths, failed rewards."""

from hybridflow.observability.glossary.metric import LIMITS, Metric, spread_of

SAMPLING = {
    "rollout/log_prob_mismatch": Metric(
        "Mean of abs(old_log_probs - rollout_log_probs): trainer against engine.",
        "nats",
        "sum",
        f"Above {LIMITS.log_prob_mismatch}: the engine has other weights or numerics, or samples are too old.",
    ),
    "rollout/log_prob_mismatch_max": Metric(
        "Largest log-prob mismatch of a token.",
        "nats",
        "max",
        "Rises to 10 times its first value: rare tokens get wrong weights; see the mean and the share.",
    ),
    "rollout/log_prob_mismatch_share": Metric(
        "Share of tokens with a log-prob mismatch above 0.1 nats.",
        "1",
        "sum",
        "Rises over steps: trainer and engine diverge.",
    ),
    "rollout/log_prob_kl": Metric(
        "KL of the engine's distribution to the trainer's, estimated by k3.",
        "nats",
        "sum",
        "Above 0.05 and rising: a collapse may follow. 0.07 to 0.18 came before one in a measured run.",
    ),
    "rollout_correction/weight_mean": Metric(
        "Importance weight of the policy loss: mean over tokens.",
        "1",
        worry="Below 0.9 or above 1.1: samples are far from the policy, or bounds cut many weights.",
    ),
    "rollout_correction/weight_max": Metric("Largest importance weight.", "1", "max"),
    "rollout_correction/weight_min": Metric("Smallest importance weight.", "1", "min"),
    "rollout_correction/bounded_share": Metric(
        "Share of tokens whose weight is outside its bounds.",
        "1",
        worry="Above 0.1: the bounds, and no longer the weights, decide; samples are too old.",
    ),
    "rollout_correction/rejected_share": Metric(
        "Share of tokens rejected by a statistic.", "1", worry="Above 0.5: most of the generation is thrown away."
    ),
    "rollout_correction/effective_share": Metric(
        "Effective sample size of the weights divided by their number: 1 if all are equal.",
        "1",
        worry="Below 0.9 and falling: few tokens decide the update. It warns late; see rollout/log_prob_kl.",
    ),
    "staleness/mean": Metric(
        "trainer.lag: optimizer steps between the weights that sampled a token and those before the update: mean.",
        "steps",
        worry="Rises while the score falls: the samples are too old; lower trainer.lag.",
    ),
    "staleness/max": Metric("trainer.lag: the same, largest.", "steps", "max"),
    "staleness/off_policy_updates": Metric(
        "trainer.lag: optimizer steps between the sampling weights and the last mini-batch of the step, largest.",
        "steps",
        "max",
    ),
    "staleness/age_0": Metric("trainer.lag: share of response tokens sampled by weights 0 optimizer steps old.", "1"),
    "staleness/age_1": Metric("trainer.lag: the same, 1 step old.", "1"),
    "staleness/age_2_to_3": Metric("trainer.lag: the same, 2 or 3 steps old.", "1"),
    "staleness/age_4_to_7": Metric("trainer.lag: the same, 4 to 7 steps old.", "1"),
    "staleness/age_8_to_15": Metric("trainer.lag: the same, 8 to 15 steps old.", "1"),
    "staleness/age_16_or_more": Metric("trainer.lag: the same, 16 steps old or older.", "1"),
    "sampling/queue_length": Metric(
        "trainer.lag: batches begun for later steps, when the step takes its own batch.", "count", "last"
    ),
    "sampling/rounds": Metric(
        "Batches of prompts that dynamic sampling generated for this step.",
        "count",
        "max",
        "Rises over steps: ever fewer prompts have differing scores, and generation takes ever longer.",
    ),
    "sampling/differing_groups": Metric(
        "Share of the sampled groups whose scores are not all equal.",
        "1",
        worry=f"Below {1 - LIMITS.zero_variance_groups:.2g}: most of the generation has no learning signal.",
    ),
    "sampling/filled_groups": Metric(
        "Share of the batch's groups whose scores are all equal, added to fill the batch.",
        "1",
        worry="Above 0: the rounds of dynamic sampling do not suffice; the prompts are too easy or too hard.",
    ),
    "weight_sync/bytes": Metric(
        "Weights sent from the trainer to each rollout engine before this step.", "bytes", "max"
    ),
    "weight_sync/bytes_received": Metric(
        "Weights that a rank received from other ranks for its engine in the same process, before this step.",
        "bytes",
        "max",
    ),
    "weight_sync/probe_diff_mean": Metric(
        "After the sync: mean absolute difference of log-probs of engine and trainer on the probe sequences.",
        "nats",
        "max",
        "Rises with the steps: a weight is not updated. Beyond rounding the run stops with an error.",
    ),
    "weight_sync/probe_diff_max": Metric("Largest such difference.", "nats", "max"),
    **spread_of("prompt_length", "Length of a prompt", "tokens"),
    **spread_of(
        "response_length",
        "Length of a response",
        "tokens",
        mean="Near 0, or doubled without a higher score: the reward favors short or long responses.",
    ),
    "response_length/clip_ratio": Metric(
        "Share of responses that reached data.max_response_length.",
        "1",
        worry=f"Above {LIMITS.truncation}: most answers are cut; raise the length, or responses do not stop.",
    ),
    "reward/error_rate": Metric(
        "Share of samples whose reward function failed, without timeouts.",
        "1",
        worry=f"Above {LIMITS.reward_errors}: the policy learns from noise; fix the reward function.",
    ),
    "reward/timeout_rate": Metric(
        "Share of samples whose reward function timed out.",
        "1",
        worry=f"Above {LIMITS.reward_timeouts}: the reward function hangs, or reward.timeout_s is too short.",
    ),
    "reward/zero_rate": Metric(
        "Share of samples with score 0 whose reward function did not fail.",
        "1",
        worry="Near 1: the task is too hard, or the reward function does not recognize right answers.",
    ),
    "reward/unprotected/mean": Metric(
        "Share of the tests of `code_reward` that run in the program's process, where the program can make them pass.",
        "1",
        worry="Above 0: such tests can be cheated; write them as assertions about one value, `assert f(2) == 4`.",
    ),
    "reward/<name>/mean": Metric(
        "Mean of a further number returned by the reward function.",
        "score",
        worry=f"Below {LIMITS.format} for a name with 'format': the policy does not find the format.",
    ),
}
