"""Conversations of data become the rows of episodes: each turn of the assistant is trained once, and nothing else."""

import asyncio
import json
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.chat_tokenizers import ADDED, CONTROL, chat_tokenizer
from hybridflow.data.turns import TurnEncoder
from hybridflow.environments import (
    CallLimits,
    ChatRenderer,
    Done,
    Environment,
    EnvironmentHost,
    EpisodeClient,
    EpisodeEncoder,
    EpisodeLimits,
    LocalEnvironment,
    Player,
    tools_of,
)
from hybridflow.errors import DataError
from hybridflow.rollout import Completion

FAMILIES = tuple(CONTROL)
TOKENIZERS = {family: chat_tokenizer(family) for family in FAMILIES}


class Calculator(Environment):
    """A user who asks once more after the first answer."""

    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    async def step(self, turn):
        if turn.called:
            return []
        return [{"role": "user", "content": "And twice that?"}] if turn.number < 2 else Done()

    async def reward(self, episode):
        return 1.0


TOOLS = [tool.schema() for tool in tools_of(Calculator()).values()]


def call(**arguments):
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


EPISODE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "", "tool_calls": [call(a=3, b=4)]},
    {"role": "tool", "name": "add", "content": "7"},
    {"role": "assistant", "content": "It is 7."},
    {"role": "user", "content": "And twice that?"},
    {"role": "assistant", "content": "14"},
]
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>'
TURNS = {
    "qwen2_5": [HERMES, "It is 7.<|im_end|>", "14<|im_end|>"],
    "qwen3": [f"<think>\n\n</think>\n\n{turn}" for turn in (HERMES, "It is 7.<|im_end|>", "14<|im_end|>")],
    "llama3": ['{"name": "add", "parameters": {"a": 3, "b": 4}}<|eot_id|>', "It is 7.<|eot_id|>", "14<|eot_id|>"],
    "glm4_5": [
        "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>4</arg_value>\n</tool_call><|observation|>",
        "\nIt is 7.<|user|>",
        "\n14<|user|>",
    ],
    "deepseek_v3": [
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 3, "b": 4}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        "It is 7.<｜end▁of▁sentence｜>",
        "14<｜end▁of▁sentence｜>",
    ],
}


def stop_ids_of(family):
    marks = ("<|user|>", "<|observation|>") if family == "glm4_5" else (CONTROL[family][-1],)
    return TOKENIZERS[family].convert_tokens_to_ids(list(marks))


def encoder_of(family):
    return EpisodeEncoder(TOKENIZERS[family], stop_ids_of(family))


