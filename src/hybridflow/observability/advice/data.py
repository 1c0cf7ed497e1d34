"""Findings about prompts and responses: truncation, chat template, repeated and contradictory prompts."""

import json
import re
from collections import Counter

from hybridflow.observability.advice.evidence import Evidence, Row
from hybridflow.observability.advice.finding import Change, Finding, Seen, decide, instead, mean_above, times

TURN = re.compile(r"<\|(?:im_start|im_end|start_header_id|eot_id|user|assistant|system)\|>|\[/?INST\]|<start_of_turn>")
"""Marks of chat templates."""
END_OF_TURN = re.compile(r"(?:<\|im_end\|>|<\|eot_id\|>|<\|end\|>|<end_of_turn>|</s>)\s*$")
TWO_BOS = re.compile(r"\s*(<s>|<bos>|<\|begin_of_text\|>|<\|startoftext\|>|<\|endoftext\|>)\s*\1")

WRONG_TEMPLATES = 0.1
"""Share of the logged prompts with a sign of a wrong chat template, above which the template is suspicious."""
CONTRADICTORY_PROMPTS = 0.0
"""Share of the logged prompts with several ground truths, above which the data is contradictory."""


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


def _repeated(evidence: Evidence, threshold: float) -> Seen | None:
    config = evidence.config
    # otherwise the steps of an epoch may have a prompt twice, or prompts of the next epoch
    is_plain = config["data.order"] in ("shuffled", "sequential", "curriculum")
    if not is_plain or config["algorithm.filter_groups"]:
        return None
    epochs = {row["step"]: row["training/epoch"] for row in evidence.rows if "training/epoch" in row}
    counts: Counter[tuple[int, str]] = Counter()
    for row in evidence.rollouts:
        groups = set(zip(row.get("group", ()), row.get("prompt_id", ()), strict=False))
        counts.update((epochs.get(row["step"], -1), prompt) for _, prompt in groups)
    if not counts:
        counts.update((epochs.get(step, -1), prompt) for step, prompt in _logged_prompts(evidence))
    counts = Counter({where: count for where, count in counts.items() if where[0] >= 0})
    repeated = [count for count in counts.values() if count > 1]
    if not len(repeated) > threshold * len(counts):
        return None
    return Seen(
        f"{len(repeated)} of {len(counts)} prompts occur more than once in an epoch, up to {max(repeated)} times"
    )


def _logged_prompts(evidence: Evidence) -> set[tuple[int, str]]:
    return {(row["step"], str(row["prompt"])) for row in evidence.samples if "prompt" in row}


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


DATA = (
    Finding(
        "truncation",
        "truncation",
        "`response_length/clip_ratio` above the threshold",
        mean_above("{mean:.0%} of the responses are cut at data.max_response_length", "response_length/clip_ratio"),
        "A response that is cut has no answer yet, so its reward is that of an unfinished response.",
        (
            Change("data.max_response_length", times(2, 4)),
            Change("rollout.stop_strings", lambda now: None if now else ()),
            Change("reward.overlong_buffer", lambda now: None if now else ()),
        ),
        at_first_step=0.999,
    ),
    Finding(
        "chat template suspicious",
        WRONG_TEMPLATES,
        "share of the logged prompts above the threshold: with two BOS tokens, without the text of the prompt, without "
        "a generation prompt at the end, or with marks of a template such as `<|im_start|>` before it is applied",
        _chat_template,
        "The model reads prompts in another form than those it was trained on, and answers worse.",
        (Change("data.chat_template", lambda now: (not now,)), Change("data.train_files", decide)),
    ),
    Finding(
        "data repeated",
        "repeated_prompts",
        "share of the prompts of an epoch that occur in it again above the threshold; from `rollouts.jsonl`, or from "
        "the logged prompts",
        _repeated,
        "Repeated prompts weigh more than others, and the run sees less data than it seems.",
        (Change("data.train_files", decide),),
    ),
    Finding(
        "data contradictory",
        CONTRADICTORY_PROMPTS,
        "share of the logged prompts with different ground truths above the threshold",
        _contradictory,
        "The same answer is rewarded in one row and punished in another, so the policy cannot satisfy both.",
        (Change("data.train_files", decide), Change("data.overlong_prompts", instead("truncate-left", "drop"))),
    ),
)
