"""Agents over an engine: they end whatever they wait for, are closed, and are scored once."""

import asyncio
import json
import threading

import pytest

from fixtures.chat_tokenizers import chat_tokenizer
from fixtures.tiny_episodes import talking_model
from hybridflow.environments import Agent, CallLimits, EnvironmentHost, EpisodeLimits, EpisodeStart
from hybridflow.environments.agents.agent_player import AgentPlayer
from hybridflow.environments.agents.chat import ChatRequest
from hybridflow.environments.agents.session import Session
from hybridflow.environments.agents.turn_tree import Renderers, TurnTree
from hybridflow.environments.episodes import episodes
from hybridflow.environments.episodes.episodes import RunningEpisodes
from hybridflow.environments.rewards.journal import RewardJournal
from hybridflow.rollout import EmbeddedRollout, SamplingParams

TOKENIZER = chat_tokenizer("qwen2_5")
STOP = TOKENIZER.eos_token_id
RENDERERS = Renderers(TOKENIZER)


@pytest.fixture(scope="module")
def model():
    return talking_model(TOKENIZER)


class Sessions(dict):
    """Serves sessions in this process."""

    base_url = "here"
    sessions = property(lambda self: self)

    async def remove(self, session_id):
        del self[session_id]


SESSIONS = Sessions()


def session_of(session):
    return SESSIONS[session.base_url.split("/")[1]]


async def chat(session, text, tokens=4):
    return await session_of(session).complete(ChatRequest(({"role": "user", "content": text},), max_tokens=tokens))


def running(model, loop, agent, count=4, *, journal=None, **kwargs):
    """Return the episodes of a class of agents, and their players."""

    def player(number):
        host = EnvironmentHost(agent, CallLimits())
        tree = TurnTree(RENDERERS, [STOP], EpisodeLimits(rows=99))
        session = Session(tree, None)
        return AgentPlayer(
            lambda question, is_alone: host.answer(question), lambda: session, SESSIONS, key=(number,), journal=journal
        )

    starts = [EpisodeStart(player(number), {"number": number}, (7, number)) for number in range(count)]
    sampling = SamplingParams(max_new_tokens=24, stop_token_ids=(STOP,))
    return RunningEpisodes(EmbeddedRollout(model), starts, sampling, loop, **kwargs), [each.player for each in starts]


@pytest.mark.parametrize("in_order", [True, False])
def test_agents_that_share_a_lock_do_not_wait_for_each_other_for_ever(model, loop, in_order, monkeypatch):
    for name in ("PATIENCE_S", "FIRST_TURNS_S"):
        monkeypatch.setattr(episodes, name, 0.0)
    lock = asyncio.Lock()

    class Locking(Agent):
        async def run(self, session, row):
            async with lock:
                await chat(session, "a")
                await chat(session, "b")
            return 1.0

    batch, _ = running(model, loop, Locking, in_order=in_order)
    assert [each.rewards for _, (each,) in batch.next(4)] == [{"score": 1.0}] * 4


def test_an_abandoned_batch_leaves_no_agent_also_if_it_has_just_asked(model, loop):
    asked, steps = threading.Event(), []

    class Asking(Agent):
        async def run(self, session, row):
            long = asyncio.ensure_future(chat(session, "a", tokens=24))
            await chat(session, "b", tokens=1)
            asyncio.get_running_loop().call_later(0.01, asked.set)
            await asyncio.gather(long, chat(session, "c"))  # asked for, but not taken before the next round

    def interrupt():
        steps.append(len(steps))
        if len(steps) == 2:
            assert asked.wait(60)
            raise KeyboardInterrupt

    batch, players = running(model, loop, Asking, between_steps=interrupt)
    with pytest.raises(KeyboardInterrupt):
        batch.next(4)

    async def ends():
        return await asyncio.gather(*(player._agent for player in players), return_exceptions=True)

    ended = asyncio.run_coroutine_threadsafe(ends(), loop).result(60)
    assert {type(each) for each in ended} == {asyncio.CancelledError}


