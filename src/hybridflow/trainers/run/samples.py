"""What a step keeps of its responses: numbers of all of them, and some with their texts and tokens."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from hybridflow.config import Config
from hybridflow.data import load_tokenizer
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.episode_rows import EpisodeRows
from hybridflow.trainers.read_columns import Batch, read
from hybridflow.trainers.stages import updates_per_step

TextOf = Callable[[int], str]

Sample = dict[str, Any]
"""A row of samples.jsonl, see docs/report.md."""

_ROW_COLUMNS = ("scores", "group_ids", "response_mask", "reward_failed", "reward_timed_out")
_ROW_OBJECTS = ("finish_reasons", "data_sources", "raw_prompts")
TEXTS = ("raw_prompts", "prompt_texts", "ground_truths", "solution_texts")

OF_EPISODES = {"episode_messages": "messages", "agent_outputs": "output"}
"""Columns of episodes, and their names in a sample."""

TOKEN_NUMBERS = {
    "rollout_log_probs": "log_probs",
    "old_log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_probs",
    "advantages": "advantages",
    "rollout_weights": "weights",
    "rollout_versions": "versions",
    "response_mask": "mask",
}
"""Columns of tokens that are kept if the batch has them, and their names in a sample's `tokens`."""

NO_VERSION = 2**62
"""Stands for the version of a position without a token."""

DIGITS = 4
"""Significant digits of a token's numbers."""

MAX_GROUND_TRUTH_CHARS = 2000
"""Longest JSON of a ground truth in samples.jsonl: the tests of a program may be megabytes."""


class Samples(NamedTuple):
    """The records of a step: `kept`, rows of samples.jsonl, and `numbers`, a row of rollouts.jsonl (empty: none)."""

    kept: Sequence[Sample] = ()
    numbers: Mapping[str, Any] = MappingProxyType({})


NO_SAMPLES = Samples()


def samples_of(batch: Batch, config: Config, step: int, text_of: TextOf | None = None) -> Samples:
    """Return the numbers of all responses, and trainer.log_samples of them; texts and tokens of others are not fetched.

    Half of them may be responses whose reward failed; then the best and the worst, the first response to each prompt,
    and others. `text_of` returns the text of a token, by default that of the policy's tokenizer.
    """
    future, count = DataProtoFuture.of(batch), config.trainer.log_samples
    episodes = EpisodeRows(batch)
    numbers = _numbers(read(batch, (*_ROW_COLUMNS, *_ROW_OBJECTS)), episodes)
    if config.environment.classes:
        numbers |= numbers_of_episodes(batch, episodes)
    if config.trainer.lag:
        numbers["staleness"] = _staleness(batch, config, step)[:: episodes.size]
    kept: list[Sample] = []
    if rows := _chosen(numbers, count):
        chosen = future.select_rows(np.array(rows, dtype=np.int64) * episodes.size)
        kept = _samples(chosen, rows, numbers, config.trainer.log_tokens, text_of or _text_of_token(config.model.path))
    return Samples([{"step": step, **sample} for sample in kept], {"step": step, **numbers})


def _staleness(batch: Batch, config: Config, step: int) -> list[int | None]:
    """Return the optimizer steps between the oldest weights of a response and those before the update of `step`."""
    columns = read(batch, ("rollout_versions", "response_mask")).batch
    oldest = torch.where(columns["response_mask"], columns["rollout_versions"], NO_VERSION).amin(-1).tolist()
    current = updates_per_step(config, config.actor) * max(0, step - 1 - config.critic.warmup_steps)
    return [current - version if version != NO_VERSION else None for version in oldest]


def numbers_of_episodes(batch: Batch, episodes: EpisodeRows) -> dict[str, list[Any]]:
    """Return the turns of each episode, the rewards of these, and its calls of tools."""
    names = ("response_mask", "turn_ids", "turn_rewards", "num_tool_calls", "num_tool_errors")
    columns = episodes.joined(read(batch, names).batch)
    turns = (columns["turn_ids"].where(columns["response_mask"], -1).amax(-1) + 1).tolist()
    rewards = torch.zeros(len(turns), max(*turns, 1), dtype=columns["turn_rewards"].dtype)
    rewards.scatter_add_(1, columns["turn_ids"].clamp(0, rewards.shape[1] - 1), columns["turn_rewards"])
    return {
        "turns": turns,
        "turn_rewards": [row[:count] for row, count in zip(rewards.tolist(), turns, strict=True)],
        "tool_calls": columns["num_tool_calls"].tolist(),
        "tool_errors": columns["num_tool_errors"].tolist(),
    }


