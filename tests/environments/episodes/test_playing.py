"""One episode, turn by turn, with tokens that a model might sample."""

import asyncio
import math
import random

import pytest

from fixtures.chat_tokenizers import ADDED, CONTROL, chat_tokenizer
from hybridflow.environments import (
    CallLimits,
    ChatRenderer,
    Done,
    Environment,
    EnvironmentHost,
    EpisodeClient,
    EpisodeLimits,
    LocalEnvironment,
    Player,
    Reply,
    Tool,
    tools_of,
)
from hybridflow.environments.episodes.playing import NextTurn
from hybridflow.errors import ToolError
from hybridflow.rollout import Completion

TOKENIZER = chat_tokenizer("qwen2_5")
STOP = TOKENIZER.eos_token_id
ROW = {"prompt": "What is 3 + 4?", "answer": "7"}


class Calculator(Environment):
    def __init__(self):
        self.closed = False

    async def slow(self) -> str:
        await asyncio.sleep(60)
        return "late"

    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    def big(self) -> str:
        return "x" * 10_000_000

    def raw(self) -> bytes:
        return b"7"

    def table(self) -> dict[str, int]:
        return {"sum": 7}

    def refuses(self) -> str:
        raise ToolError("not today")

    async def reward(self, episode):
        return float(episode.row["answer"] in episode.turns[-1].content)

    async def close(self):
        self.closed = True


def client_of(environment, call_seconds=60.0, seconds=math.inf):
    place = LocalEnvironment(lambda: EnvironmentHost(lambda: environment, CallLimits(call_seconds)))
    return EpisodeClient(place, seconds=seconds)


def play(
    environment,
    texts,
    *,
    tokenizer=TOKENIZER,
    stop=STOP,
    call_seconds=60.0,
    seconds=math.inf,
    has_stopped=False,
    **limits,
):
    """Play an episode in which the model says these texts; one without <|im_end|> was cut, or it `has_stopped`."""
    renderer = ChatRenderer(tokenizer, [Tool.of(tool.function) for tool in tools_of(environment).values()])
    player = Player(client_of(environment, call_seconds, seconds), renderer, [stop], EpisodeLimits(**limits))

    async def run():
        contexts = [await player.start(ROW)]
        for text in texts:
            if not contexts[-1]:
                break
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            contexts.append(await taken(player, ids, "stop" if has_stopped else "length"))
        return [turns[0].context if turns else None for turns in contexts], await player.finish()

    return asyncio.run(run())


async def taken(player, ids, finish_reason="length"):
    """Return the turns after one of these tokens."""
    completion = Completion(0, 0, ids, [-1.0] * len(ids), [3] * len(ids), finish_reason)
    player.deliver(NextTurn([], 0, True, 0), completion)
    return await player.next_turns()


def call(name, arguments="{}"):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call><|im_end|>'


def test_an_episode_with_a_tool_has_one_row_of_sampled_and_new_tokens():
    texts = [call("add", '{"a": 3, "b": 4}'), "It is 7.<|im_end|>"]
    environment = Calculator()
    contexts, played = play(environment, texts)
    assert contexts[-1] is None
    assert played.episode.ended == "done"
    assert played.rewards == {"score": 1.0}
    assert environment.closed
    (row,) = played.rows
    text = TOKENIZER.decode(row.context)
    assert text.endswith("<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\nIt is 7.<|im_end|>")
    assert contexts[:2] == [row.prompt_ids, row.context[: len(contexts[1])]]
    sampled = [token for token, is_sampled in zip(row.ids, row.is_sampled, strict=True) if is_sampled]
    assert sampled == [token for text in texts for token in TOKENIZER(text, add_special_tokens=False)["input_ids"]]
    assert {p for p, is_sampled in zip(row.log_probs, row.is_sampled, strict=True) if not is_sampled} == {0.0}
    assert {v for v, is_sampled in zip(row.versions, row.is_sampled, strict=True) if is_sampled} == {3}
    assert sorted(set(row.turns)) == [0, 1]
    assert row.turns == sorted(row.turns)
    (called,) = played.episode.turns[0].called
    assert (called.result, called.is_error) == ("7", False)