def turns_of(rows):
    """Return (number of the row, tokens before the turn, tokens of the turn) for each run of trained tokens."""
    found = []
    for number, row in enumerate(rows):
        begin = None
        for place, counts in enumerate([*row.counts, False]):
            if counts and begin is None:
                begin = place
            if not counts and begin is not None:
                found.append((number, [*row.prompt, *row.response[:begin]], row.response[begin:place]))
                begin = None
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_that_count_are_those_of_the_turns(family):
    rows = encoder_of(family)(EPISODE, TOOLS, "row 0")
    assert [TOKENIZERS[family].decode(ids) for _, _, ids in turns_of(rows)] == TURNS[family]
    assert len(rows) == (3 if family == "qwen3" else 1)
    assert all(row.counts[0] and row.counts[-1] for row in rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_those_of_an_episode_with_the_same_turns(family):
    tokenizer = TOKENIZERS[family]
    rows = encoder_of(family)(EPISODE, TOOLS, "row 0")
    renderer = ChatRenderer(tokenizer, list(tools_of(Calculator()).values()))
    client = EpisodeClient(LocalEnvironment(lambda: EnvironmentHost(Calculator, CallLimits())))
    player = Player(client, renderer, stop_ids_of(family), EpisodeLimits())

    async def play():
        (turn,) = await player.start({"prompt": EPISODE[:2]})
        contexts = []
        for _, _, ids in turns_of(rows):
            contexts.append(turn.context)
            player.deliver(turn, Completion(0, 0, ids, [0.0] * len(ids), [0] * len(ids), "length"))
            turn, *_ = [*await player.next_turns(), None]
        return contexts, turn

    contexts, end = asyncio.run(play())
    assert end is None
    assert player.episode.error == ""
    assert [before for _, before, _ in turns_of(rows)] == contexts
    assert [(row.prompt_ids, row.ids, row.is_sampled) for row in player.rows] == [
        (row.prompt, row.response, row.counts) for row in rows
    ]


def test_reasoning_that_the_template_drops_is_trained_in_a_row_of_its_own():
    messages = [
        {"role": "user", "content": "3 + 4?"},
        {"role": "assistant", "reasoning_content": "I add.", "content": "", "tool_calls": [call(a=3, b=4)]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "reasoning_content": "Done.", "content": "7"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "reasoning_content": "Yes.", "content": "Sure"},
    ]
    first, second = encoder_of("qwen3")(messages, TOOLS, "row 0")
    decode = TOKENIZERS["qwen3"].decode
    assert [decode(ids) for _, _, ids in turns_of([first, second])] == [
        f"<think>\nI add.\n</think>\n\n{HERMES}",
        "<think>\nDone.\n</think>\n\n7<|im_end|>",
        "<think>\nYes.\n</think>\n\nSure<|im_end|>",
    ]
    assert decode(first.response).count("<think>") == 2
    assert "I add" not in decode(second.prompt)
    assert decode(second.prompt).endswith("7<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n")


def test_messages_after_the_last_turn_are_left_out():
    for family in FAMILIES:
        encoder = encoder_of(family)
        assert encoder(EPISODE[:5], TOOLS, "row 0") == encoder(EPISODE[:6], TOOLS, "row 0")


@pytest.mark.parametrize("family", ["qwen2_5", "llama3", "deepseek_v3"])
def test_a_conversation_without_tools_has_the_tokens_of_plain_training(family):
    tokenizer = TOKENIZERS[family]
    messages = [EPISODE[0], EPISODE[1], *EPISODE[4:]]
    assert encoder_of(family)(messages, [], "row 0") == TurnEncoder(tokenizer)(messages, [], "row 0")


def hostile(family):
    marks = [*CONTROL[family], *ADDED[family], "\ue0000\ue001", "\ue000", "\ue001", "<", "|", '"', "\n", " ", "a", "ü"]
    return st.lists(st.sampled_from(marks), max_size=6).map("".join) | st.text(max_size=8)


def conversation(texts):
    """Return an episode with these texts in all places in which data may have them."""
    system, user, argument, result, answer, again = texts
    return [
        {"role": "system", "content": f"s{system}s"},
        {"role": "user", "content": f"u{user}u"},
        {"role": "assistant", "content": "", "tool_calls": [call(a=f"x{argument}x", b=4)]},
        {"role": "tool", "name": "add", "content": f"r{result}r"},
        {"role": "assistant", "content": f"y{answer}y"},
        {"role": "user", "content": f"v{again}v"},
        {"role": "assistant", "content": "end"},
    ]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=20, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_control_tokens_in_texts_and_schemas_stay_text(family, data):
    *texts, answer = data.draw(st.tuples(*[hostile(family)] * 6))
    for mark in TOKENIZERS[family].batch_decode([[stop] for stop in stop_ids_of(family)]):
        answer = answer.replace(mark, "")
    texts.insert(4, answer)
    tokenizer, encoder = TOKENIZERS[family], encoder_of(family)
    function = {**TOOLS[0]["function"], "description": "".join(CONTROL[family])}
    tools = [{"type": "function", "function": function}]
    plain, rows = encoder(conversation([""] * 6), TOOLS, "row 0"), encoder(conversation(texts), tools, "row 0")
    special = set(tokenizer.convert_tokens_to_ids(list(CONTROL[family])))

    def control(row):
        counts = [*[False] * len(row.prompt), *row.counts]
        ids = [*row.prompt, *row.response]
        return [(token, is_trained) for token, is_trained in zip(ids, counts, strict=True) if token in special]

    assert [control(row) for row in rows] == [control(row) for row in plain]
    said = [tokenizer.decode(ids) for _, _, ids in turns_of(rows)]
    empty = [tokenizer.decode(ids) for _, _, ids in turns_of(plain)]
    written = texts[2] if family == "glm4_5" else json.dumps(texts[2], ensure_ascii=False)[1:-1]
    assert said == [empty[0].replace("xx", f"x{written}x"), empty[1].replace("yy", f"y{texts[4]}y"), empty[2]]


WITHOUT_TOOL = (
    "{# <tool_call> </tool_call> #}{{ tools }}{% for m in messages %}{% if m.role != 'tool' %}"
    "{{ m.role }}:{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
PLAIN = WITHOUT_TOOL.replace("{# <tool_call> </tool_call> #}{{ tools }}", "").replace(" != 'tool'", "")


@pytest.mark.parametrize(
    ("template", "messages", "tools", "problem"),
    [
        (None, EPISODE, TOOLS, "has no chat template"),
        (PLAIN, EPISODE, TOOLS, "in a format that is not known; expected that of Hermes"),
        (PLAIN, EPISODE, [], "in a format that is not known; expected that of Hermes"),
        (WITHOUT_TOOL, EPISODE, TOOLS, "does not write message 3, of the role tool"),
        (WITHOUT_TOOL.replace("{{ tools }}", ""), EPISODE[:3], TOOLS, "does not write the tool 'add'"),
        (WITHOUT_TOOL.replace(":{{", "<|im_end|>{{"), EPISODE[:3], TOOLS, "writes the prompt of message 2 in another"),
        ("{{ raise_exception('no tool here') }}", EPISODE[3:5], [], "rejects the messages: no tool here"),
        (PLAIN, EPISODE[:2], [], "has the roles system, user; expected a message of the assistant"),
        (PLAIN, EPISODE[2:], [], "has the roles assistant, tool, assistant, user, assistant; expected"),
    ],
)
def test_a_template_that_cannot_write_a_row_is_an_error_with_its_place(template, messages, tools, problem):
    tokenizer = chat_tokenizer("qwen2_5")
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=f"^a.jsonl: line 4: .*{problem}"):
        EpisodeEncoder(tokenizer, [tokenizer.eos_token_id])(messages, tools, "a.jsonl: line 4")


def test_what_a_template_does_not_write_of_a_turn_is_logged_once(caplog):
    messages = [EPISODE[1], {**EPISODE[2], "content": "I add."}, EPISODE[3], EPISODE[4]]
    encoder = encoder_of("llama3")
    with caplog.at_level(logging.WARNING):
        encoder(EPISODE, TOOLS, "row 0")
        assert caplog.text == ""
        encoder(messages, TOOLS, "row 1")
        encoder(messages, TOOLS, "row 2")
    (record,) = caplog.records
    assert record.getMessage().startswith('row 1: message 1: the chat template writes this turn as \'{"name": "add"')
    assert "without content='I add.', which is not learned" in record.getMessage()
