"""The tokens that clients got and the tokens that are trained are the same: trees of turns, played by real clients."""

import asyncio
import random
import threading
from collections import Counter
from contextlib import suppress

import openai
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.chat_tokenizers import chat_tokenizer
from fixtures.tiny_episodes import talking_model
from hybridflow.environments import EpisodeLimits, EpisodeStart, play_episodes
from hybridflow.environments.agents.agent_player import AgentPlayer
from hybridflow.environments.agents.session import Session
from hybridflow.environments.agents.turn_tree import Renderers, TurnTree
from hybridflow.environments.episodes.answers import Answer
from hybridflow.rollout import EmbeddedRollout, SamplingParams

TOKENIZER = chat_tokenizer("qwen2_5")
STOP = TOKENIZER.eos_token_id
RENDERERS = Renderers(TOKENIZER)
SAMPLING = SamplingParams(max_new_tokens=24, stop_token_ids=(STOP,))
LIMITS = EpisodeLimits(turns=100, rows=100, tokens=300, context_tokens=600)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CALLED = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "7"},
]


class Gated(EmbeddedRollout):
    """An engine that makes no step while a client is about to go."""

    gate = threading.Lock()
    is_giving_up = asyncio.Lock()

    def step(self):
        with self.gate:
            super().step()


@pytest.fixture(scope="module")
def model():
    return talking_model(TOKENIZER).double()


class Client:
    """An agent that does what a list of steps says, and keeps what it got."""

    def __init__(self, steps, api):
        self.steps, self.api = steps, api
        self.got, self.heard = [], [[{"role": "user", "content": "start"}]]
        self.session = None

    async def ask(self, messages, *, stream=False, **asked):
        """Return the conversation after a turn."""
        asked = {"model": "policy", "messages": messages, "max_tokens": 9, "logprobs": True, **asked}
        more = {"extra_body": {"return_token_ids": True}}
        content, ids, values, prompt = "", [], [], None
        if stream:
            async for chunk in await self.api.chat.completions.create(**asked, **more, stream=True):
                choice, prompt = chunk.choices[0], prompt or getattr(chunk, "prompt_token_ids", None)
                content += choice.delta.content or ""
                ids += getattr(choice, "token_ids", ())
                values += [each.logprob for each in choice.logprobs.content] if choice.logprobs else []
        else:
            answer = await self.api.chat.completions.create(**asked, **more)
            (choice,), prompt = answer.choices, answer.prompt_token_ids
            content, ids = choice.message.content, choice.token_ids
            values = [each.logprob for each in choice.logprobs.content]
        self.got.append((tuple(prompt), tuple(ids), tuple(values)))
        self.heard.append([*messages, {"role": "assistant", "content": content}])

    async def give_up(self, messages):
        """Ask, and go before there is an answer."""
        async with Gated.is_giving_up:
            while not Gated.gate.acquire(blocking=False):
                await asyncio.sleep(0.001)
            try:
                known = len(self.session.tree.turns)
                asking = asyncio.ensure_future(self.ask(messages))
                while len(self.session.tree.turns) == known:
                    await asyncio.sleep(0.001)
                asking.cancel()
                while not self.session.tree.turns[-1].is_dropped:
                    await asyncio.sleep(0.001)
            finally:
                Gated.gate.release()

    async def run(self):
        for kind, number in self.steps:
            said = self.heard[-1] if kind == "go on" else self.heard[number % len(self.heard)]
            on = [*said, {"role": "user", "content": f"and {number % 3}"}]
            match kind:
                case "go on" | "branch":
                    await self.ask(on, stream=number % 2 > 0)
                case "retry":
                    await self.ask(said[:-1] if said[-1]["role"] == "assistant" else said)
                case "rewind":
                    await self.ask([*said[:2], {"role": "user", "content": "again"}] if len(said) > 1 else on)
                case "compact":
                    await self.ask([{"role": "system", "content": "summary"}, *said[-2:], *on[-1:]])
                case "parallel":
                    await asyncio.gather(self.ask(on), self.ask(on, stream=True), self.ask(said[:1]))
                case "stop":
                    await self.ask(on, stop=["e", "a"], max_tokens=20)
                case "tools":
                    await self.ask([*on, *CALLED], tools=[TOOL])
                case "give up":
                    await self.give_up(on)


def play(model, endpoint, loop, scripts, *, in_order=True):
    """Play an episode for each script; return the episodes and their clients."""
    clients = []

    def player_of(steps):
        client = Client(steps, None)
        clients.append(client)

        def session():
            client.session = Session(TurnTree(RENDERERS, [STOP], LIMITS), None)
            return client.session

        async def ask(question, is_alone):
            client.api = shared.with_options(base_url=question.base_url, api_key=question.api_key)
            with suppress(openai.BadRequestError):  # the context is full
                await client.run()
            return Answer(is_done=True, rewards={"score": 1.0})

        return AgentPlayer(ask, session, endpoint)

    shared = openai.AsyncOpenAI(base_url="http://x", api_key="x", max_retries=0)
    starts = [EpisodeStart(player_of(steps), {}, (7, number)) for number, steps in enumerate(scripts)]
    try:
        episodes = play_episodes(Gated(model, tokenizer=TOKENIZER), starts, SAMPLING, loop, in_order=in_order)
    finally:
        asyncio.run_coroutine_threadsafe(shared.close(), loop).result(60)
    return episodes, clients


def ledger(episode):
    """Return the turns that are trained: what came before each, its tokens and their log-probs, from the rows."""
    turns = []
    for row in episode.rows:
        sampled = [place for place, own in enumerate(row.is_sampled) if own]
        for number in dict.fromkeys(row.turns[place] for place in sampled):
            places = [place for place in sampled if row.turns[place] == number]
            assert places == list(range(places[0], places[-1] + 1))
            before = (*row.prompt_ids, *row.ids[: places[0]])
            values = tuple(row.log_probs[place] for place in places)
            turns.append((before, tuple(row.ids[place] for place in places), values))
    return turns


def require_equal(episodes, clients):
    for episode, client in zip(episodes, clients, strict=True):
        assert episode.failure == (None if client.got else "raised"), episode.episode.error
        assert Counter(ledger(episode)) == Counter(client.got)
        assert len(episode.episode.turns) == len(client.got)


KINDS = ["go on", "go on", "branch", "retry", "rewind", "compact", "parallel", "stop", "tools", "give up"]
SCRIPT = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 1000)), min_size=1, max_size=7)


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(SCRIPT, min_size=1, max_size=5), st.booleans())
def test_the_tokens_that_clients_got_are_those_that_are_trained(model, endpoint, loop, scripts, in_order):
    episodes, clients = play(model, endpoint, loop, scripts, in_order=in_order)
    require_equal(episodes, clients)
    for row in (row for episode in episodes for row in episode.rows):
        with torch.no_grad():
            logits = model(torch.tensor([row.context])).logits[0, len(row.prompt_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(row.ids)[:, None])[:, 0]
        own = torch.tensor(row.is_sampled)
        assert torch.tensor(row.log_probs, dtype=torch.float64)[own] == pytest.approx(expected[own], abs=1e-6)


@pytest.mark.runs
@pytest.mark.own_run("episodes: 200 agents at once")
def test_two_hundred_sessions_at_once_keep_their_tokens_apart(model, endpoint, loop):
    draw = random.Random(0)
    scripts = [[(draw.choice(KINDS[:-1]), draw.randrange(1000)) for _ in range(1)] for _ in range(200)]
    episodes, clients = play(model, endpoint, loop, scripts, in_order=False)
    require_equal(episodes, clients)
    assert sum(len(client.got) for client in clients) >= 200
