"""Many episodes over an engine: the same tokens however long environments take, and none of them sampled twice."""

import asyncio
import threading

import pytest
import torch

from fixtures.chat_tokenizers import chat_tokenizer
from fixtures.tiny_episodes import talking_model
from hybridflow.environments import (
    CallLimits,
    ChatRenderer,
    Environment,
    EnvironmentHost,
    EpisodeClient,
    EpisodeLimits,
    EpisodeStart,
    LocalEnvironment,
    Player,
    play_episodes,
)
from hybridflow.environments.episodes.episodes import RunningEpisodes
from hybridflow.errors import EnvironmentConfigError, RolloutError
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate

TOKENIZER = chat_tokenizer("qwen2_5")
STOP = TOKENIZER.eos_token_id
SAMPLING = SamplingParams(max_new_tokens=24, stop_token_ids=(STOP,))
LIMITS = EpisodeLimits(turns=3, tokens=60)


@pytest.fixture(scope="module")
def model():
    return talking_model(TOKENIZER)


class Talk(Environment):
    """Answers each turn with its number, after a while."""

    def __init__(self, seconds):
        self.seconds = seconds

    async def step(self, turn):
        await asyncio.sleep(self.seconds)
        return [{"role": "user", "content": f"turn {turn.number}"}]

    async def reward(self, episode):
        return float(len(episode.turns))


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def player_of(environment, turns=LIMITS.turns):
    client = EpisodeClient(LocalEnvironment(lambda: EnvironmentHost(lambda: environment, CallLimits())))
    return Player(client, ChatRenderer(TOKENIZER), [STOP], EpisodeLimits(turns=turns, tokens=LIMITS.tokens))


def starts_of(seconds, count=6):
    return [EpisodeStart(player_of(Talk(seconds(i))), {"prompt": f"question {i}"}, (7, i)) for i in range(count)]


def play(model, loop, seconds, count=6, *, in_order=True):
    return play_episodes(EmbeddedRollout(model), starts_of(seconds, count), SAMPLING, loop, in_order=in_order)


@pytest.mark.parametrize("in_order", [True, False])
def test_episodes_have_the_same_tokens_however_long_environments_take(model, loop, in_order):
    quick = play(model, loop, lambda i: 0.0, in_order=in_order)
    slow = play(model, loop, lambda i: 0.03 * (i % 3), in_order=in_order)
    assert [episode.rows[0].ids for episode in quick] == [episode.rows[0].ids for episode in slow]
    if in_order:  # then the same sequences run beside each other, so that the bits are equal
        assert [episode.rows[0].log_probs for episode in quick] == [episode.rows[0].log_probs for episode in slow]
    assert {episode.episode.ended for episode in quick} <= {"turns", "tokens"}
    assert any(len(episode.episode.turns) == 3 for episode in quick)
    assert all(episode.rewards == {"score": float(len(episode.episode.turns))} for episode in quick)
    for episode in quick:
        (row,) = episode.rows
        assert sum(row.is_sampled) <= LIMITS.tokens
        text = TOKENIZER.decode(row.context)
        assert text.count("<|im_start|>assistant\n") == len(episode.episode.turns)


def test_groups_come_as_they_end_with_the_tokens_of_the_whole_batch(model, loop):
    whole = play(model, loop, lambda i: 0.0)
    steps, found = [], []
    running = RunningEpisodes(
        EmbeddedRollout(model),
        starts_of(lambda i: 0.01 * (i % 2)),
        SAMPLING,
        loop,
        group_size=2,
        between_steps=lambda: steps.append(len(found)),
    )
    for count in (1, 2):
        found += running.next(count)
        assert running.num_left == 3 - len(found)
    assert sorted(number for number, _ in found) == [0, 1, 2]
    assert steps == sorted(steps) != []
    for number, episodes in found:
        of_whole = whole[2 * number : 2 * number + 2]
        assert [each.rows[0].ids for each in episodes] == [each.rows[0].ids for each in of_whole]
        assert [each.rows[0].log_probs for each in episodes] == [each.rows[0].log_probs for each in of_whole]
    with pytest.raises(RolloutError, match="has 0 groups left, fewer than 1"):
        running.next(1)


