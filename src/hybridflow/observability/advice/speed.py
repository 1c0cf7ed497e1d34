"""Findings about speed: padding, idle processes, and token budgets that are too small."""

from hybridflow.observability.advice.evidence import MAX_STEPS, Evidence
from hybridflow.observability.advice.finding import Change, Finding, Seen, instead, mean_above, times, unless
from hybridflow.observability.glossary.metric import MANY_MICRO_BATCHES, MUCH_PADDING


def _num_ranks(evidence: Evidence) -> int:
    """Return the number of ranks that train the policy."""
    pools, roles = evidence.config["placement.pools"], evidence.config["placement.roles"]
    if not pools:
        return evidence.config["controller.num_workers"]
    return max(1, sum(pools.get(roles.get("actor_rollout", next(iter(pools))), ())))


def _micro_batches(evidence: Evidence, threshold: float) -> Seen | None:
    config, tokens = evidence.config, evidence.mean("perf/num_tokens")
    budget = config["memory.max_tokens_per_micro_batch"]
    if tokens is None or not isinstance(budget, int):
        return None
    if evidence.names("actor/loss"):
        tokens /= max(1, config["data.train_batch_size"] // (config["actor.mini_batch_size"] or MAX_STEPS))
    count = tokens / budget / _num_ranks(evidence)
    if not count > threshold:
        return None
    return Seen(f"an optimizer step has {tokens:.0f} tokens, about {count:.0f} micro-batches of {budget} on each rank")


SPEED = (
    Finding(
        "padding",
        MUCH_PADDING,
        "`<model>/padding_computed` above the threshold",
        mean_above("{mean:.0%} of the tokens of an update are padding ({name})", "*/padding_computed"),
        "Padding is computed like tokens and has no effect.",
        (
            Change("memory.packing", instead(False, True)),
            Change("controller.balance", unless("rows")),
            Change("memory.max_tokens_per_micro_batch", times(2, 4)),
        ),
    ),
    Finding(
        "idle processes",
        "idle",
        "`perf/<role>_idle_share` above the threshold",
        mean_above("{name} is {mean:.0%}: these processes wait most of a step", "perf/*_idle_share"),
        "Processes that wait hold their devices without using them.",
        (
            Change("trainer.stream", instead(False, True)),
            Change("reward.processes", times(2, 4)),
            Change("trainer.lag", instead(0, 1, 2)),
            Change("placement.pools", lambda now: () if now else None),
        ),
    ),
    Finding(
        "token budget too small",
        MANY_MICRO_BATCHES,
        "`perf/num_tokens` of an optimizer step, by ranks and `memory.max_tokens_per_micro_batch`, above the threshold",
        _micro_batches,
        "Each micro-batch has a fixed cost, and a device computes few tokens at a time slowly.",
        (
            Change("memory.max_tokens_per_micro_batch", lambda now: (4 * now, 16 * now, "auto")),
            Change("model.gradient_checkpointing", instead(False, True)),
        ),
    ),
)
