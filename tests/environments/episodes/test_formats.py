"""Turns of each family as text, read as calls; no text is an error."""

import random

import pytest

from fixtures.chat_tokenizers import ADDED, CONTROL, TEMPLATES
from hybridflow.environments import FORMATS, ToolCall, format_of, parse_plain

BY_NAME = {each.name: each for each in FORMATS}
FAMILIES = {"qwen2_5": "hermes", "qwen3": "hermes", "llama3": "llama3", "glm4_5": "glm", "deepseek_v3": "deepseek"}
DEEPSEEK = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
LLAMA3 = '{"name": "add", "parameters": {"a": 1, "b": "x"}}'
GLM = "<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>x</arg_value>"
ADD = ToolCall("add", {"a": 1, "b": "x"})


def test_the_format_of_a_family_is_known_by_its_template():
    formats = {family: format_of((TEMPLATES / f"{family}.jinja").read_text("utf-8")) for family in FAMILIES}
    assert {family: found and found.name for family, found in formats.items()} == FAMILIES
    assert format_of("{% for m in messages %}{{ m.content }}{% endfor %}") is None


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", 'so <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>', [ADD]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": \\"x\\"}"}</tool_call>', [ADD]),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>' * 2, [ToolCall("now"), ToolCall("now")]),
        ("llama3", LLAMA3, [ADD]),
        ("llama3", f'<|python_tag|>{LLAMA3}; {{"name": "now"}}', [ADD, ToolCall("now")]),
        ("deepseek", DEEPSEEK.format("add", '{"a": 1, "b": "x"}'), [ADD]),
        ("deepseek", DEEPSEEK.format("function", 'add\n```json\n{"a": 1, "b": "x"}\n```'), [ADD]),
        ("glm", f"<tool_call>add\n{GLM}\n</tool_call>", [ToolCall("add", {"a": "1", "b": "x"}, is_text=True)]),
    ],
)
def test_calls_are_read_as_each_family_writes_them(name, text, calls):
    turn = BY_NAME[name].parse(text)
    assert list(turn.calls) == calls
    assert turn.malformed == ()
    assert turn.content == ("so" if text.startswith("so") else "")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("hermes", "<tool_call>{</tool_call>", "a call is not JSON"),
        ("hermes", "<tool_call>[]</tool_call>", "a call must be a JSON object, got list"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'a call needs a "name"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": 3}</tool_call>', '"arguments" of f must be a JSON object'),
        ("hermes", '<tool_call>{"name": "f"}', "has no </tool_call>"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "a call is not JSON"),
        ("llama3", "<|python_tag|>print(1)", "a call is not JSON"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>", "has no <｜tool▁sep｜>"),
        ("deepseek", DEEPSEEK.format("f", "{"), "the arguments of f are not JSON"),
        ("hermes", '<tool_call>{"name": "f", "argument": {}}</tool_call>', "call of f has the unknown key 'argument'"),
        ("hermes", '<tool_call>{"name": "f", "parameters": {}}</tool_call>', 'it has "name" and "arguments"'),
        ("llama3", '<|python_tag|>{"name": "f", "arguments": {}}', 'it has "name" and "parameters"'),
        ("llama3", '{"name": "f", "parameters": {}, "id": 3}', "the call of f has the unknown key 'id'"),
        ("deepseek", DEEPSEEK.format("code", "f\n```json\n{}\n```"), "the call of f has the unknown type 'code'"),
        ("glm", f"<tool_call>f{GLM} b=2</tool_call>", "the call of f has 'b=2' after an <arg_value>"),
        ("glm", "<tool_call></tool_call>", "needs the name of a tool"),
        ("glm", "<tool_call>f<arg_key>a</tool_call>", "an <arg_key> of f has no"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(name, text, reason):
    turn = BY_NAME[name].parse(text)
    assert turn.calls == ()
    assert len(turn.malformed) == 1
    assert reason in turn.malformed[0]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\na\n</think>\n\nb", "a", "b"),
        ("a</think>b", "a", "b"),  # the prompt ends with <think>
        ("b", "", "b"),
        ("b <think>a", "a", "b"),  # cut
    ],
)
def test_reasoning_is_apart_from_the_answer(text, reasoning, content):
    for turn in (parse_plain(text), BY_NAME["hermes"].parse(text)):
        assert (turn.reasoning, turn.content) == (reasoning, content)


CALL = '<tool_call>{"name": "f"}</tool_call>'


@pytest.mark.parametrize(
    ("text", "is_reasoning", "reasoning", "num_calls"),
    [
        (f"a {CALL}", True, f"a {CALL}", 0),  # the turn ends within the reasoning that the prompt opened
        (f"a {CALL}</think>{CALL}", True, f"a {CALL}", 1),
        (f"<think>{CALL}</think>b<think>{CALL}", False, f"{CALL}\n{CALL}", 0),
        (f"<think>{CALL}</think>", True, CALL, 0),  # opened twice
        (f"{CALL} </think>", False, "", 1),
        ('<tool_call>{"name": "f", "arguments": {"a": "</think>"}}</tool_call>', False, "", 1),
    ],
)
def test_a_call_within_reasoning_is_not_made(text, is_reasoning, reasoning, num_calls):
    turn = BY_NAME["hermes"].parse(text, is_reasoning=is_reasoning)
    assert (turn.reasoning, len(turn.calls), turn.malformed) == (reasoning, num_calls, ())


@pytest.mark.parametrize("name", BY_NAME)
def test_no_text_of_marks_and_letters_is_an_error(name):
    marks = [*{mark for group in (*CONTROL.values(), *ADDED.values()) for mark in group}, "<think>", "</think>"]
    pieces = [*sorted(marks), '{"name": "f", "arguments": {"a": [1, null]}}', '"parameters"', "```json\n", *'\n"{}é\0']
    drawn = random.Random(0)
    for _ in range(1000):
        text = "".join(drawn.choices(pieces, k=drawn.randrange(12)))
        turn = BY_NAME[name].parse(text)
        assert all(isinstance(call.name, str) and isinstance(call.arguments, dict) for call in turn.calls)
        assert all(isinstance(reason, str) for reason in turn.malformed)


def test_turns_that_repeat_themselves_are_read_quickly_up_to_a_limit():
    assert len(BY_NAME["hermes"].parse('<tool_call>{"name": "f"}</tool_call>' * 10_000).calls) == 64
    turn = BY_NAME["glm"].parse(f"<tool_call>f{'<arg_key>a</arg_key><arg_value>b' * 20_000}</tool_call>")
    assert turn.malformed == ("an <arg_key> of f has no </arg_key> with an <arg_value>",)
    assert BY_NAME["llama3"].parse('{"answer": 3}').content == '{"answer": 3}'  # JSON, but no call


NESTED = "[" * 70 + "]" * 70


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ('{"x": NaN}', '"arguments" of f has the number nan'),
        ('{"x": [1e999]}', '"arguments" of f has the number inf'),
        ('{"\\ud800": 1}', '"arguments" of f has half of a character'),
        ('{"x": {"y": "a\\ud800b"}}', '"arguments" of f has half of a character'),
        (f'{{"x": {NESTED}}}', '"arguments" of f has more than 64 lists and objects inside each other'),
    ],
)
def test_a_call_with_what_other_programs_cannot_read_is_malformed(arguments, reason):
    turn = BY_NAME["hermes"].parse(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')
    assert (turn.calls, turn.malformed) == ((), (reason,))
    turn = BY_NAME["hermes"].parse('<tool_call>{"name": "\\ud800", "arguments": 3}</tool_call>')
    assert turn.malformed == ('a call needs a "name", a text',)