def test_log_probs_of_sampled_tokens_are_those_of_the_model(model, loop):
    for episode in play(model, loop, lambda i: 0.0, count=3):
        (row,) = episode.rows
        ids = torch.tensor([row.context])
        with torch.no_grad():
            all_log_probs = model(ids).logits[0, :-1].log_softmax(-1)
        chosen = all_log_probs.gather(-1, ids[0, 1:, None]).squeeze(-1)[len(row.prompt_ids) - 1 :]
        sampled = torch.tensor(row.is_sampled)
        torch.testing.assert_close(chosen[sampled], torch.tensor(row.log_probs)[sampled], atol=1e-4, rtol=1e-4)


def test_a_group_of_episodes_of_one_turn_equals_a_group_without_episodes(model, loop):
    starts = [EpisodeStart(player_of(Talk(0), turns=1), {"prompt": "question"}, (7, 0), index) for index in range(4)]
    played = play_episodes(EmbeddedRollout(model), starts, SAMPLING, loop)
    prompt = ChatRenderer(TOKENIZER).start([{"role": "user", "content": "question"}]).ids
    group = generate(EmbeddedRollout(model), [Request(0, prompt, SAMPLING, group_size=4, noise_key=(7, 0))])
    for episode, completion in zip(played, group, strict=True):
        assert episode.rows[0].prompt_ids == prompt
        assert episode.rows[0].ids == completion.token_ids
        assert episode.rows[0].log_probs == completion.log_probs


def test_a_turn_that_the_engine_refuses_is_an_error_and_leaves_it_idle(model, loop):
    engine = EmbeddedRollout(model)
    hostile = player_of(Talk(0))
    starts = [*starts_of(lambda i: 0.0), EpisodeStart(hostile, {"prompt": "a"}, (-(2**70),))]
    with pytest.raises(RolloutError, match="noise_key"):
        play_episodes(engine, starts, SAMPLING, loop)
    assert not engine.has_unfinished()
    assert len(play_episodes(engine, starts_of(lambda i: 0.0), SAMPLING, loop)) == 6
    assert play_episodes(engine, [], SAMPLING, loop) == []


def test_episodes_of_a_group_go_on_while_others_of_it_still_run(model, loop):
    starts = [EpisodeStart(player_of(Talk(0)), {"prompt": "question"}, (7, 0), index) for index in range(12)]
    played = play_episodes(EmbeddedRollout(model), starts, SAMPLING, loop, in_order=False)
    first = [each.rows[0].turns.count(0) for each in played]
    assert len(set(first)) > 3
    assert all(each.episode.ended in ("turns", "tokens") for each in played)


class Closes(Talk):
    """Ends the loop on which it runs, as sys.exit() in a task does."""

    async def step(self, turn):
        asyncio.get_running_loop().stop()
        await asyncio.sleep(60)


def test_a_loop_that_ends_among_episodes_is_an_error_and_leaves_the_engine_idle(model):
    loop = asyncio.new_event_loop()

    def serve():
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.1))
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    engine, starts = EmbeddedRollout(model), [EpisodeStart(player_of(Closes(0)), {"prompt": "question"}, (7, 0))]
    with pytest.raises((EnvironmentConfigError, RolloutError), match="pool"):
        play_episodes(engine, starts, SAMPLING, loop)
    thread.join()
    assert not engine.has_unfinished()
    with pytest.raises(EnvironmentConfigError, match="the event loop of the environments has ended"):
        play_episodes(engine, starts_of(lambda i: 0, 1), SAMPLING, loop)
    assert not engine.has_unfinished()


def test_an_engine_that_loses_a_turn_is_an_error_in_place_of_a_hang(model, loop):
    engine = EmbeddedRollout(model)
    engine.submit = lambda request: None
    with pytest.raises(RolloutError, match="has lost their turns"):
        play_episodes(engine, starts_of(lambda i: 0.0, 2), SAMPLING, loop)
