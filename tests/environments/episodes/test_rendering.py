"""The tokens of an episode: what was sampled stays, new messages are added, and texts of others stay texts."""

import random

import pytest

from fixtures.chat_tokenizers import ADDED, CONTROL, chat_tokenizer
from hybridflow.environments import AssistantTurn, ChatRenderer, Tool
from hybridflow.errors import EnvironmentConfigError

FAMILIES = tuple(CONTROL)
QUESTION = {"role": "user", "content": "What is 3 + 4?"}


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def stop_ids_of(family, tokenizer):
    marks = ("<|user|>", "<|observation|>") if family == "glm4_5" else (CONTROL[family][-1],)
    return tokenizer.convert_tokens_to_ids(list(marks))


def sampled_of(family, tokenizer, text):
    """Return the tokens of a turn that a model might sample, with the token that ends it."""
    stop = "<|observation|>" if family == "glm4_5" else CONTROL[family][-1]
    return tokenizer(text + stop, add_special_tokens=False)["input_ids"]


CALLS = {
    "qwen2_5": '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>',
    "qwen3": 'I add.\n</think>\n\n<tool_call>{"name":"add","arguments":{"a":3,"b":4}}</tool_call>',
    "llama3": '{"name": "add", "parameters": {"a": 3,  "b": 4}}',
    "glm4_5": "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>4</arg_value>\n</tool_call>",
    "deepseek_v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a":3, "b":4}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
}


def test_a_call_in_reasoning_that_the_prompt_opened_is_not_made():
    tokenizer, begin = chat_tokenizer("qwen2_5"), "<|im_start|>assistant\\n"
    head, _, tail = tokenizer.chat_template.rpartition(begin)
    tokenizer.chat_template = f"{head}{begin}<think>\\n{tail}"
    renderer, stops = ChatRenderer(tokenizer, [Tool.of(add)]), stop_ids_of("qwen2_5", tokenizer)
    prompt = renderer.start([{"role": "user", "content": "what is </think>?"}]).text
    assert prompt.endswith("assistant\n<think>\n")
    draft, after = (sampled_of("qwen2_5", tokenizer, text + CALLS["qwen2_5"]) for text in ("", "so</think>"))
    for given in ((), (prompt,)):
        assert renderer.parse(draft, stops, *given) == AssistantTurn("", CALLS["qwen2_5"])
        assert [call.name for call in renderer.parse(after, stops, *given).calls] == ["add"]
    assert renderer.parse(draft, stops, f"{prompt}so</think>").calls  # an answer that the prompt has begun
    closed = sampled_of("qwen2_5", tokenizer, CALLS["qwen2_5"] + "</think>so")
    assert renderer.parse(closed, stops, prompt.removesuffix("<think>\n")) == AssistantTurn("so", CALLS["qwen2_5"])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_of_a_tool_follows_a_sampled_turn_as_text(family):
    tokenizer = chat_tokenizer(family)
    renderer = ChatRenderer(tokenizer, [Tool.of(add)])
    prompt, text = renderer.start([QUESTION]), ("<think>\nx\n</think>\n\n" if family == "qwen3" else "") + CALLS[family]
    sampled = sampled_of(family, tokenizer, text.replace("I add.\n</think>\n\n", ""))
    history = [QUESTION, renderer.parse(sampled, stop_ids_of(family, tokenizer)).message()]
    control = tokenizer.convert_tokens_to_ids([*CONTROL[family], *ADDED[family]])

    def count(answer):
        following = renderer.go_on(prompt, sampled, history, [{"role": "tool", "name": "add", "content": answer}])
        assert not following.is_new_row
        return [following.ids.count(token) for token in control], renderer.decode(following.ids)

    plain, shown = count("7")
    assert "7" in shown
    assert not shown.lstrip().startswith(renderer.decode(sampled[-1:]))  # the template does not write the stop again
    drawn = random.Random(0)
    marks = [*CONTROL[family], *ADDED[family], "\ue0003\ue001", "a", "<", "|", " "]
    for _ in range(30):
        hostile = "".join(drawn.choices(marks, k=drawn.randrange(1, 8)))
        counts, decoded = count(hostile)
        if family != "llama3":  # whose template writes the result as JSON
            assert hostile in decoded
        assert counts == plain


def test_a_template_that_drops_reasoning_starts_a_new_row():
    tokenizer = chat_tokenizer("qwen3")
    renderer = ChatRenderer(tokenizer)
    prompt = renderer.start([QUESTION])
    sampled = sampled_of("qwen3", tokenizer, "<think>\nI add.\n</think>\n\n7")
    turn = renderer.parse(sampled, stop_ids_of("qwen3", tokenizer))
    assert (turn.reasoning, turn.content) == ("I add.", "7")
    history = [QUESTION, turn.message()]
    following = renderer.go_on(prompt, sampled, history, [{"role": "user", "content": "Sure?"}])
    assert following.is_new_row
    assert "'im_start|>assistant\\n<think>" in following.reason
    assert "I add" not in following.text
    assert renderer.decode(following.ids) == following.text
    assert (
        following.ids
        == renderer.start([QUESTION, AssistantTurn("7").message(), {"role": "user", "content": "Sure?"}]).ids
    )


def test_the_prompt_of_one_turn_is_that_of_a_run_without_episodes():
    from hybridflow.data.chat_prompts import PromptEncoder

    for family in FAMILIES:
        tokenizer = chat_tokenizer(family)
        encoder = PromptEncoder(tokenizer, True)
        (ids,) = encoder.encode([encoder.text([QUESTION], "row 0")])
        assert ChatRenderer(tokenizer).start([QUESTION]).ids == ids


def test_tools_need_a_template_of_a_known_format():
    tokenizer = chat_tokenizer("qwen2_5")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(EnvironmentConfigError, match="in a format that is not known; expected that of Hermes"):
        ChatRenderer(tokenizer, [Tool.of(add)])
    assert ChatRenderer(tokenizer).format is None
    tokenizer.chat_template = None
    with pytest.raises(EnvironmentConfigError, match="has no chat template"):
        ChatRenderer(tokenizer)
