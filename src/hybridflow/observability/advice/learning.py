"""Findings about the updates: KL, entropy, clipping, log-prob mismatch, and learning rates of 0."""

from hybridflow.observability.advice.evidence import Evidence
from hybridflow.observability.advice.finding import (
    SMALLER_LR,
    Change,
    Finding,
    Seen,
    above,
    config_of,
    decide,
    hotter,
    instead,
    mean_above,
    times_or,
    unless,
)

SMALLER_UPDATES = (
    Change("actor.optimizer.lr", SMALLER_LR),
    Change("actor.epochs", above(1, 1)),
    Change("actor.mini_batch_size", above(0, 0)),
)

TRAINED = {
    "actor/lr": ("actor", "data.train_batch_size"),
    "critic/lr": ("critic", "data.train_batch_size"),
    "sft/lr": ("offline", ""),
    "dpo/lr": ("offline", ""),
    "reward_model/lr": ("offline", ""),
}
"""Section and batch size of each trained model, by the metric of its learning rate."""

LONG_WARMUP = 0.5
"""Share of the run's optimizer steps above which a warm-up is too long."""


def _entropy(evidence: Evidence, threshold: float) -> Seen | None:
    values = [row["actor/entropy"] for row in evidence.rows if "actor/entropy" in row]
    last = values[-max(1, len(evidence.recent) // 4) :]
    if len(values) < 2 or not sum(last) / len(last) < threshold * values[0]:
        return None
    return Seen(f"the entropy fell from {values[0]:.3g} to {sum(last) / len(last):.3g} nats per token")


def _lr_is_0(evidence: Evidence, threshold: float) -> Seen | None:
    for name, (section, _) in TRAINED.items():
        rates = [row[name] for row in evidence.recent if name in row]
        if rates and max(rates) <= threshold:
            if evidence.config[f"{section}.optimizer.lr"] == 0:
                return Seen(f"{name} is 0", (Change(f"{section}.optimizer.lr", lambda _: (1e-6, 1e-5)),))
            return Seen(f"{name} is 0", (Change(f"{section}.optimizer.min_lr_ratio", lambda _: (0.1,)),))
    return None


def _warmup(evidence: Evidence, threshold: float) -> Seen | None:
    total, config = evidence.total_steps, evidence.config
    critic_only = config["critic.warmup_steps"]
    if total and critic_only > threshold * total and any("critic/lr" in row for row in evidence.recent):
        return Seen(
            f"only the critic learns in {critic_only} of {total} steps",
            (Change("critic.warmup_steps", lambda _: (total // 20, total // 10)),),
        )
    for name, (section, batch_key) in TRAINED.items():
        if not total or not evidence.names(name):
            continue
        values = config_of(evidence, section)
        batches = config[batch_key] // (values["mini_batch_size"] or config[batch_key]) if batch_key else 1
        updates = total * batches * values.get("epochs", 1)
        warmup = values["optimizer.warmup_steps"]
        if warmup > threshold * updates:
            change = Change(f"{section}.optimizer.warmup_steps", lambda _, n=updates: (n // 20, n // 10))
            return Seen(f"the warm-up of {name} takes {warmup} of {updates} optimizer steps", (change,))
    return None


LEARNING = (
    Finding(
        "KL running away",
        "kl",
        "`actor/kl_loss` or `critic/kl` above the threshold",
        mean_above("{name} is {mean:.3g} nats per token", "actor/kl_loss", "critic/kl"),
        "A policy far from its reference forgets what it knew, and may earn rewards in unintended ways.",
        (
            Change("actor.optimizer.lr", SMALLER_LR),
            Change("algorithm.kl_coef", times_or(0.001, 0.01)),
            Change("actor.epochs", above(1, 1)),
        ),
    ),
    Finding(
        "updates too large",
        "policy_change",
        "`actor/ppo_kl` above the threshold",
        mean_above("the updates of a step change the policy by a KL of {mean:.3g} nats per token", "actor/ppo_kl"),
        "Rewards of the old policy say little about a new one that differs from it by so much.",
        SMALLER_UPDATES,
    ),
    Finding(
        "entropy collapse",
        "entropy",
        "`actor/entropy` below the threshold times its first value",
        _entropy,
        "A policy that samples the same response again finds no better one, and its groups have equal rewards.",
        (
            Change("rollout.temperature", hotter),
            Change("actor.entropy_coef", times_or(0.001, 0.01)),
            Change("actor.clip_ratio_high", lambda now: (0.28,) if now < 0.28 else None),
            Change("actor.optimizer.lr", SMALLER_LR),
        ),
    ),
    Finding(
        "ratio clipped",
        "clip_fraction",
        "`actor/clipfrac` above the threshold",
        mean_above("the probability ratio is clipped for {mean:.0%} of the tokens", "actor/clipfrac"),
        "A clipped token has no gradient: the updates of a step move the policy further than the loss allows.",
        SMALLER_UPDATES,
    ),
    Finding(
        "log-prob mismatch",
        "log_prob_mismatch",
        "`rollout/log_prob_mismatch` above the threshold",
        mean_above(
            "log-probs of trainer and rollout engine differ by {mean:.2g} nats per token", "rollout/log_prob_mismatch"
        ),
        "The policy then learns from samples of another distribution, which can end in a collapse.",
        (
            Change("algorithm.rollout_weights", instead("none", "token", "sequence")),
            Change("trainer.lag", above(1, 1)),
            Change("model.dtype", unless("float32")),
            Change("rollout.backend", instead("vllm", "embedded")),
        ),
    ),
    Finding(
        "learning rate 0",
        0.0,
        "the learning rate is 0 in all steps looked at: `actor/lr`, `critic/lr`, `sft/lr`, `dpo/lr`, `reward_model/lr`",
        _lr_is_0,
        "The weights do not change.",
        (),
        at_first_step=0.0,
    ),
    Finding(
        "warm-up too long",
        LONG_WARMUP,
        "`warmup_steps` of a trained model above the threshold times the optimizer steps of the run, or "
        "`critic.warmup_steps` above the threshold times its steps",
        _warmup,
        "The learning rate hardly reaches its peak before the run ends.",
        (Change("trainer.total_steps", decide),),
    ),
)
