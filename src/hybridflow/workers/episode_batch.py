"""Played episodes as the tensors of a rollout batch: `rows_per_episode` rows for each, and the columns of episodes.

A row is a prompt, then what the model said and what it was answered. Rows that an episode has not used have one token
and nothing to learn.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from hybridflow.data.tokenizer import pad_token_id, response_texts
from hybridflow.environments import EpisodeRow, PlayedEpisode
from hybridflow.models.routes import NOT_RECORDED, ROUTES
from hybridflow.protocol import DataProto

EPISODE_COLUMNS = (
    *("prompts", "prompt_mask", "prompt_texts", "episode_ids", "turn_ids", "turn_rewards"),
    *("row_lengths", "num_tool_calls", "num_tool_errors", "episode_messages"),
    *("agent_outputs", "answers"),
)
"""The columns of episodes besides `ROLLOUT_COLUMNS` and those of their rewards."""


def episode_batch(
    episodes: Sequence[PlayedEpisode],
    episode_ids: Sequence[int],
    rows_per_episode: int,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype = torch.float32,
    stop_ids: Sequence[int] = (),
    routes_shape: tuple[int, int] = (0, 0),
) -> DataProto:
    """Return the columns of `ROLLOUT_COLUMNS` and `EPISODE_COLUMNS`, `rows_per_episode` rows for each episode.

    `dtype`: dtype of the log-probs. `routes_shape`: that of the engine, see `RolloutEngine`.
    """
    padding = pad_token_id(tokenizer)
    rows: list[EpisodeRow] = []
    for episode in episodes:
        rows += episode.rows
        rows += [EpisodeRow([padding])] * (rows_per_episode - len(episode.rows))
    tensors = row_tensors(rows, padding, dtype)
    if any(routes_shape):
        routes = [torch.cat(row.routes) if row.routes else None for row in rows]
        tensors["routes"] = routes_column(routes, tensors["prompt_mask"], tensors["responses"].shape[1], routes_shape)
    turns = [each.episode.turns for each in episodes]
    wrong = [sum(len(turn.malformed) + sum(call.is_error for call in turn.called) for turn in each) for each in turns]
    of_episodes = {
        "episode_ids": torch.tensor(list(episode_ids)),
        "num_tool_calls": torch.tensor([sum(len(t.called) + len(t.malformed) for t in each) for each in turns]),
        "num_tool_errors": torch.tensor(wrong),
    }
    tensors |= {name: column.repeat_interleave(rows_per_episode) for name, column in of_episodes.items()}
    texts = response_texts(tokenizer, [row.ids for row in rows], stop_ids, [row.is_sampled for row in rows])
    prompts = tokenizer.batch_decode([row.prompt_ids for row in rows], skip_special_tokens=False)
    said = [each.episode.messages[each.num_first_messages :] for each in episodes]
    return DataProto.from_dict(
        tensors,
        {
            "prompt_texts": prompts,
            "solution_texts": texts,
            "finish_reasons": _repeated([each.episode.ended or "error" for each in episodes], rows_per_episode),
            "episode_messages": _repeated(said, rows_per_episode),
            "agent_outputs": _repeated([each.output for each in episodes], rows_per_episode),
        },
        {"pad_token_id": padding},
    )


def row_tensors(rows: Sequence[EpisodeRow], pad_token_id: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the columns of tokens: prompts padded on the left, what follows them on the right."""
    width = max(1, *(len(row.ids) for row in rows))  # at least one position, if no episode has any

    def right(values: list[list[Any]], fill: float, dtype: torch.dtype) -> Tensor:
        column = torch.full((len(rows), width), fill, dtype=dtype)
        for place, of_row in enumerate(values):
            column[place, : len(of_row)] = torch.tensor(of_row, dtype=dtype)
        return column

    prompts = [torch.tensor(row.prompt_ids) for row in rows]
    prompt_ids = pad_sequence(prompts, batch_first=True, padding_value=pad_token_id, padding_side="left")
    lengths = torch.tensor([len(row.prompt_ids) for row in rows])
    prompt_mask = torch.arange(prompt_ids.shape[1]) >= prompt_ids.shape[1] - lengths[:, None]
    responses = right([row.ids for row in rows], pad_token_id, torch.int64)
    is_real = torch.arange(width) < torch.tensor([len(row.ids) for row in rows])[:, None]
    attention_mask = torch.cat([prompt_mask, is_real], dim=-1).to(torch.int64)
    versions = [[v if own else -1 for v, own in zip(row.versions, row.is_sampled, strict=True)] for row in rows]
    return {
        "prompts": prompt_ids,
        "prompt_mask": prompt_mask,
        "responses": responses,
        "response_mask": right([row.is_sampled for row in rows], False, torch.bool),
        "input_ids": torch.cat([prompt_ids, responses], dim=-1),
        "attention_mask": attention_mask,
        "row_lengths": attention_mask.sum(-1),
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
        "rollout_log_probs": right([row.log_probs for row in rows], 0.0, dtype),
        "rollout_versions": right(versions, -1, torch.int64),
        "turn_ids": right([row.turns for row in rows], -1, torch.int64),
        "turn_rewards": right([row.rewards for row in rows], 0.0, torch.float32),
    }


def routes_column(
    routes: Sequence[Tensor | None], prompt_mask: Tensor, response_len: int, shape: tuple[int, int]
) -> Tensor:
    """Return the column `routes`: those of the first tokens of each row, whose prompts are padded on the left."""
    prompt_len = prompt_mask.shape[1]
    column = torch.full((len(routes), prompt_len + response_len, *shape), NOT_RECORDED, dtype=ROUTES)
    starts = prompt_len - prompt_mask.sum(-1)
    for row, start, of_row in zip(column, starts.tolist(), routes, strict=True):
        if of_row is not None:
            row[start : start + len(of_row)] = of_row
    return column


def _repeated(values: Sequence[Any], count: int) -> list[Any]:
    return [value for value in values for _ in range(count)]