def _numbers(batch: DataProto, episodes: EpisodeRows) -> dict[str, list[Any]]:
    """Return a list over the responses for each number."""
    columns = episodes.joined(batch.batch)
    objects = {name: column[:: episodes.size] for name, column in batch.non_tensor_batch.items()}
    groups = columns["group_ids"].tolist()
    ids: dict[int, str] = {}
    for group, prompt in zip(groups, objects["raw_prompts"], strict=True):
        if group not in ids:
            ids[group] = prompt_id(prompt)
    failed, timed_out = columns["reward_failed"].tolist(), columns["reward_timed_out"].tolist()
    return {
        "group": groups,
        "prompt_id": [ids[group] for group in groups],
        "data_source": [str(source) for source in objects["data_sources"]],
        "score": columns["scores"].tolist(),
        "length": columns["response_mask"].sum(-1).tolist(),
        "finish_reason": [str(reason) for reason in objects["finish_reasons"]],
        "failed": [
            "timeout" if late else "error" if fail else "" for fail, late in zip(failed, timed_out, strict=True)
        ],
    }


def prompt_id(prompt: Any) -> str:
    """Return a name of a prompt, equal for equal prompts in all steps and runs."""
    text = json.dumps(prompt, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode("utf-8", errors="surrogatepass"), digest_size=5).hexdigest()


def _chosen(numbers: dict[str, list[Any]], count: int) -> list[int]:
    """Return the rows to keep, in ascending order."""
    scores, groups = numbers["score"], numbers["group"]
    rows = range(len(scores))
    failed = [row for row in rows if numbers["failed"][row]][: (count + 1) // 2]
    whole = [row for row in rows if not numbers["failed"][row] and scores[row] == scores[row]]
    ends = [choose(whole, key=scores.__getitem__) for choose in (max, min)] if whole else []
    first_of_group = dict(zip(reversed(groups), reversed(rows), strict=True))
    firsts = sorted(first_of_group.values())
    return sorted(list(dict.fromkeys([*failed, *ends, *firsts, *rows]))[:count])


def _samples(
    future: DataProtoFuture, rows: list[int], numbers: dict[str, list[Any]], log_tokens: int, text_of: TextOf
) -> list[Sample]:
    present = future.columns or ()
    of_tokens = [name for name in TOKEN_NUMBERS if name in present] if log_tokens else []
    of_episodes = [name for name in OF_EPISODES if name in present]
    data = future.get((*TEXTS, "scores", "responses", *of_episodes, *of_tokens))
    texts = data.non_tensor_batch
    samples = []
    for i, row in enumerate(rows):
        sample: Sample = {
            "row": row,
            "prompt": prompt_text(texts["raw_prompts"][i]),
            "rendered_prompt": texts["prompt_texts"][i],
            "ground_truth": bounded_json(texts["ground_truths"][i]),
            "response": texts["solution_texts"][i],
            **{name: of_rows[row] for name, of_rows in numbers.items() if name != "group"},
            **{OF_EPISODES[name]: texts[name][i] for name in of_episodes},
        }
        if log_tokens:
            sample["tokens"] = _tokens(data, i, min(sample["length"], log_tokens), of_tokens, text_of)
        samples.append(sample)
    return samples


def _tokens(
    data: DataProto, row: int, num_tokens: int, columns: Sequence[str], text_of: TextOf
) -> dict[str, list[Any]]:
    """Return ids, texts and numbers of the first `num_tokens` tokens; numbers that are all equal are listed once."""
    last = _num_positions(data, row, num_tokens)
    ids = data.batch["responses"][row, :last].tolist()
    tokens: dict[str, list[Any]] = {"ids": ids, "texts": [text_of(token) for token in ids]}
    for name in columns:
        values = data.batch[name]
        of_row = values[row].expand(data.batch["responses"].shape[1])[:last].tolist()
        numbers = [_rounded(value) for value in of_row]
        tokens[TOKEN_NUMBERS[name]] = numbers[:1] if len(set(numbers)) == 1 else numbers
    return tokens


def _num_positions(data: DataProto, row: int, num_tokens: int) -> int:
    """Return how many positions hold the first `num_tokens` tokens that count, and those before them that do not."""
    if "response_mask" not in data.batch or not num_tokens:
        return num_tokens
    counted = data.batch["response_mask"][row].cumsum(0)
    return int((counted < num_tokens).sum()) + 1


def _rounded(value: float) -> float | int | bool | str:
    """Return a number with DIGITS significant digits; as text if it is not finite, since JSON has none."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if abs(value) < float("inf") else str(value)
    return value


@cache
def _text_of_token(model_path: str) -> TextOf:
    """Return a function from the id of a token to its text."""
    tokenizer = load_tokenizer(model_path)

    @cache
    def text_of(token: int) -> str:
        return str(tokenizer.decode([token]))

    return text_of


def bounded_json(value: Any) -> Any:
    """Return a value that JSON can hold, as text cut to MAX_GROUND_TRUTH_CHARS if its JSON is longer."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):  # a date, bytes, NaN
        value = text = repr(value)
    return value if len(text) <= MAX_GROUND_TRUTH_CHARS else f"{text[:MAX_GROUND_TRUTH_CHARS]}..."


def prompt_text(messages: Any) -> str:
    """Return chat messages as one text."""
    return messages if isinstance(messages, str) else "\n".join(message["content"] for message in messages)
