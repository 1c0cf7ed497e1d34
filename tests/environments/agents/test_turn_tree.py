"""Trees of turns: what clients got and what is trained are the same tokens, each once, whatever clients repeat."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.chat_tokenizers import chat_tokenizer
from hybridflow.environments.agents.chat import ChatRequest, RefusedError
from hybridflow.environments.agents.turn_tree import Renderers, TurnTree
from hybridflow.environments.episodes.playing import EpisodeLimits
from hybridflow.rollout import Completion

TOKENIZER = chat_tokenizer("qwen2_5")
STOP = TOKENIZER.eos_token_id
RENDERERS = Renderers(TOKENIZER)
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


def user(text):
    return {"role": "user", "content": text}


def new_tree(**limits):
    return TurnTree(RENDERERS, [STOP], EpisodeLimits(**{"turns": 100, "rows": 100, "tokens": 4000, **limits}))


def sampled(text, *, stops=True, context=()):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"] + [STOP] * stops
    routes = routes_of([*context, *ids]) if context else None
    return Completion(0, 0, ids, [-0.5] * len(ids), [3] * len(ids), "stop" if stops else "length", routes)


def routes_of(tokens):
    """Return routes of all tokens but the last one, each of which depends on the tokens before it."""
    return (torch.tensor(tokens[:-1]).cumsum(0) % 251).to(torch.int16)[:, None, None]


def ask(tree, messages, text, **request):
    turn = tree.ask(ChatRequest(tuple(messages), **request))
    tree.answer(turn, sampled(text))
    return turn


def after(turn, *new):
    """Return the conversation of a turn as its client has it, and new messages."""
    return [*turn.request.messages[: turn.position], turn.reply.said.message(), *new]


def test_a_linear_conversation_is_one_row_of_the_sampled_tokens():
    tree = new_tree()
    first = ask(tree, [user("a")], "one")
    second = ask(tree, after(first, user("b")), "two")
    (row,) = tree.rows()
    assert second.context[: len(first.context) + len(first.ids)] == [*first.context, *first.ids]
    assert row.context == [*second.context, *second.ids]
    assert [i for i, own in zip(row.ids, row.is_sampled, strict=True) if own] == [*first.ids, *second.ids]
    assert {turn for turn, own in zip(row.turns, row.is_sampled, strict=True) if own} == {0, 1}
    assert row.context == TOKENIZER.apply_chat_template(after(second), tokenize=True)["input_ids"][:-1]


def test_a_retry_and_a_second_branch_of_a_turn_are_rows_of_their_own():
    tree = new_tree()
    first = ask(tree, [user("a")], "one")
    again = ask(tree, [user("a")], "uno")
    second = ask(tree, after(first, user("b")), "two")
    other = ask(tree, after(first, user("c")), "three")
    assert first.noise[:2] == again.noise[:2]
    assert (first.noise[2], again.noise[2]) == (0, 1)
    rows = tree.rows()
    assert [row.context for row in rows] == [[*turn.context, *turn.ids] for turn in (second, again, other)]
    assert [row.num_sampled for row in rows] == [len(first.ids) + len(second.ids), len(again.ids), len(other.ids)]
    assert [row.num_sampled for row in tree.rows(only_last=True)] == [len(first.ids) + len(other.ids)]
    assert tree.messages()[0] == after(other)


def test_a_turn_with_calls_goes_on_whatever_ids_its_client_repeats():
    tree = new_tree()
    first = ask(
        tree,
        [user("3 + 4?")],
        'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>',
        tools=(TOOL,),
    )
    (call,) = first.reply.said.calls
    assert (call.name, call.arguments, first.reply.said.content) == ("add", {"a": 3}, "I add.")
    repeated = after(first, {"role": "tool", "name": "add", "content": "7"})
    repeated[1]["tool_calls"][0]["id"] = "call_1"
    second = ask(tree, repeated, "It is 7.", tools=(TOOL,))
    assert second.parent is first
    assert ask(tree, repeated, "It is 7.").parent is None  # without tools the prompt is another one


@pytest.mark.parametrize(
    ("text", "may_call", "content"),
    [
        ('<tool_call>\n{"name": "add"', True, '<tool_call>\n{"name": "add"'),
        ('<tool_call>\n{"name": "add"}\n</tool_call>', False, '<tool_call>\n{"name": "add"}\n</tool_call>'),
    ],
    ids=["unreadable", "not allowed"],
)
def test_what_is_not_a_call_is_text_that_the_client_can_repeat(text, may_call, content):
    tree = new_tree()
    turn = ask(tree, [user("a")], text, tools=(TOOL,), may_call=may_call)
    assert (turn.reply.said.content, turn.reply.said.calls) == (content, ())
    following = ask(tree, after(turn, user("b")), "two", tools=(TOOL,))
    assert following.parent is turn
    assert len(tree.rows()) == 1


def test_a_stop_string_is_trained_but_not_shown_and_the_row_goes_on():
    tree = new_tree()
    turn = tree.ask(ChatRequest((user("a"),), stop=("END",)))
    tree.answer(turn, replace(sampled("one END", stops=False), finish_reason="stop"))
    assert (turn.reply.said.content, turn.reply.stopped_at, turn.reply.cut) == ("one ", "END", False)
    following = ask(tree, after(turn, user("b")), "two")
    assert following.parent is turn
    (row,) = tree.rows()
    assert "one END<|im_end|>" in TOKENIZER.decode(row.context)


def test_a_begun_answer_is_continued_and_its_whole_is_repeated():
    tree = new_tree()
    turn = ask(tree, [user("a"), {"role": "assistant", "content": "The answer"}], " is 7.")
    assert turn.reply.said.content.strip() == "is 7."
    whole = {"role": "assistant", "content": f"The answer{turn.reply.said.content}"}
    assert ask(tree, [user("a"), whole, user("b")], "two").parent is turn


def test_after_a_restart_the_same_requests_have_the_same_turns():
    tree = new_tree()
    first = ask(tree, [user("a")], "one")
    ask(tree, [user("lost")], "gone")
    tree.restart()
    assert tree.rows() == []
    again = tree.ask(ChatRequest((user("a"),)))
    assert again is first
    assert again.reply is not None
    assert tree.ask(ChatRequest((user("a"),))).reply is None  # a second one is another sample
    assert [row.num_sampled for row in tree.rows()] == [len(first.ids)]


def test_the_oldest_turns_are_forgotten_and_their_noise_is_not_used_again():
    tree = new_tree()
    first, again = (ask(tree, [user("a")], "one") for _ in range(2))
    waiting = tree.ask(ChatRequest((user("b"),)))
    newest = [ask(tree, [user(f"number {number}")], "two") for number in range(9)]
    tree.forget_oldest(16)
    assert len(tree.turns) == 12
    tree.forget_oldest(8)
    assert tree.turns == [waiting, *newest[-8:]]
    assert ask(tree, after(first, user("c")), "three").parent is None
    assert ask(tree, after(newest[-1], user("c")), "three").parent is newest[-1]
    repeated = ask(tree, [user("a")], "one")
    assert repeated.noise[:2] == again.noise[:2]
    assert repeated.noise[2] > again.noise[2]


@pytest.mark.parametrize(
    ("limits", "code", "word"),
    [
        ({"turns": 1}, "max_turns", "environment.max_turns=1"),
        ({"rows": 1}, "max_rows", "environment.max_rows=1"),
        ({"context_tokens": 90}, "context_length_exceeded", "leaves no room"),
        ({"tokens": 10}, "context_length_exceeded", "data.max_response_length=10"),
    ],
)
def test_a_request_beyond_a_limit_is_refused_and_changes_nothing(limits, code, word):
    tree = new_tree(**limits)
    first = ask(tree, [user("a")], "one")
    another = [user("b")] if code == "max_rows" else after(first, user("b" * 40))
    with pytest.raises(RefusedError, match=word) as refused:
        tree.ask(ChatRequest(tuple(another)))
    assert (refused.value.status, refused.value.code) == (400, code)
    assert [row.num_sampled for row in tree.rows()] == [len(first.ids)]


STEP = st.tuples(
    st.sampled_from(["go on", "go on", "branch", "retry", "new", "compact", "drop"]), st.integers(0, 10**6)
)


@settings(max_examples=40, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=24), st.booleans())
def test_in_random_trees_each_kept_turn_is_trained_once_after_its_own_context(steps, reverse):
    tree, open_turns, got = new_tree(), [], []

    def answered():
        turn = open_turns.pop(-1 if reverse else 0)
        tree.answer(turn, sampled(f"answer {len(got) % 3}", context=turn.context))
        got.append(turn)

    for kind, number in steps:
        kept = [turn for turn in got if not turn.is_dropped]
        base = kept[number % len(kept)] if kept else None
        if kind == "drop":
            if base:
                base.is_dropped = True
            continue
        if kind == "new" or not base:
            messages = [user(f"start {number % 5}")]
        elif kind == "retry":
            messages = base.request.messages
        elif kind == "compact":
            messages = [user("summary"), *after(base, user(f"more {number % 3}"))[-2:]]
        else:
            messages = after(kept[-1] if kind == "go on" else base, user(f"more {number % 3}"))
        open_turns.append(tree.ask(ChatRequest(tuple(messages))))
        if number % 3:
            answered()
    while open_turns:
        answered()
    rows, kept = tree.rows(), [turn for turn in got if not turn.is_dropped]
    trained = Counter()
    for row in rows:
        assert torch.equal(torch.cat(row.routes), routes_of(row.context))
        assert all(part.untyped_storage().nbytes() == part.nbytes for part in row.routes)  # no whole prefixes
        sampled_at = [place for place, own in enumerate(row.is_sampled) if own]
        for number in dict.fromkeys(row.turns[place] for place in sampled_at):
            turn = tree.kept[number]
            places = [place for place in sampled_at if row.turns[place] == number]
            assert places == list(range(places[0], places[0] + len(turn.ids)))
            assert [row.ids[place] for place in places] == list(turn.reply.token_ids)
            assert [*row.prompt_ids, *row.ids[: places[0]]] == list(turn.reply.prompt_ids)
            trained[turn.turn_id] += 1
    assert trained == Counter({turn.turn_id: 1 for turn in kept})
    leaves = sum(not [each for each in kept if each.parent is turn and not each.starts_row] for turn in kept)
    assert len(rows) == leaves
    num_sampled = sum(len(turn.ids) for turn in kept)
    assert sum(row.num_sampled for row in rows) == num_sampled
    assert sum(row.num_sampled for row in tree.rows(only_last=True)) <= num_sampled
