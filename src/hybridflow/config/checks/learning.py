"""Checks of the algorithm, of actor, critic and teacher, and of the lag of training."""

from collections.abc import Iterator
from math import isqrt

from hybridflow.algorithms.declarations import ESTIMATORS, LOSSES
from hybridflow.config.checks.refusal import Refusal, any_of
from hybridflow.config.sections.config import Config


def _mini_batches(config: Config) -> Iterator[str]:
    train_batch_size = config.data.train_batch_size
    for name, size in (("actor", config.actor.mini_batch_size), ("critic", config.critic.mini_batch_size)):
        if size and train_batch_size % size:
            divisors = _divisors(train_batch_size)
            valid = " or ".join(filter(None, [", ".join(divisors[:-1]), divisors[-1]]))
            yield (
                f"{name}.mini_batch_size={size} does not divide data.train_batch_size={train_batch_size}; use {valid}"
            )


def _divisors(number: int) -> list[str]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return [str(n) for n in sorted({*small, *(number // n for n in small)})]


def _groups(config: Config) -> Iterator[str]:
    rollout, advantage, estimator = config.rollout, config.algorithm.advantage, config.algorithm.estimator
    if estimator.compares_groups and rollout.group_size == 1:
        yield (
            f"rollout.group_size=1 makes every advantage of algorithm.advantage={advantage!r} 0; use a group_size of 2 "
            f"or more, or advantage = {_advantages_with('values')}"
        )
    elif estimator.at_most_group_size:
        name, default = estimator.at_most_group_size
        value = config.algorithm.advantage_kwargs.get(name, default)
        if isinstance(value, int) and value > rollout.group_size:
            yield (
                f"algorithm.advantage_kwargs.{name}={value} exceeds rollout.group_size={rollout.group_size}; "
                f"{advantage} draws {name} responses of each group"
            )
    if config.algorithm.filter_groups and rollout.group_size == 1:
        yield (
            "algorithm.filter_groups=true with rollout.group_size=1 discards every group, as a single response has no "
            "difference; use a group_size of 2 or more"
        )


def _advantages_with(column: str) -> str:
    """Return the names of the estimators that read a column of EXTRA_COLUMNS, joined by "or"."""
    return " or ".join(repr(name) for name, estimator in ESTIMATORS.items() if column in estimator.extra_columns)


def _kl(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.kl_importance_weight and not algorithm.kl_in_loss:
        yield (
            "algorithm.kl_importance_weight=true weights the KL in the loss, but algorithm.kl_in_loss=false; set "
            "kl_in_loss = true or kl_importance_weight = false"
        )
    if algorithm.kl_controller == "adaptive" and not algorithm.kl_in_reward:
        yield (
            "algorithm.kl_controller='adaptive' adjusts the KL in the reward, but algorithm.kl_in_reward=false; "
            "set kl_in_reward = true or kl_controller = 'fixed'"
        )
    if algorithm.kl_controller == "adaptive" and algorithm.kl_coef == 0:
        yield (
            "algorithm.kl_coef=0 stays 0 under algorithm.kl_controller='adaptive', which multiplies it; "
            "start from a kl_coef above 0"
        )


def _extra_columns(config: Config) -> Iterator[str]:
    algorithm, actor = config.algorithm, config.actor
    for function, columns in (
        (f"algorithm.advantage={algorithm.advantage!r}", algorithm.estimator.extra_columns),
        (f"actor.policy_loss={actor.policy_loss!r}", actor.loss.extra_columns),
    ):
        if "teacher_log_probs" in columns and not config.teacher.model_path:
            yield f"{function} needs a teacher, but teacher.model_path is empty; set it"
        if "reward_components" in columns and not config.reward.weights:
            yield (
                f"{function} compares several rewards, but reward.weights={{}} names none; give weights to the numbers "
                "that the reward function returns, as in {correct = 1.0, format = 0.2}"
            )


def _teacher(config: Config) -> Iterator[str]:
    teacher, advantage = config.teacher, config.algorithm.advantage
    if not teacher.model_path:
        if teacher.loss != "none":
            yield f"teacher.loss={teacher.loss!r} needs a teacher, but teacher.model_path is empty; set it"
        if config.algorithm.estimator.is_zero and not config.algorithm.kl_in_loss and not config.actor.entropy_coef:
            yield (
                f"algorithm.advantage={advantage!r} leaves no term in the loss; set teacher.loss and "
                "teacher.model_path, or another advantage"
            )
    elif teacher.loss == "none" and advantage in ESTIMATORS and "teacher_log_probs" not in config.extra_columns:
        yield (
            f"teacher.model_path={teacher.model_path!r} has no effect: teacher.loss='none' and "
            f"algorithm.advantage={advantage!r}; set teacher.loss, or advantage = "
            f"{_advantages_with('teacher_log_probs')}"
        )
    if teacher.loss != "none" and teacher.coef == 0:
        yield f"teacher.coef=0 disables teacher.loss={teacher.loss!r}; use a coef above 0, or loss = 'none'"


def _rollout_correction(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    bounds = {"rollout_weight_bounds": algorithm.rollout_weight_bounds}
    bounds |= {f"rollout_reject.{name}": pair for name, pair in algorithm.rollout_reject.items()}
    for key, (lowest, highest) in bounds.items():
        if lowest > highest:
            yield f"algorithm.{key}=[{lowest}, {highest}] is an empty range; write the lower bound first"


def _critic_warmup(config: Config) -> Iterator[str]:
    warmup_steps, total_steps = config.critic.warmup_steps, config.trainer.total_steps
    if warmup_steps and not config.uses_critic:
        yield (
            f"critic.warmup_steps={warmup_steps}, but algorithm.advantage={config.algorithm.advantage!r} "
            f"has no critic; use 0, or advantage = {_advantages_with('values')}"
        )
    elif warmup_steps and 0 < total_steps <= warmup_steps:
        yield (
            f"critic.warmup_steps={warmup_steps} leaves the actor no step of trainer.total_steps={total_steps}; "
            f"use at most {total_steps - 1}"
        )


def _lag(config: Config) -> Iterator[str]:
    lag, quantization, actor = config.trainer.lag, config.rollout.quantization, config.actor
    if config.corrects_rollouts or actor.loss.has_behavior_weight or actor.old_log_probs_from == "rollout":
        return
    for cause, instead in (
        (lag and f"trainer.lag={lag} trains on samples of older weights", "lag = 0"),
        (
            quantization and f"rollout.quantization={quantization!r} samples from other probabilities",
            "quantization = ''",
        ),
    ):
        if not cause:
            continue
        losses = " or ".join(repr(name) for name, loss in LOSSES.items() if loss.has_behavior_weight)
        yield (
            f"{cause}, and no key corrects for it; set "
            f"actor.policy_loss = {losses} (decoupled PPO), algorithm.rollout_weights = 'token' or 'sequence' "
            "(truncated importance weights, TIS), these with algorithm.rollout_weight_outside = 'mask' (masked ones, "
            "IcePop), algorithm.rollout_reject = {sequence_mean_k3 = [0.0, 0.01]} (mismatched tokens or responses "
            "left out), or actor.old_log_probs_from = 'rollout' (log-probs of the rollout as the old ones); or use "
            f"{instead}"
        )


_BY_SCORE = any_of(name for name, estimator in ESTIMATORS.items() if not estimator.takes_kl_in_reward)
_WITH_SUMS = any_of(name for name, each in ESTIMATORS.items() if "sum_squared_probs" in each.extra_columns)
_WEIGHTED = any_of(name for name, loss in LOSSES.items() if loss.has_behavior_weight)
_OF_SEQUENCES = any_of(name for name, loss in LOSSES.items() if loss.aggregations)
_AGGREGATIONS = any_of(sorted({each for loss in LOSSES.values() for each in loss.aggregations}))
_FROM_ROLLOUT = "actor.old_log_probs_from = 'rollout'"
_FULL = "use old_log_probs_from = 'trainer', or sample from the full distribution (top_k = 0, top_p = 1)"


def _takes_rollout_log_probs(config: Config) -> bool:
    return config.actor.old_log_probs_from == "rollout"


CHECKS = (_mini_batches, _groups, _kl, _extra_columns, _teacher, _rollout_correction, _critic_warmup, _lag)
REFUSALS = (
    Refusal(
        "algorithm.kl_in_reward",
        f"algorithm.advantage = {_BY_SCORE}",
        "its estimator does not compare sums of rewards",
        "use kl_in_loss = true",
        lambda c: c.algorithm.kl_in_reward and not c.algorithm.estimator.takes_kl_in_reward,
    ),
    Refusal(
        f"algorithm.advantage = {_WITH_SUMS}",
        _FROM_ROLLOUT,
        "it needs probabilities from the trainer's log-prob pass, which is left out",
        "use old_log_probs_from = 'trainer', or another advantage",
        lambda c: _takes_rollout_log_probs(c) and "sum_squared_probs" in c.algorithm.estimator.extra_columns,
    ),
    Refusal(
        _FROM_ROLLOUT,
        "rollout.top_k above 0",
        "the ratio would compare probabilities under different distributions",
        _FULL,
        lambda c: _takes_rollout_log_probs(c) and c.rollout.top_k > 0,
    ),
    Refusal(
        _FROM_ROLLOUT,
        "rollout.top_p below 1",
        "the ratio would compare probabilities under different distributions",
        _FULL,
        lambda c: _takes_rollout_log_probs(c) and c.rollout.top_p < 1,
    ),
    Refusal(
        f"actor.policy_loss = {_WEIGHTED}",
        "algorithm.rollout_weights",
        "both weight each token by trainer / sampler, so the weight would count twice",
        "use rollout_weights = 'none', or another policy_loss",
        lambda c: c.actor.loss.has_behavior_weight and c.algorithm.rollout_weights != "none",
    ),
    Refusal(
        f"actor.policy_loss = {_OF_SEQUENCES}",
        f"actor.loss_aggregation other than {_AGGREGATIONS}",
        "its ratio belongs to the whole response, and a mean over tokens would give long responses more weight",
        f"use {_AGGREGATIONS}, or another policy_loss",
        lambda c: bool(c.actor.loss.aggregations) and c.actor.loss_aggregation not in c.actor.loss.aggregations,
    ),
)
