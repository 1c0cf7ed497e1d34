"""The findings: what each looks for in a run, why it matters, and the keys to change; `FINDINGS` is the table."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from hybridflow.algorithms.declarations import ESTIMATORS
from hybridflow.runtime.observe.evidence import Evidence, Row
from hybridflow.runtime.observe.suggestions import (
    Changes,
    above,
    decide,
    hotter,
    instead,
    times,
    times_or,
    unless,
)

TURN = re.compile(r"<\|(?:im_start|im_end|start_header_id|eot_id|user|assistant|system)\|>|\[/?INST\]|<start_of_turn>")
"""Marks of chat templates."""
END_OF_TURN = re.compile(r"(?:<\|im_end\|>|<\|eot_id\|>|<\|end\|>|<end_of_turn>|</s>)\s*$")
TWO_BOS = re.compile(r"\s*(<s>|<bos>|<\|begin_of_text\|>|<\|startoftext\|>|<\|endoftext\|>)\s*\1")


class Seen(NamedTuple):
    """What was seen, with numbers, in which metric ("": in samples), and further keys that only apply to it."""

    text: str
    metric: str = ""
    changes: Changes = MappingProxyType({})


Look = Callable[[Evidence, float], Seen | None]
"""Returns what was seen if the evidence is beyond the threshold."""


@dataclass(frozen=True)
class RunFinding:
    """A finding. `found_if` describes the condition, in which the threshold is `advice.<threshold>`, or a fixed number.

    `hides`: names of findings that say less if this one is found. `at_first_step`: the least threshold of a look at
    the first step alone; None: one step proves nothing. `is_note`: nothing that is learned is wrong.
    """

    name: str
    threshold: str | float
    found_if: str
    look: Look
    why: str
    changes: Changes
    hides: tuple[str, ...] = ()
    at_first_step: float | None = None
    is_note: bool = False


def mean_above(text: str, *patterns: str) -> Look:
    """Return a look for a metric whose mean is above the threshold; of several the largest counts.

    `text` may have `{mean}` and `{name}`.
    """

    def look(evidence: Evidence, threshold: float) -> Seen | None:
        names = [name for pattern in patterns for name in evidence.names(pattern)]
        means = {name: mean for name in names if (mean := evidence.mean(name)) is not None}
        worst = max(means, key=means.__getitem__, default=None)
        if worst is None or not means[worst] > threshold:
            return None
        return Seen(text.format(mean=means[worst], name=worst), worst)

    return look


def _solved(evidence: Evidence, threshold: float) -> Seen | None:
    mean = evidence.mean("critic/score/mean")
    lowest = min((row["critic/score/min"] for row in evidence.rows if "critic/score/min" in row), default=0.0)
    highest = max((row["critic/score/max"] for row in evidence.rows if "critic/score/max" in row), default=0.0)
    if mean is None or highest < 1 or highest == lowest or mean <= lowest + threshold * (highest - lowest):
        return None
    return Seen(f"the mean score is {mean:.3g}, and the highest score of the run is {highest:.3g}", "critic/score/mean")


def _compares_scores(evidence: Evidence) -> bool:
    """Return whether equal scores give equal advantages; an estimator of the user's own is taken to compare them."""
    estimator = ESTIMATORS.get(evidence.config["algorithm.advantage"])
    others = {"teacher_log_probs", "reward_components"}
    return estimator is None or not (estimator.is_zero or others.intersection(estimator.extra_columns))


def _std(row: Row, name: str) -> float | None:
    """Return the largest standard deviation of numbers with this mean, minimum and maximum (Bhatia and Davis, 2000).

    It is that of numbers which all are the minimum or the maximum, such as scores of 0 and 1.
    """
    mean, low, high = (row.get(f"{name}/{kind}") for kind in ("mean", "min", "max"))
    if mean is None or low is None or high is None:
        return None
    return math.sqrt(max(0.0, (high - mean) * (mean - low)))


def _difference_from_greedy(row: Row) -> float | None:
    """Return the largest advantage of a step of ReMax, which subtracts the scores of greedy responses."""
    low, high = row.get("critic/advantages/min"), row.get("critic/advantages/max")
    return None if low is None or high is None else max(abs(low), abs(high))


