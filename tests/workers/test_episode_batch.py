"""Played episodes as columns: what the model made counts, what it was answered does not, unused rows hold nothing."""

import torch

from fixtures.chat_tokenizers import chat_tokenizer
from hybridflow.environments import CalledTool, EpisodeRow, PlayedEpisode, ToolCall, Turn
from hybridflow.environments.episodes.environment import Episode
from hybridflow.workers.episode_batch import episode_batch

TOKENIZER = chat_tokenizer("qwen2_5")


def played():
    row = EpisodeRow([5, 6])
    row.add_sampled([7, 8], [-0.1, -0.2], [3, 3], 0)
    row.add_reward(0.5)
    row.add_messages([9], 0)
    row.add_sampled([10], [-0.3], [3], 1)
    other = EpisodeRow([4, 5, 6])
    other.add_sampled([11], [-0.4], [4], 2)
    calls = (CalledTool(ToolCall("add"), "7"), CalledTool(ToolCall("add"), "error: no", is_error=True))
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    first = Episode({}, said, [Turn(0, "b", called=calls)], "done")
    return [
        PlayedEpisode(first, [row, other], num_first_messages=1),
        PlayedEpisode(Episode({}, [], [], "error"), [], failure="raised"),
    ]


def test_routes_of_rows_begin_with_their_prompts_and_others_are_not_recorded():
    episodes = played()
    first, other = episodes[0].rows
    known = torch.arange(5).view(5, 1, 1).to(torch.int16)
    first.add_routes(known[:3])
    first.add_routes(torch.cat([torch.full((3, 1, 1), 9), known[3:]]))  # a later turn computes earlier tokens again
    other.add_routes(None)
    column = episode_batch(episodes, [6, 7], 2, TOKENIZER, routes_shape=(1, 1)).batch["routes"]
    assert column.dtype == torch.int16
    assert column[0].flatten().tolist() == [-1, 0, 1, 2, 3, 4, -1]
    assert (column[1:] == -1).all()
    assert "routes" not in episode_batch(episodes, [6, 7], 2, TOKENIZER).batch


def test_rows_hold_prompts_turns_and_answers():
    batch = episode_batch(played(), [6, 7], 2, TOKENIZER)
    columns, objects, pad = batch.batch, batch.non_tensor_batch, batch.meta_info["pad_token_id"]
    assert columns["prompts"].tolist() == [[pad, 5, 6], [4, 5, 6], [pad, pad, pad], [pad, pad, pad]]
    assert columns["prompt_mask"].sum(-1).tolist() == [2, 3, 1, 1]
    assert columns["responses"][0].tolist() == [7, 8, 9, 10]
    assert columns["response_mask"].tolist()[:2] == [[True, True, False, True], [True, False, False, False]]
    assert not columns["response_mask"][2:].any()
    assert columns["attention_mask"].sum(-1).tolist() == [6, 4, 1, 1]
    assert columns["row_lengths"].tolist() == [6, 4, 1, 1]
    assert columns["input_ids"][0].tolist() == [pad, 5, 6, 7, 8, 9, 10]
    assert columns["position_ids"][0].tolist() == [0, 0, 1, 2, 3, 4, 5]
    assert columns["rollout_versions"][0].tolist() == [3, 3, -1, 3]
    assert columns["turn_ids"].tolist()[:2] == [[0, 0, 0, 1], [2, -1, -1, -1]]
    torch.testing.assert_close(columns["turn_rewards"][0], torch.tensor([0.0, 0.5, 0.0, 0.0]))
    assert columns["episode_ids"].tolist() == [6, 6, 7, 7]
    assert columns["num_tool_calls"].tolist() == [2, 2, 0, 0]
    assert columns["num_tool_errors"].tolist() == [1, 1, 0, 0]
    assert objects["finish_reasons"].tolist() == ["done", "done", "error", "error"]
    assert objects["episode_messages"][0] == [{"role": "assistant", "content": "b"}]
