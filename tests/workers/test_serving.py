"""Turns that an engine samples for requests outside of a run."""

import asyncio

import pytest

from fixtures.chat_tokenizers import chat_tokenizer
from fixtures.tiny_episodes import talking_model, write_episode_task
from hybridflow.config import load_config
from hybridflow.environments import EpisodeLimits
from hybridflow.environments.agents.chat import ChatRequest, RefusedError
from hybridflow.environments.agents.session import MAX_GIVEN_UP, Session
from hybridflow.environments.agents.turn_tree import Renderers, TurnTree
from hybridflow.rollout import Completion, EmbeddedRollout
from hybridflow.workers import serving
from hybridflow.workers.serving import ServedTurns, recorded, request_of

TOKENIZER = chat_tokenizer("qwen2_5")
STOP = [TOKENIZER.eos_token_id]
MODEL = talking_model(TOKENIZER)
CONFIG = load_config(None, ["data.max_response_length=40", "rollout.temperature=0.7", "rollout.stop_strings=['END']"])


class Served:
    """A server without HTTP: a tree of turns, and what was delivered."""

    def __init__(self, engine=None, **options):
        self.tree = TurnTree(Renderers(TOKENIZER), STOP, EpisodeLimits(10**9, 2048, 2048, 10**9))
        self.engine = engine or EmbeddedRollout(MODEL, tokenizer=TOKENIZER, **options)
        self.turns = ServedTurns(self.engine, lambda *turn: request_of(CONFIG, STOP, *turn), self.deliver)
        self.results = {}

    def deliver(self, turn, result, seconds):
        self.results[turn] = result
        if isinstance(result, Completion):
            self.tree.answer(turn, result)

    def begin(self, text="same", **request):
        turn = self.tree.ask(ChatRequest(({"role": "user", "content": text},), **request))
        self.turns.add([turn])
        return turn

    def end(self):
        while self.turns.running:
            self.turns.advance()

    def answer(self, text="same", **request):
        turn = self.begin(text, **request)
        self.end()
        return turn


def test_equal_requests_have_equal_answers_in_every_server_and_repeats_others():
    one, other = Served(), Served()
    other.answer("something else")
    said = [[served.answer().ids for _ in range(4)] for served in (one, other)]
    assert said[0] == said[1]
    assert len(set(map(tuple, said[0]))) > 1


def test_a_request_is_sampled_as_it_says_or_as_the_run_samples():
    tree = Served().tree
    bare = tree.ask(ChatRequest(({"role": "user", "content": "a"},)))
    own = {"max_tokens": 60, "stop": ("X",), "temperature": 0.0, "top_p": 0.5, "top_k": 3}
    full = tree.ask(ChatRequest(({"role": "user", "content": "a"},), **own))
    first, second = (request_of(CONFIG, STOP, 0, turn).sampling for turn in (bare, full))
    assert (first.max_new_tokens, first.temperature, first.top_k, first.top_p) == (40, 0.7, 0, 1.0)
    assert (second.max_new_tokens, second.temperature, second.top_k, second.top_p) == (60, 0.0, 3, 0.5)
    assert (first.stop_strings, second.stop_strings) == (("END",), ("END", "X"))


def test_a_turn_whose_client_has_gone_is_given_up_and_others_go_on():
    served = Served()
    gone, other = served.begin("gone"), served.begin("other")
    gone.is_dropped = True
    served.end()
    assert list(served.results) == [other]
    assert not served.engine.has_unfinished()


def test_after_an_error_of_the_engine_its_open_turns_are_refused():
    served = Served(kv_cache_bytes=2**14)
    large = served.answer("word " * 300)
    assert (served.results[large].status, served.results[large].code) == (500, "engine_failed")
    assert "raise rollout.kv_cache_bytes" in str(served.results[large])
    wrong = served.answer(top_p=0.0)
    assert served.results[wrong].status == 400
    assert served.answer().is_kept


def test_kept_keys_and_values_serve_the_next_turn_and_are_dropped_when_many(monkeypatch):
    served = Served()
    first = served.answer()
    messages = [*first.request.messages, first.reply.said.message(), {"role": "user", "content": "on"}]
    second = served.tree.ask(ChatRequest(tuple(messages)))
    served.turns.add([second])
    served.end()
    row = recorded(second, served.results[second], 0.5)
    assert (row["parent_id"], row["messages"][:-1]) == (first.turn_id, messages)
    assert row["prompt_ids"][: len(first.context) + len(first.ids)] == [*first.context, *first.ids]
    assert served.engine.reused_tokens == len(first.context) + len(first.ids) - 1
    assert served.engine._kept
    monkeypatch.setattr(serving, "KEPT_TOKENS", 1)
    served.answer()
    assert not served.engine._kept


def test_a_refused_turn_is_not_kept_and_its_client_gets_the_error():
    async def play():
        session = Session(Served().tree, None)
        waiting = asyncio.create_task(session.complete(ChatRequest(({"role": "user", "content": "a"},))))
        (turn,) = await session.next_turns()
        session.refuse(turn, RefusedError(500, "engine_failed", "no memory"))
        with pytest.raises(RefusedError, match="no memory"):
            await waiting
        assert turn.is_dropped

    asyncio.run(play())


@pytest.mark.parametrize("turns", [2, 10**9])
def test_clients_that_go_use_up_an_episode_of_an_agent_but_not_a_server(turns):
    async def play():
        limits = EpisodeLimits(turns, 2048, 2048, turns)
        session = Session(TurnTree(Renderers(TOKENIZER), STOP, limits), None)
        for _ in range(MAX_GIVEN_UP + 2):
            asking = asyncio.create_task(session.complete(ChatRequest(({"role": "user", "content": "a"},))))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait({asking})
        asking = asyncio.create_task(session.complete(ChatRequest(({"role": "user", "content": "a"},))))
        await asyncio.wait({asking, asyncio.ensure_future(session.next_turns())}, return_when=asyncio.FIRST_COMPLETED)
        refused = asking.done() and asking.exception()
        session.end()
        await asyncio.wait({asking})
        return str(refused)

    assert ("clients have given up" in asyncio.run(play())) == (turns == 2)


@pytest.mark.vllm
def test_vllm_serves_turns_and_refuses_what_it_cannot_sample(tmp_path):
    from fixtures.vllm_engines import lend_engine, take_back_engines

    write_episode_task(tmp_path, width=64)  # heads of 32 dimensions, which vLLM computes on a CPU
    try:
        served = Served(lend_engine(tmp_path / "model", tokenizer=TOKENIZER, dtype="float32", max_model_len=2048))
        turns = [served.begin(f"question {number}", temperature=number / 4) for number in range(8)]
        gone = served.begin("gone")
        gone.is_dropped = True
        wrong = served.begin("wrong", temperature=0.001)
        served.end()
        assert all(turn.is_kept for turn in turns)
        assert gone not in served.results
        assert "temperature=0.001, but vLLM samples at 0" in str(served.results[wrong])
    finally:
        take_back_engines()