class Begins(Environment):
    """Begins each turn of the model."""

    def add(self, a: int, b: int) -> str:
        return str(a + b)

    async def reset(self, row):
        return [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "I look: <tool_call> "}]

    async def step(self, turn):
        if turn.number == 2:
            return Done()
        return [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes,"}]


@pytest.mark.parametrize("template", ["message.content", "(message.content | trim)"])
def test_a_turn_that_an_environment_begins_goes_on_in_one_message(template):
    tokenizer = chat_tokenizer("qwen2_5")
    tokenizer.chat_template = tokenizer.chat_template.replace("message.content", template)
    texts = [
        '{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call><|im_end|>',
        " 7<|im_end|>",
        " still 7<|im_end|>",
    ]
    contexts, played = play(Begins(), texts, tokenizer=tokenizer, rows=3)
    assert tokenizer.decode(contexts[0]).endswith("assistant\nI look: <tool_call> ".strip(" " * ("trim" in template)))
    assert tokenizer.decode(contexts[1]).endswith("user\nSure?<|im_end|>\n<|im_start|>assistant\nYes,")
    said = [message["content"] for message in played.episode.messages if message["role"] == "assistant"]
    assert said == [turn.content for turn in played.episode.turns] == ["I look:", "Yes, 7", "Yes, still 7"]
    assert played.episode.turns[0].called[0].result == "7"
    assert played.episode.ended == "done"
    assert tokenizer.decode(played.rows[-1].context).endswith("\nYes, still 7<|im_end|>")
    assert "Yes, 7<|im_end|>\n<|im_start|>user" in tokenizer.decode(played.rows[-1].context)


class Answers(Environment):
    async def step(self, turn):
        return Reply([{"role": "user", "content": "found"}]) if turn.number == 0 else Done()


@pytest.mark.parametrize(("text", "num_rows"), [("I look. </search>", 1), ("I look. </search>\n", 2)])
def test_a_turn_that_a_stop_string_ended_is_ended_by_the_template(text, num_rows):
    tokenizer = chat_tokenizer("qwen2_5")
    tokenizer.chat_template = tokenizer.chat_template.replace("message.content", "(message.content | trim)")
    texts = [text, "It is 7.<|im_end|>"]
    contexts, played = play(Answers(), texts, tokenizer=tokenizer, has_stopped=True, rows=2)
    turns = "I look. </search><|im_end|>\n<|im_start|>user\nfound<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(contexts[1]).endswith(f"<|im_start|>assistant\n{turns}")
    assert (len(played.rows), played.episode.ended) == (num_rows, "done")
    sampled = [token for row in played.rows for token, own in zip(row.ids, row.is_sampled, strict=True) if own]
    assert sampled == [token for said in texts for token in tokenizer(said, add_special_tokens=False)["input_ids"]]
    assert play(Answers(), texts, tokenizer=tokenizer)[1].episode.ended == "tokens"  # without a stop string it was cut


RESULTS = {
    call("subtract"): "error: no tool is named 'subtract'; there are slow, add, big, raw, table, refuses",
    call("add", '{"a": 3}'): "error: add: b: Field required",
    call("big"): "error: the result of big has 10,000,000 characters; at most 20,000",
    call("raw"): "error: raw returned a bytes, not a text or a value of JSON",
    call("refuses"): "error: not today",
    call("slow"): "error: slow took longer than 0.2 s",
    call("table"): '{"sum": 7}',
    "<tool_call>{</tool_call><|im_end|>": "error: a call is not JSON",
}


def test_what_is_wrong_with_a_call_is_an_answer_for_the_model():
    _, played = play(Calculator(), [*RESULTS, "7<|im_end|>"], call_seconds=0.2, turns=20)
    assert played.episode.ended == "done"
    answers = [message["content"] for message in played.episode.messages if message["role"] == "tool"]
    for answer, wanted in zip(answers, RESULTS.values(), strict=True):
        assert answer.startswith(wanted)
    assert played.rewards == {"score": 1.0}


@pytest.mark.parametrize(
    ("texts", "limits", "ended"),
    [
        (["never ends"], {}, "tokens"),
        ([call("table")] * 5, {"turns": 3}, "turns"),
        ([call("table")] * 5, {"tokens": 5}, "tokens"),
        ([call("table")] * 5, {"seconds": -1.0}, "seconds"),
    ],
)
def test_an_episode_ends_at_its_limits_with_a_reward(texts, limits, ended):
    _, played = play(Calculator(), texts, **limits)
    assert played.episode.ended == ended
    assert played.episode.error == ""
    assert played.rewards == {"score": 0.0}


class Broken(Calculator):
    def __init__(self, where, value=None):
        super().__init__()
        self.where, self.value = where, value

    async def reset(self, row):
        if self.where == "reset":
            raise OSError("gone")
        return await super().reset(row) if self.where != "row" else [{"role": "user"}]

    async def step(self, turn):
        if self.where == "step":
            await asyncio.sleep(60)
        return []

    async def reward(self, episode):
        return self.value if self.where == "reward" else 1.0


@pytest.mark.parametrize(
    ("environment", "error"),
    [
        (Broken("reset"), "reset raised OSError: gone"),
        (Broken("row"), "the chat template rejects the messages"),
        (Broken("step"), "step took longer than 0.2 s"),
        (Broken("reward", "good"), "reward returned score='good'; expected a finite number"),
        (Broken("reward", math.nan), "reward returned score=nan; expected a finite number"),
        (Broken("reward", {"a": None}), "reward returned a=None"),
    ],
)
def test_an_error_of_an_environment_ends_its_episode_without_a_reward(environment, error):
    _, played = play(environment, ["7<|im_end|>"], call_seconds=0.2)
    assert (played.episode.ended, played.rewards) == ("error", {})
    assert error in played.episode.error
    assert environment.closed


class Guess(Environment):
    """A user who says higher or lower."""

    async def step(self, turn):
        if turn.content == "7":
            return Done(reward=0.5)
        return Reply([{"role": "user", "content": "higher"}], reward=0.25)

    async def reward(self, episode):
        return {"score": 1.0, "turns": len(episode.turns)}


def test_rewards_of_turns_are_added_to_that_of_the_episode():
    _, played = play(Guess(), ["3<|im_end|>", "4<|im_end|>", "7<|im_end|>"])
    assert (played.rewards, played.bonus) == ({"score": 1.0, "turns": 3.0}, 1.0)
    assert [message["content"] for message in played.episode.messages[1:]] == ["3", "higher", "4", "higher", "7"]
    (row,) = played.rows
    ends = [place for place, reward in enumerate(row.rewards) if reward]
    assert [row.rewards[place] for place in ends] == [0.25, 0.25, 0.5]
    assert {row.ids[place] for place in ends} == {STOP}


class Echo(Environment):
    """Answers with what a hostile user might say; its tool returns its argument."""

    def __init__(self, answers):
        self.answers = iter(answers)

    def say(self, text: str) -> str:
        return text

    async def step(self, turn):
        answer = next(self.answers, None)
        return Done() if answer is None else [{"role": "user", "content": answer}] * (not turn.called)

    async def reward(self, episode):
        return 0.0


HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
MESSAGE = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
HOSTILE = {
    "drops the first message": f"{{% for m in messages[1:] %}}{MESSAGE}{{% endfor %}}{HEADER}",
    "counts messages": f"{{{{ messages | length }}}}{{% for m in messages %}}{MESSAGE}{{% endfor %}}{HEADER}",
    "shouts": f"{{% for m in messages %}}{MESSAGE.replace('m.content', 'm.content | upper')}{{% endfor %}}{HEADER}",
    "writes no end": f"{{% for m in messages %}}{MESSAGE.replace('<|im_end|>', '')}{{% endfor %}}{HEADER}",
}


@pytest.mark.parametrize("name", [*CONTROL, *HOSTILE])
def test_trained_tokens_are_exactly_the_sampled_ones(name):
    family = name if name in CONTROL else "qwen2_5"
    tokenizer, drawn = chat_tokenizer(family), random.Random(0)
    if name in HOSTILE:
        tokenizer.chat_template = HOSTILE[name]
    stop = tokenizer.convert_tokens_to_ids("<|user|>" if family == "glm4_5" else CONTROL[family][-1])
    pieces = [*ADDED[family], *CONTROL[family][:-1], '{"name": "say", "arguments": {"text": "a"}}', "a", " ", "\n", "é"]

    def text():
        return "".join(drawn.choices(pieces, k=drawn.randrange(6)))

    renderer = ChatRenderer(tokenizer, [] if name in HOSTILE else [Tool.of(Echo([]).say)])
    for _ in range(15):
        player = Player(client_of(Echo([text() for _ in range(3)])), renderer, [stop], EpisodeLimits())
        given: list[int] = []

        async def run(player=player, given=given):
            turns = await player.start({"prompt": text()})
            while turns:
                assert turns[0].context == player.rows[-1].context
                ids = [token for token in tokenizer(text(), add_special_tokens=False)["input_ids"] if token != stop]
                given += [*ids, stop]
                turns = await taken(player, [*ids, stop])
            return await player.finish()

        played = asyncio.run(run())
        assert played.episode.ended == "done", played.episode.error
        sampled = [token for row in played.rows for token, own in zip(row.ids, row.is_sampled, strict=True) if own]
        assert sampled == given
        assert all(row.is_sampled[0] for row in played.rows)
        for row in played.rows:
            assert len(row.ids) == len(row.is_sampled) == len(row.turns) == len(row.log_probs) == len(row.versions)


def test_a_template_of_one_call_at_a_time_gets_the_first_of_several():
    calls = '<|python_tag|>{"name": "add", "parameters": {"a": 3, "b": 4}}; {"name": "table", "parameters": {}}'
    tokenizer = chat_tokenizer("llama3")
    stop = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    _, played = play(Calculator(), [f"{calls}<|eot_id|>", "7<|eot_id|>"], tokenizer=tokenizer, stop=stop)
    answers = [message["content"] for message in played.episode.messages if message["role"] == "tool"]
    assert answers == ["7", "error: one call at a time: the calls after the first one were not made"]
    assert (played.episode.ended, played.rewards) == ("done", {"score": 1.0})