def _equal_rewards(evidence: Evidence, threshold: float) -> Seen | None:
    config = evidence.config
    if not _compares_scores(evidence) or config["data.train_batch_size"] * config["rollout.group_size"] == 1:
        return None
    estimator = ESTIMATORS.get(config["algorithm.advantage"])
    has_baseline = estimator is not None and "baseline_scores" in estimator.extra_columns
    values = [_difference_from_greedy(row) if has_baseline else _std(row, "critic/score") for row in evidence.recent]
    known = [value for value in values if value is not None]
    mean = evidence.mean("critic/score/mean")
    if not known or mean is None or not math.fsum(known) / len(known) < threshold:
        return None
    what = "the standard deviation of the scores of a step"
    if has_baseline:
        what = "the largest difference of a score from that of the greedy response"
    text = f"{what} is at most {math.fsum(known) / len(known):.2g} (mean score {mean:.3g})"
    return Seen(text, "critic/score/mean")


def _equal_groups(evidence: Evidence, threshold: float) -> Seen | None:
    estimator = ESTIMATORS.get(evidence.config["algorithm.advantage"])
    if not estimator or not estimator.compares_groups or not _compares_scores(evidence):
        return None
    name, where = "critic/zero_variance_groups", "groups"
    share, differing = evidence.mean(name), evidence.mean("sampling/differing_groups")
    if differing is not None:
        name, where, share = "sampling/differing_groups", "sampled groups", 1 - differing
    if share is None or not share > threshold:
        return None
    return Seen(f"the responses to a prompt have equal scores in {share:.0%} of the {where}", name)


def _format(evidence: Evidence, threshold: float) -> Seen | None:
    for name in evidence.names("reward/*format*/mean"):
        mean = evidence.mean(name)
        if mean is not None and mean < threshold:
            return Seen(f"{name} is {mean:.2g}", name)
    return None