def test_a_repeated_step_scores_no_agent_again_and_repeats_those_that_failed(model, loop, tmp_path):
    ran, scored, closed = [], [], []

    class Noisy(Agent):
        async def run(self, session, row):
            ran.append(row["number"])
            await chat(session, "a")
            if row["number"] == 0:
                raise KeyError("map")
            return 5.0 if row["number"] == 1 else None

        async def reward(self, episode):
            scored.append(episode.row["number"])
            return float(len(scored))

        async def close(self):
            closed.append(self)

    def play(**keeps):
        journal = RewardJournal(tmp_path, 0, "the class", **keeps)
        journal.open(1)
        batch, _ = running(model, loop, Noisy, journal=journal)
        return {number: (episode.rewards, episode.episode.error) for number, (episode,) in batch.next(4)}

    first = play(failures=False)
    assert first[1] == ({"score": 5.0}, "")
    assert "KeyError" in first[0][1]
    assert len(closed) == 4
    ran.clear()
    assert play(failures=True) == first
    assert play(failures=False) == first
    assert (ran, sorted(scored)) == ([0, 0], [2, 3])


def test_the_journal_has_each_message_and_tool_of_a_conversation_once(model, loop, tmp_path):
    ran = []
    tool = {"type": "function", "function": {"name": "add", "description": "sums", "parameters": {"type": "object"}}}

    class Talking(Agent):
        async def run(self, session, row):
            ran.append(row)
            messages = [{"role": "user", "content": "question"}]
            for number in (1, 1.0, True):
                request = ChatRequest(tuple(messages), (tool,), max_tokens=4)
                said = (await session_of(session).complete(request)).said.message()
                call = {"function": {"name": "add", "arguments": {"number": number}}}
                said = {**said, "tool_calls": [{"type": "function", **call}]}
                messages += [said, {"role": "tool", "name": "add", "content": f"result {len(messages)}"}]
            await session_of(session).complete(ChatRequest((messages[-1], {"role": "user", "content": "other"})))
            await session_of(session).complete(ChatRequest(tuple(messages), (tool,), temperature=1.0))
            return 1.0

    def play():
        journal = RewardJournal(tmp_path, 0, "the class", failures=False)
        journal.open(1)
        batch, _ = running(model, loop, Talking, 1, journal=journal)
        ((_, (episode,)),) = batch.next(1)
        return [row.ids for row in episode.rows], episode.episode

    assert play() == play()
    assert len(ran) == 1
    (journal,) = tmp_path.iterdir()
    assert [journal.read_text().count(text) for text in ("question", "result 1", "other")] == [2, 2, 1]  # a branch
    assert journal.read_text().count("sums") == 2


def test_a_repeated_step_keeps_no_turn_for_which_the_agent_did_not_wait(model, loop, tmp_path):
    class Asking(Agent):
        async def run(self, session, row):
            await asyncio.gather(chat(session, "a"), chat(session, "b"))
            return 1.0

    def play():
        journal = RewardJournal(tmp_path, 0, "the class", failures=False)
        journal.open(1)
        batch, _ = running(model, loop, Asking, 1, journal=journal)
        ((_, (episode,)),) = batch.next(1)
        return [row.ids for row in episode.rows]

    first = play()
    (journal,) = tmp_path.iterdir()
    row = json.loads(journal.read_text())
    outcome = json.loads(row["outcome"])
    script = json.loads(outcome["result"])
    unread, read = (event for event in script["events"] if event[0] == "got")
    script["events"].remove(unread)
    row["outcome"] = json.dumps({**outcome, "result": json.dumps(script)})
    journal.write_text(json.dumps(row) + "\n")
    assert play() == [first[read[1]]]


@pytest.mark.parametrize("in_order", [True, False])
def test_a_turn_that_is_given_up_is_stopped_unless_order_matters(model, loop, in_order, monkeypatch):
    asked, aborted, abort = [], [], EmbeddedRollout.abort
    monkeypatch.setattr(EmbeddedRollout, "abort", lambda self, number: aborted.append(number) or abort(self, number))

    class Leaver(Agent):
        async def run(self, session, row):
            asked.extend(asyncio.create_task(chat(session, f"a {number}", 24)) for number in range(5))
            await asyncio.wait(asked)
            await chat(session, "b", 24)
            return 1.0

    async def leave():
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)

    def between_steps():
        asyncio.run_coroutine_threadsafe(leave(), loop).result()

    batch, _ = running(model, loop, Leaver, 1, in_order=in_order, between_steps=between_steps)
    [(_, [episode])] = batch.next(1)
    assert bool(aborted) == (not in_order)
    assert episode.episode.messages[0]["content"] == "b"
