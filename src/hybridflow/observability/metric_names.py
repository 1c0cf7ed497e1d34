"""The glossary of metrics: what each name means and how the values of several ranks become one."""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Reduction = Literal["sum", "mean", "max", "min", "last"]


@dataclass(frozen=True)
class Metric:
    """`reduction` joins the values of the ranks: a share of a global mean adds up, so it is a sum."""

    description: str
    reduction: Reduction = "mean"


def _spread(name: str, what: str) -> dict[str, Metric]:
    return {
        f"{name}/mean": Metric(f"{what}: mean."),
        f"{name}/max": Metric(f"{what}: largest.", "max"),
        f"{name}/min": Metric(f"{what}: smallest.", "min"),
    }


METRICS: dict[str, Metric] = {
    "training/epoch": Metric("Pass over the training data that the step's batch is of, from 0.", "last"),
    **_spread("critic/score", "Score of a response"),
    **_spread("critic/rewards", "Sum of a response's token rewards, the KL penalty included"),
    **_spread("critic/advantages", "Advantage of a response token"),
    **_spread("critic/returns", "Return of a response token"),
    **_spread("critic/values", "Value of a response token"),
    "critic/zero_variance_groups": Metric("Share of groups whose scores are all equal: they teach GRPO nothing."),
    "critic/kl": Metric("KL in the reward, of the policy from the reference: mean over response tokens."),
    "critic/kl_coeff": Metric("Weight of the KL in this step's rewards.", "last"),
    "critic/vf_explained_var": Metric("1 - var(returns - values) / var(returns): 1 is a perfect critic."),
    "critic/loss": Metric("Loss of the critic.", "sum"),
    "critic/clipfrac": Metric("Share of values whose clipped loss was the larger one.", "sum"),
    "critic/grad_norm": Metric("Gradient norm of the critic before clipping.", "max"),
    "critic/lr": Metric("Learning rate of the critic's last optimizer step.", "last"),
    "critic/padding_computed": Metric("Share of the tokens computed in the update that were padding."),
    "critic/shared_prompts": Metric(
        "Share of the update's tokens that were not computed, as a prompt is once for all."
    ),
    "actor/loss": Metric("Whole loss of the actor: policy loss, entropy bonus, KL term.", "sum"),
    "actor/policy_loss": Metric("The policy objective alone.", "sum"),
    "actor/kl_loss": Metric("KL term in the loss, before its weight.", "sum"),
    "actor/teacher_loss": Metric("KL between policy and teacher in the loss, before its weight.", "sum"),
    "teacher/kl": Metric("Mean of old_log_probs (or the rollout's) - teacher_log_probs: how far the teacher is."),
    "actor/entropy": Metric("Entropy of the policy: mean over response tokens.", "sum"),
    "actor/clipfrac": Metric("Share of tokens whose ratio was clipped.", "sum"),
    "actor/clipfrac_dual": Metric("Share of tokens bounded by the dual clip.", "sum"),
    "actor/ppo_kl": Metric("Mean of old_log_probs - log_probs: how far this step's updates went.", "sum"),
    "actor/grad_norm": Metric("Gradient norm of the actor before clipping.", "max"),
    "actor/lr": Metric("Learning rate of the actor's last optimizer step.", "last"),
    "actor/padding_computed": Metric("Share of the tokens computed in the update that were padding."),
    "actor/shared_prompts": Metric("Share of the update's tokens that were not computed, as a prompt is once for all."),
    "rollout/log_prob_mismatch": Metric("Mean of |old_log_probs - rollout_log_probs|: trainer against engine.", "sum"),
    "rollout/log_prob_mismatch_max": Metric("The largest of them.", "max"),
    "rollout/log_prob_mismatch_share": Metric("Share of tokens where it is above 0.1.", "sum"),
    "rollout/log_prob_kl": Metric("KL of the engine's distribution to the trainer's, estimated by k3.", "sum"),
    "rollout_correction/weight_mean": Metric("Mean over tokens of what their policy loss is multiplied with."),
    "rollout_correction/weight_max": Metric("The largest of these weights.", "max"),
    "rollout_correction/weight_min": Metric("The smallest of these weights.", "min"),
    "rollout_correction/bounded_share": Metric("Share of tokens whose weight was outside of its bounds."),
    "rollout_correction/rejected_share": Metric("Share of tokens that a statistic rejected."),
    "rollout_correction/effective_share": Metric(
        "Effective sample size of the weights over their number: 1 where all are equal."
    ),
    "sampling/rounds": Metric("Batches of prompts that dynamic sampling took for this step.", "max"),
    "sampling/differing_groups": Metric("Share of the sampled groups whose scores are not all equal."),
    "sampling/filled_groups": Metric("Share of the batch that groups without a difference fill.", "mean"),
    "weight_sync/bytes": Metric("Weights that went from the trainer to each rollout engine before this step.", "max"),
    "weight_sync/probe_diff_mean": Metric(
        "After the sync: mean |log-prob| difference of engine and trainer on the probe sequences.", "max"
    ),
    "weight_sync/probe_diff_max": Metric("The largest of them.", "max"),
    **_spread("prompt_length", "Tokens of a prompt"),
    **_spread("response_length", "Tokens of a response"),
    "response_length/clip_ratio": Metric("Share of responses that reached data.max_response_length."),
    "reward/error_rate": Metric("Share of samples whose reward function failed, time-outs apart."),
    "reward/timeout_rate": Metric("Share of samples whose reward function took too long."),
    "reward/zero_rate": Metric("Share of samples that score 0 though the function did not fail."),
    "reward/<name>/mean": Metric("Mean of a further number that the reward function returned."),
    "timing_s/<stage>": Metric(
        "Seconds of a stage: step, weight_sync, gen, reward, old_log_probs, ref_log_probs, teacher, values, "
        "update_critic, update_actor, update_sft, update_dpo, compute_scores, update_reward_model, validation; of "
        "a call, while at least one rank was in it.",
        "max",
    ),
    "timing_per_token_ms/<stage>": Metric("Milliseconds of a stage for each token it handled.", "max"),
    "balance/imbalance_before": Metric(
        "How much longer the slowest rank would compute than the mean if rows stayed as they were generated: "
        "max / mean - 1 of the model's cost, the mean over mini-batches.",
        "mean",
    ),
    "balance/imbalance_after": Metric("The same as the rows were dealt out (controller.balance).", "mean"),
    "perf/num_tokens": Metric("Tokens of prompts and responses in the step.", "sum"),
    "perf/tokens_per_s": Metric("perf/num_tokens for each second of the step.", "sum"),
    "perf/<stage>_tokens_per_s": Metric(
        "Tokens that a stage handled for each of its seconds: response tokens of gen, all tokens of the others.", "sum"
    ),
    "mfu/<role>": Metric(
        "Model FLOPs of a role's update, attention included and a prompt counted once for its group, as a share of the "
        "matrix product's peak, measured when the run starts (matmul_peak_flops_per_s in run.json); null above 1: "
        "the peak was then measured under load or on another device. mfu/gen: of generation."
    ),
    "transfer/bytes_flowed": Metric("Bytes of batches that workers took in and gave out.", "sum"),
    "transfer/bytes_sent": Metric("Bytes of batches that the controller sent.", "sum"),
    "transfer/bytes_read": Metric("Bytes of batches that the controller read.", "sum"),
    "transfer/seconds": Metric("Seconds of packing, unpacking, sending and reading, all processes added up.", "sum"),
    "memory_bytes/<kind>": Metric(
        "Memory of the controller's process: resident, peak_resident; on CUDA cuda_allocated, cuda_reserved, ...",
        "max",
    ),
    "val/score/mean": Metric("Score over all validation samples: mean."),
    "val/accuracy": Metric("Share of validation samples with a score of at least 1."),
    "val/<data_source>/score/mean": Metric("The same for one data source: mean score."),
    "val/<data_source>/accuracy": Metric("The same for one data source: share with a score of at least 1."),
    "val/pass@<k>": Metric("Share of prompts solved by at least one of k samples."),
    "val/maj@<k>": Metric("Share of prompts whose most frequent answer among k samples is correct."),
    "val/<share>/ci95": Metric(
        "Half the width of the 95% interval of a share (accuracy, pass@k, maj@k, of all data or of one source), by its "
        "standard error over prompts."
    ),
    "val/<data_source>/pass@<k>": Metric("The same for one data source."),
    "val/<data_source>/maj@<k>": Metric("The same for one data source."),
    "val/response_length/mean": Metric("Tokens of a validation response: mean."),
    "sft/loss": Metric("Cross-entropy for each response token.", "sum"),
    "sft/grad_norm": Metric("Gradient norm before clipping.", "max"),
    "sft/lr": Metric("Learning rate of the step.", "last"),
    "sft/padding_computed": Metric("Share of the tokens computed in the update that were padding."),
    "sft/val_loss": Metric("Cross-entropy for each response token of the validation data.", "sum"),
    "dpo/loss": Metric("Loss of a pair: mean."),
    "dpo/accuracy": Metric("Share of pairs whose better response has the higher reward."),
    "dpo/margin": Metric("Reward of the better response less that of the worse: mean over pairs."),
    "dpo/chosen_reward": Metric("beta * log(policy / reference) of the better responses: mean."),
    "dpo/rejected_reward": Metric("beta * log(policy / reference) of the worse responses: mean."),
    "dpo/grad_norm": Metric("Gradient norm before clipping.", "max"),
    "dpo/lr": Metric("Learning rate of the step.", "last"),
    "dpo/padding_computed": Metric("Share of the tokens computed in the update that were padding."),
    "dpo/val_loss": Metric("Loss of a validation pair: mean."),
    "dpo/val_accuracy": Metric("Share of validation pairs whose better response has the higher reward."),
    "reward_model/loss": Metric("Loss of a pair: mean."),
    "reward_model/accuracy": Metric("Share of pairs whose better response has the higher score."),
    "reward_model/margin": Metric("Score of the better response less that of the worse: mean over pairs."),
    "reward_model/chosen_score": Metric("Score of the better responses: mean."),
    "reward_model/rejected_score": Metric("Score of the worse responses: mean."),
    "reward_model/grad_norm": Metric("Gradient norm before clipping.", "max"),
    "reward_model/lr": Metric("Learning rate of the step.", "last"),
    "reward_model/padding_computed": Metric("Share of the tokens computed in the update that were padding."),
    "reward_model/val_loss": Metric("Loss of a validation pair: mean."),
    "reward_model/val_accuracy": Metric("Share of validation pairs whose better response has the higher score."),
}


def find_metric(name: str) -> Metric | None:
    """The entry of `name`: its own, or the first whose placeholders (`timing_s/<stage>`) fit; None if there is none."""
    if name in METRICS:
        return METRICS[name]
    return next((metric for pattern, metric in METRICS.items() if _fits(name, pattern)), None)


def metrics_markdown() -> str:
    """All names as a Markdown table."""
    rows = [f"| `{name}` | {metric.description} | {metric.reduction} |" for name, metric in METRICS.items()]
    return "\n".join(["| name | meaning | over ranks |", "|---|---|---|", *rows]) + "\n"


def _fits(name: str, pattern: str) -> bool:
    return "<" in pattern and fnmatchcase(name, re.sub("<[^>]+>", "*", pattern))