def _entropy(evidence: Evidence, threshold: float) -> Seen | None:
    values = [row["actor/entropy"] for row in evidence.rows if "actor/entropy" in row]
    last = values[-max(1, len(evidence.recent) // 4) :]
    if len(values) < 2 or not sum(last) / len(last) < threshold * values[0]:
        return None
    text = f"the entropy fell from {values[0]:.3g} to {sum(last) / len(last):.3g} nats per token"
    return Seen(text, "actor/entropy")


def _lr_is_0(evidence: Evidence, threshold: float) -> Seen | None:
    sections = {"actor": "actor", "critic": "critic", "sft": "offline", "dpo": "offline", "reward_model": "offline"}
    for model, section in sections.items():
        name = f"{model}/lr"
        rates = [row[name] for row in evidence.recent if name in row]
        if rates and max(rates) <= threshold:
            if evidence.config[f"{section}.optimizer.lr"] == 0:
                return Seen(f"{name} is 0", name, {f"{section}.optimizer.lr": lambda _: (1e-6, 1e-5)})
            return Seen(f"{name} is 0", name, {f"{section}.optimizer.min_lr_ratio": lambda _: (0.1,)})
    return None


def _wrong_template(sample: Row, *, is_asked_for: bool, is_cut: bool) -> str | None:
    """Return the sign of a wrong chat template in a sample, None if there is none."""
    prompt, rendered = sample.get("prompt"), sample.get("rendered_prompt")
    if not isinstance(prompt, str) or not isinstance(rendered, str):
        return None
    has_mark = TURN.search(prompt)
    if TWO_BOS.match(rendered):
        return "begin with two BOS tokens"
    if rendered == prompt:
        return f"hold {has_mark[0]!r}, but no template was applied" if has_mark and is_asked_for else None
    if has_mark:
        return f"hold {has_mark[0]!r} before the template is applied to them"
    lines = prompt.split("\n")
    last = " ".join(next((line for line in reversed(lines) if line.strip()), "").split())
    before, found, after = " ".join(rendered.split()).rpartition(last)
    if not found and not is_cut:
        return "lack the text of the prompt after the template is applied"
    if END_OF_TURN.search(rendered) or (found and not after and TURN.search(before)):
        return "end without a generation prompt"
    return None


def _chat_template(evidence: Evidence, threshold: float) -> Seen | None:
    if evidence.config.get("environment.classes"):  # whose first messages may be others
        return None
    is_asked_for = evidence.config["data.chat_template"]
    is_cut = evidence.config["data.overlong_prompts"].startswith("truncate")
    signs = [_wrong_template(row, is_asked_for=is_asked_for, is_cut=is_cut) for row in evidence.samples]
    counts = Counter(sign for sign in signs if sign)
    if not counts.total() > threshold * len(signs):
        return None
    (sign, count), *_ = counts.most_common(1)
    return Seen(f"{count} of {len(signs)} logged prompts {sign}")


def _contradictory(evidence: Evidence, threshold: float) -> Seen | None:
    answers: dict[str, set[str]] = {}
    for row in evidence.samples:
        if "ground_truth" in row:
            answers.setdefault(str(row.get("prompt")), set()).add(json.dumps(row["ground_truth"]))
    several = sorted(prompt for prompt, of_prompt in answers.items() if len(of_prompt) > 1)
    if not len(several) > threshold * len(answers):
        return None
    shown = " ".join(several[0].split())[:60]
    return Seen(f"{len(several)} of {len(answers)} logged prompts have several ground truths, such as {shown!r}")


SMALLER_LR = times(1 / 3, 1 / 10)
SMALLER_UPDATES = {
    "actor.optimizer.lr": SMALLER_LR,
    "actor.epochs": above(1, 1),
    "actor.mini_batch_size": above(0, 0),
}

FINDINGS: tuple[RunFinding, ...] = (
    RunFinding(
        "task solved",
        "solved",
        "mean of `critic/score/mean`, relative to the lowest and highest score of the run, above the threshold, and a "
        "score of at least 1 was seen",
        _solved,
        "Responses without mistakes have equal rewards, from which the policy learns nothing more.",
        {"data.train_files": decide, "data.order": decide, "algorithm.filter_groups": instead(False, True)},
        hides=("equal rewards", "groups without variance", "entropy collapse"),
        is_note=True,
    ),
    RunFinding(
        "equal rewards",
        "score_std",
        "bound of the standard deviation of a step's scores, from their mean, minimum and maximum, below the threshold",
        _equal_rewards,
        "Advantages are differences of scores: without a difference there is no learning signal.",
        {
            "reward.function": decide,
            "rollout.temperature": hotter,
            "rollout.top_p": lambda now: (1.0,) if now < 1 else None,
            "data.max_response_length": times(2, 4),
        },
        hides=("groups without variance",),
        at_first_step=0.0,
    ),
    RunFinding(
        "groups without variance",
        "zero_variance_groups",
        "`critic/zero_variance_groups` above the threshold; with dynamic sampling 1 - `sampling/differing_groups`",
        _equal_groups,
        "A group with equal scores has advantages of 0, so its generation is spent without a learning signal.",
        {
            "rollout.group_size": times(2, 4),
            "rollout.temperature": hotter,
            "rollout.top_p": lambda now: (1.0,) if now < 1 else None,
            "algorithm.filter_groups": instead(False, True),
            "data.train_files": decide,
        },
        at_first_step=0.999,
    ),
    RunFinding(
        "format never right",
        "format",
        "`reward/<name>/mean` below the threshold, for a name with 'format'",
        _format,
        "A response in a wrong format earns nothing, however right it is; the policy cannot find the format by chance.",
        {"data.train_files": decide, "data.max_response_length": times(2, 4), "reward.function": decide},
    ),
    RunFinding(
        "reward errors",
        "reward_errors",
        "`reward/error_rate` above the threshold",
        mean_above("the reward function fails on {mean:.1%} of the samples", "reward/error_rate"),
        "A failed sample gets reward.error_score, whatever the response says, so the policy learns from noise.",
        {"reward.function": decide, "reward.on_error": instead("zero", "stop")},
        at_first_step=0.3,
    ),
    RunFinding(
        "reward time-outs",
        "reward_timeouts",
        "`reward/timeout_rate` above the threshold",
        mean_above("the reward function times out on {mean:.1%} of the samples", "reward/timeout_rate"),
        "A sample that times out gets reward.error_score, and its step waits for the deadline.",
        {"reward.timeout_s": times(2, 5), "reward.processes": times(2, 4), "reward.concurrency": above(1, 1)},
        at_first_step=0.3,
    ),
    RunFinding(
        "KL running away",
        "kl",
        "`actor/kl_loss` or `critic/kl` above the threshold",
        mean_above("{name} is {mean:.3g} nats per token", "actor/kl_loss", "critic/kl"),
        "A policy far from its reference forgets what it knew, and may earn rewards in unintended ways.",
        {"actor.optimizer.lr": SMALLER_LR, "algorithm.kl_coef": times_or(0.001, 0.01), "actor.epochs": above(1, 1)},
    ),
    RunFinding(
        "updates too large",
        "policy_change",
        "`actor/ppo_kl` above the threshold",
        mean_above("the updates of a step change the policy by a KL of {mean:.3g} nats per token", "actor/ppo_kl"),
        "Rewards of the old policy say little about a new one that differs from it by so much.",
        SMALLER_UPDATES,
    ),
    RunFinding(
        "entropy collapse",
        "entropy",
        "`actor/entropy` below the threshold times its first value",
        _entropy,
        "A policy that samples the same response again finds no better one, and its groups have equal rewards.",
        {
            "rollout.temperature": hotter,
            "actor.entropy_coef": times_or(0.001, 0.01),
            "actor.clip_ratio_high": lambda now: (0.28,) if now < 0.28 else None,
            "actor.optimizer.lr": SMALLER_LR,
        },
    ),
    RunFinding(
        "ratio clipped",
        "clip_fraction",
        "`actor/clipfrac` above the threshold",
        mean_above("the probability ratio is clipped for {mean:.0%} of the tokens", "actor/clipfrac"),
        "A clipped token has no gradient: the updates of a step move the policy further than the loss allows.",
        SMALLER_UPDATES,
    ),
    RunFinding(
        "log-prob mismatch",
        "log_prob_mismatch",
        "`rollout/log_prob_mismatch` above the threshold",
        mean_above(
            "log-probs of trainer and rollout engine differ by {mean:.2g} nats per token", "rollout/log_prob_mismatch"
        ),
        "The policy then learns from samples of another distribution, which can end in a collapse.",
        {
            "algorithm.rollout_weights": instead("none", "token", "sequence"),
            "trainer.lag": above(1, 1),
            "model.dtype": unless("float32"),
            "rollout.backend": instead("vllm", "embedded"),
        },
    ),
    RunFinding(
        "learning rate 0",
        0.0,
        "the learning rate is 0 in all steps looked at: `actor/lr`, `critic/lr`, `sft/lr`, `dpo/lr`, `reward_model/lr`",
        _lr_is_0,
        "The weights do not change.",
        {},
        at_first_step=0.0,
    ),
    RunFinding(
        "truncation",
        "truncation",
        "`response_length/clip_ratio` above the threshold",
        mean_above("{mean:.0%} of the responses are cut at data.max_response_length", "response_length/clip_ratio"),
        "A response that is cut has no answer yet, so its reward is that of an unfinished response.",
        {
            "data.max_response_length": times(2, 4),
            "rollout.stop_strings": lambda now: None if now else (),
            "reward.overlong_buffer": lambda now: None if now else (),
        },
        at_first_step=0.999,
    ),
    RunFinding(
        "chat template suspicious",
        0.1,
        "share of the logged prompts above the threshold: with two BOS tokens, without the text of the prompt, without "
        "a generation prompt at the end, or with marks of a template such as `<|im_start|>` before it is applied",
        _chat_template,
        "The model reads prompts in another form than those it was trained on, and answers worse.",
        {"data.chat_template": lambda now: (not now,), "data.train_files": decide},
    ),
    RunFinding(
        "data contradictory",
        0.0,
        "share of the logged prompts with different ground truths above the threshold",
        _contradictory,
        "The same answer is rewarded in one row and punished in another, so the policy cannot satisfy both.",
        {"data.train_files": decide, "data.overlong_prompts": instead("truncate-left", "drop")},
    ),
    RunFinding(
        "padding",
        0.5,
        "`<model>/padding_computed` above the threshold",
        mean_above("{mean:.0%} of the tokens of an update are padding ({name})", "*/padding_computed"),
        "Padding is computed like tokens and has no effect.",
        {
            "memory.packing": instead(False, True),
            "controller.balance": unless("rows"),
            "memory.max_tokens_per_micro_batch": times(2, 4),
        },
        is_note=True,
    ),
    RunFinding(
        "idle processes",
        "idle",
        "`perf/<role>_idle_share` above the threshold",
        mean_above("{name} is {mean:.0%}: these processes wait most of a step", "perf/*_idle_share"),
        "Processes that wait hold their devices without using them.",
        {
            "trainer.stream": instead(False, True),
            "reward.processes": times(2, 4),
            "trainer.lag": instead(0, 1, 2),
            "placement.pools": lambda now: () if now else None,
        },
        is_note=True,
    ),
)
