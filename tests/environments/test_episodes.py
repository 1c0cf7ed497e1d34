"""Many episodes over an engine: the same tokens however long environments take, and none of them sampled twice."""

import asyncio

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from fixtures.chat_tokenizers import chat_tokenizer
from hybridflow.environments import (
    ChatRenderer,
    Environment,
    EpisodeLimits,
    EpisodeStart,
    Player,
    play_episodes,
)
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate

TOKENIZER = chat_tokenizer("qwen2_5")
STOP = TOKENIZER.eos_token_id
SAMPLING = SamplingParams(max_new_tokens=24, stop_token_ids=(STOP,))
LIMITS = EpisodeLimits(turns=3, tokens=60)


@pytest.fixture(scope="module")
def model():
    """Return a random model that ends a turn with a probability of about one in four."""
    config = Qwen2Config(
        vocab_size=len(TOKENIZER),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        with torch.no_grad():
            model.model.embed_tokens.weight.normal_()[:, 0] = 3.0
            model.lm_head.weight.normal_(std=0.1)[:, 0] = 0.0
            model.lm_head.weight[STOP, 0] = 2.0
    return model.eval()


class Talk(Environment):
    """Answers each turn with its number, after a while."""

    def __init__(self, seconds):
        self.seconds = seconds

    async def step(self, turn):
        await asyncio.sleep(self.seconds)
        return [{"role": "user", "content": f"turn {turn.number}"}]

    async def reward(self, episode):
        return float(len(episode.turns))


def play(model, seconds, count=6):
    renderer = ChatRenderer(TOKENIZER)
    starts = [
        EpisodeStart(Player(Talk(seconds(i)), renderer, [STOP], LIMITS), {"prompt": f"question {i}"}, (7, i))
        for i in range(count)
    ]
    return play_episodes(EmbeddedRollout(model), starts, SAMPLING)


def test_episodes_have_the_same_tokens_however_long_environments_take(model):
    quick = play(model, lambda i: 0.0)
    slow = play(model, lambda i: 0.01 * (i % 3))
    assert [episode.rows[0].ids for episode in quick] == [episode.rows[0].ids for episode in slow]
    assert {episode.episode.ended for episode in quick} <= {"turns", "tokens"}
    assert any(len(episode.episode.turns) == 3 for episode in quick)
    assert all(episode.rewards == {"score": float(len(episode.episode.turns))} for episode in quick)
    for episode in quick:
        (row,) = episode.rows
        assert sum(row.is_sampled) <= LIMITS.tokens
        text = TOKENIZER.decode(row.context)
        assert text.count("<|im_start|>assistant\n") == len(episode.episode.turns)


def test_log_probs_of_sampled_tokens_are_those_of_the_model(model):
    for episode in play(model, lambda i: 0.0, count=3):
        (row,) = episode.rows
        ids = torch.tensor([row.context])
        with torch.no_grad():
            all_log_probs = model(ids).logits[0, :-1].log_softmax(-1)
        chosen = all_log_probs.gather(-1, ids[0, 1:, None]).squeeze(-1)[len(row.prompt_ids) - 1 :]
        sampled = torch.tensor(row.is_sampled)
        torch.testing.assert_close(chosen[sampled], torch.tensor(row.log_probs)[sampled], atol=1e-4, rtol=1e-4)


def test_an_episode_of_one_turn_has_the_tokens_of_a_run_without_episodes(model):
    class Once(Talk):
        async def step(self, turn):
            return []

    renderer = ChatRenderer(TOKENIZER)
    player = Player(Once(0), renderer, [STOP], LIMITS)
    (episode,) = play_episodes(EmbeddedRollout(model), [EpisodeStart(player, {"prompt": "question"}, (7, 0))], SAMPLING)
    prompt = renderer.start([{"role": "user", "content": "question"}]).ids
    (completion,) = generate(EmbeddedRollout(model), [Request(0, prompt, SAMPLING, noise_key=(7, 0))])
    assert episode.rows[0].prompt_ids == prompt
    assert episode.rows[0].ids == completion.token_ids
    assert episode.rows[0].log_probs == completion.log_probs


def test_no_episodes_are_none(model):
    assert play_episodes(EmbeddedRollout(model), [], SAMPLING) == []
