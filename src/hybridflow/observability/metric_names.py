"""The glossary of metrics: the meaning of each name and the reduction of its values over ranks."""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Reduction = Literal["sum", "mean", "max", "min", "last"]


@dataclass(frozen=True)
class Metric:
    """A metric. `reduction` joins the values of the ranks; ranks report their part of a global mean, so it is a sum."""

    description: str
    reduction: Reduction = "mean"


def _spread(name: str, what: str) -> dict[str, Metric]:
    return {
        f"{name}/mean": Metric(f"{what}: mean."),
        f"{name}/max": Metric(f"{what}: largest.", "max"),
        f"{name}/min": Metric(f"{what}: smallest.", "min"),
    }


METRICS: dict[str, Metric] = {
    "training/epoch": Metric("Epoch of the step's batch, from 0.", "last"),
    **_spread("critic/score", "Score of a response"),
    **_spread("critic/rewards", "Sum of a response's token rewards, the KL penalty included"),
    **_spread("critic/advantages", "Advantage of a response token"),
    **_spread("critic/returns", "Return of a response token"),
    **_spread("critic/values", "Value of a response token"),
    "critic/zero_variance_groups": Metric("Share of groups whose scores are all equal, which have no effect on GRPO."),
    "critic/kl": Metric("KL penalty in the reward, of the policy from the reference: mean over response tokens."),
    "critic/kl_coeff": Metric("Weight of the KL penalty in this step's rewards.", "last"),
    "critic/vf_explained_var": Metric("1 - var(returns - values) / var(returns): 1 is a perfect critic."),
    "critic/loss": Metric("Loss of the critic.", "sum"),
    "critic/clipfrac": Metric("Share of values whose clipped loss is the larger one.", "sum"),
    "critic/grad_norm": Metric("Gradient norm of the critic before clipping.", "max"),
    "critic/lr": Metric("Learning rate of the critic's last optimizer step.", "last"),
    "critic/padding_computed": Metric("Share of the tokens computed in the update that are padding."),
    "critic/shared_prompts": Metric(
        "Share of the update's tokens that were not computed, as a prompt is computed once for its group."
    ),
    "actor/loss": Metric("Total loss of the actor: policy loss, entropy bonus, KL term.", "sum"),
    "actor/policy_loss": Metric("Policy loss without entropy bonus and KL term.", "sum"),
    "actor/kl_loss": Metric("KL term in the loss, before its weight.", "sum"),
    "actor/teacher_loss": Metric("KL between policy and teacher in the loss, before its weight.", "sum"),
    "teacher/kl": Metric("Mean of old_log_probs (or rollout_log_probs) - teacher_log_probs: distance to the teacher."),
    "actor/entropy": Metric("Entropy of the policy: mean over response tokens.", "sum"),
    "actor/clipfrac": Metric("Share of tokens whose ratio is clipped.", "sum"),
    "actor/clipfrac_dual": Metric("Share of tokens bounded by the dual clip.", "sum"),
    "actor/ppo_kl": Metric("Mean of old_log_probs - log_probs: size of this step's policy change.", "sum"),
    "actor/grad_norm": Metric("Gradient norm of the actor before clipping.", "max"),
    "actor/lr": Metric("Learning rate of the actor's last optimizer step.", "last"),
    "actor/padding_computed": Metric("Share of the tokens computed in the update that are padding."),
    "actor/shared_prompts": Metric(
        "Share of the update's tokens that were not computed, as a prompt is computed once for its group."
    ),
    "rollout/log_prob_mismatch": Metric(
        "Mean of abs(old_log_probs - rollout_log_probs): trainer against engine.", "sum"
    ),
    "rollout/log_prob_mismatch_max": Metric("Largest log-prob mismatch of a token.", "max"),
    "rollout/log_prob_mismatch_share": Metric("Share of tokens with a log-prob mismatch above 0.1.", "sum"),
    "rollout/log_prob_kl": Metric("KL of the engine's distribution to the trainer's, estimated by k3.", "sum"),
    "rollout_correction/weight_mean": Metric("Importance weight of the policy loss: mean over tokens."),
    "rollout_correction/weight_max": Metric("Largest importance weight.", "max"),
    "rollout_correction/weight_min": Metric("Smallest importance weight.", "min"),
    "rollout_correction/bounded_share": Metric("Share of tokens whose weight is outside its bounds."),
    "rollout_correction/rejected_share": Metric("Share of tokens rejected by a statistic."),
    "rollout_correction/effective_share": Metric(
        "Effective sample size of the weights divided by their number: 1 if all are equal."
    ),
    "staleness/mean": Metric(
        "trainer.lag: optimizer steps between the weights that sampled a token and those before the update, mean."
    ),
    "staleness/max": Metric("trainer.lag: the same, largest.", "max"),
    "staleness/off_policy_updates": Metric(
        "trainer.lag: optimizer steps between the sampling weights and the last mini-batch of the step, largest.", "max"
    ),
    "staleness/age_0": Metric("trainer.lag: share of response tokens sampled by weights 0 optimizer steps old."),
    "staleness/age_1": Metric("trainer.lag: the same, 1 step old."),
    "staleness/age_2_to_3": Metric("trainer.lag: the same, 2 or 3 steps old."),
    "staleness/age_4_to_7": Metric("trainer.lag: the same, 4 to 7 steps old."),
    "staleness/age_8_to_15": Metric("trainer.lag: the same, 8 to 15 steps old."),
    "staleness/age_16_or_more": Metric("trainer.lag: the same, 16 steps old or older."),
    "ready/late_share": Metric(
        "rollout.order = ready: share of the batch's groups that began for the batch of an earlier step."
    ),
    "ready/compared_batches": Metric(
        "rollout.order = ready: number m of batches that the next three compare; at most one more with each step, when "
        "all groups of the first m batches begun were trained on.",
        "last",
    ),
    "ready/length_trained": Metric(
        "rollout.order = ready: mean response length over the first m batches trained on, in tokens.", "last"
    ),
    "ready/length_begun": Metric(
        "rollout.order = ready: mean response length over the first m batches begun, in tokens.", "last"
    ),
    "ready/tokens_behind": Metric(
        "rollout.order = ready: response tokens of the first m batches begun minus those of the first m trained on.",
        "last",
    ),
    "sampling/queue_length": Metric(
        "trainer.lag: batches begun for later steps, when the step takes its own batch.", "last"
    ),
    "sampling/lent_groups": Metric(
        "placement.lend: groups of the batch that training ranks generated while they waited for it."
    ),
    "sampling/rounds": Metric("Batches of prompts that dynamic sampling generated for this step.", "max"),
    "sampling/differing_groups": Metric("Share of the sampled groups whose scores are not all equal."),
    "sampling/filled_groups": Metric(
        "Share of the batch's groups whose scores are all equal, added to fill the batch.", "mean"
    ),
    "weight_sync/bytes": Metric(
        "Bytes of weights sent from the trainer to each rollout engine before this step.", "max"
    ),
    "weight_sync/bytes_received": Metric(
        "Bytes that a rank received from other ranks for its engine in the same process, before this step.", "max"
    ),
    "weight_sync/probe_diff_mean": Metric(
        "After the sync: mean absolute difference of log-probs of engine and trainer on the probe sequences.", "max"
    ),
    "weight_sync/probe_diff_max": Metric("Largest such difference.", "max"),
    **_spread("prompt_length", "Tokens of a prompt"),
    **_spread("response_length", "Tokens of a response"),
    "response_length/clip_ratio": Metric("Share of responses that reached data.max_response_length."),
    "reward/error_rate": Metric("Share of samples whose reward function failed, without timeouts."),
    "reward/timeout_rate": Metric("Share of samples whose reward function timed out."),
    "reward/zero_rate": Metric("Share of samples with score 0 whose reward function did not fail."),
    "reward/<name>/mean": Metric("Mean of a further number returned by the reward function."),
    "timing_s/queue_wait": Metric(
        "trainer.lag: seconds between the end of generation of the step's batch and the step; 0 if the step waited for "
        "it; absent for a batch restored from a checkpoint.",
        "max",
    ),
    "timing_s/<stage>": Metric(
        "Seconds of a stage: step, weight_sync (between pools with the wait for running generation), gen, reward, "
        "old_log_probs, ref_log_probs, teacher, values, update_critic, update_actor, update_sft, update_dpo, "
        "compute_scores, update_reward_model, validation; for a call, the time in which at least one rank ran it.",
        "max",
    ),
    "timing_per_token_ms/<stage>": Metric("Milliseconds of a stage per token that it processed.", "max"),
    "parts/<stage>": Metric(
        'Smallest part of the rows in a stage, relative to an equal one (controller.parts = "measured"); 1: all equal.'
    ),
    "processes/<pool>": Metric("Number of processes of a pool whose size may change (placement.min_processes)."),
    "schedule/length_error": Metric(
        "Mean distance of the expected from the mean response length of a prompt, by the mean length "
        '(rollout.schedule = "expected").'
    ),
    "schedule/imbalance_even": Metric(
        "Relative extra tokens of the rollout engine with the most, if each got equally many prompts: max / mean - 1."
    ),
    "schedule/imbalance": Metric('The same for the prompts that each engine got (rollout.schedule = "expected").'),
    "balance/imbalance_before": Metric(
        "Relative extra time of the slowest rank if rows kept the order of generation: max / mean - 1 of the model's "
        "cost, mean over mini-batches or, with trainer.stream, over parts.",
        "mean",
    ),
    "balance/imbalance_after": Metric("The same for the order of rows after balancing (controller.balance).", "mean"),
    "perf/num_tokens": Metric("Tokens of prompts and responses in the step.", "sum"),
    "perf/tokens_per_s": Metric("perf/num_tokens per second of the step.", "sum"),
    "perf/<stage>_tokens_per_s": Metric(
        "Tokens processed per second of a stage: response tokens for gen, all tokens for the others.", "sum"
    ),
    "perf/<role>_idle_share": Metric(
        "Share of the step's time in which the processes of a role ran no call; the roles of a pool share its "
        "processes. On the local backend the ranks take turns, so that each waits for the others."
    ),
    "perf/<role>_compilations": Metric(
        "Graphs that torch.compile compiled in a role's processes since its last update: 0 after the first steps, as "
        "one graph serves all numbers of tokens; 0 without model.compile.",
        "max",
    ),
    "mfu/<role>": Metric(
        "Model FLOPs utilization of a role's update (mfu/gen: of generation): model FLOPs, attention included and a "
        "prompt counted once for its group, as a share of the matrix-product peak of the role's ranks together, each "
        "measured on its device when the run starts (matmul_peak_flops_per_s in run.json). Null above 1: the peak was "
        "measured under load."
    ),
    "transfer/bytes_flowed": Metric("Bytes of batches that workers read and wrote.", "sum"),
    "transfer/bytes_sent": Metric("Bytes of batches that the controller sent.", "sum"),
    "transfer/bytes_read": Metric("Bytes of batches that the controller read.", "sum"),
    "transfer/seconds": Metric("Seconds of packing, unpacking, sending and reading, summed over processes.", "sum"),
    "recovery/failures": Metric("Failures since the last row that the run recovered from.", "sum"),
    "recovery/repeated_steps": Metric("Completed steps that were repeated after these failures.", "sum"),
    "recovery/time_s": Metric("Seconds from these failures until the run could go on.", "sum"),
    "recovery/slow_ranks": Metric(
        "Ranks found much slower than their peers; only in the row of a slow step after which ranks were measured.",
        "sum",
    ),
    "memory_bytes/<kind>": Metric(
        "Memory of the controller's process: resident, peak_resident; on CUDA cuda_allocated, cuda_reserved, ...",
        "max",
    ),
    "val/score/mean": Metric("Score of a validation sample: mean."),
    "val/accuracy": Metric("Share of validation samples with a score of at least 1."),
    "val/<data_source>/score/mean": Metric("val/score/mean for one data source."),
    "val/<data_source>/accuracy": Metric("val/accuracy for one data source."),
    "val/pass@<k>": Metric("Share of prompts solved by at least one of k samples."),
    "val/maj@<k>": Metric("Share of prompts whose most frequent answer among k samples is correct."),
    "val/<share>/ci95": Metric(
        "Half-width of the 95% confidence interval of a share (accuracy, pass@k, maj@k, for all data or one source), "
        "from its standard error over prompts."
    ),
    "val/<data_source>/pass@<k>": Metric("val/pass@<k> for one data source."),
    "val/<data_source>/maj@<k>": Metric("val/maj@<k> for one data source."),
    "val/response_length/mean": Metric("Tokens of a validation response: mean."),
    "sft/loss": Metric("Cross-entropy per response token.", "sum"),
    "sft/grad_norm": Metric("Gradient norm before clipping.", "max"),
    "sft/lr": Metric("Learning rate of the step.", "last"),
    "sft/padding_computed": Metric("Share of the tokens computed in the update that are padding."),
    "sft/val_loss": Metric("Cross-entropy per response token of the validation data.", "sum"),
    "dpo/loss": Metric("Loss of a pair: mean."),
    "dpo/accuracy": Metric("Share of pairs whose chosen response has the higher reward."),
    "dpo/margin": Metric("Reward of the chosen response minus that of the rejected one: mean over pairs."),
    "dpo/chosen_reward": Metric("beta * log(policy / reference) of the chosen responses: mean."),
    "dpo/rejected_reward": Metric("beta * log(policy / reference) of the rejected responses: mean."),
    "dpo/grad_norm": Metric("Gradient norm before clipping.", "max"),
    "dpo/lr": Metric("Learning rate of the step.", "last"),
    "dpo/padding_computed": Metric("Share of the tokens computed in the update that are padding."),
    "dpo/val_loss": Metric("Loss of a validation pair: mean."),
    "dpo/val_accuracy": Metric("Share of validation pairs whose chosen response has the higher reward."),
    "reward_model/loss": Metric("Loss of a pair: mean."),
    "reward_model/accuracy": Metric("Share of pairs whose chosen response has the higher score."),
    "reward_model/margin": Metric("Score of the chosen response minus that of the rejected one: mean over pairs."),
    "reward_model/chosen_score": Metric("Score of the chosen responses: mean."),
    "reward_model/rejected_score": Metric("Score of the rejected responses: mean."),
    "reward_model/grad_norm": Metric("Gradient norm before clipping.", "max"),
    "reward_model/lr": Metric("Learning rate of the step.", "last"),
    "reward_model/padding_computed": Metric("Share of the tokens computed in the update that are padding."),
    "reward_model/val_loss": Metric("Loss of a validation pair: mean."),
    "reward_model/val_accuracy": Metric("Share of validation pairs whose chosen response has the higher score."),
}


def find_metric(name: str) -> Metric | None:
    """Return the entry of `name`, or the first with matching placeholders (`timing_s/<stage>`), or None."""
    if name in METRICS:
        return METRICS[name]
    return next((metric for pattern, metric in METRICS.items() if _matches(name, pattern)), None)


def metrics_markdown() -> str:
    """Return the glossary as a Markdown table."""
    rows = [f"| `{name}` | {metric.description} | {metric.reduction} |" for name, metric in METRICS.items()]
    return "\n".join(["| name | meaning | over ranks |", "|---|---|---|", *rows]) + "\n"


def _matches(name: str, pattern: str) -> bool:
    return "<" in pattern and fnmatchcase(name, re.sub("<[^>]+>", "*", pattern))
