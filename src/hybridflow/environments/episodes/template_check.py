"""Whether a chat template can serve episodes, shown by rendering small ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from hybridflow.environments.episodes.formats import FORMATS, format_of
from hybridflow.environments.episodes.messages import AssistantTurn, Message, ToolCall
from hybridflow.environments.episodes.rendering import ChatRenderer
from hybridflow.environments.episodes.tools import Tool
from hybridflow.errors import DataError, EnvironmentConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    "rows": episodes go on in a new row there. "limited": the template takes no such turn, which must not happen in an
    episode. "failed": episodes cannot be trained.
    """

    check: str
    state: Literal["ok", "rows", "limited", "failed"]
    detail: str = ""


ANSWER, THOUGHT = "This one.", "The user asks for a word."


def lookup(word: str, times: int = 1) -> str:
    """Look a word up.

    The tool of the check when no other is given.
    """
    return word * times


def check_template(
    tokenizer: "PreTrainedTokenizerBase", stop_ids: Sequence[int], tools: Sequence[Tool] = ()
) -> list[Finding]:
    """Return the results of all checks; without `tools` with one of its own, if the template has a known format."""
    if not tokenizer.chat_template:
        return [Finding("template", "failed", "the tokenizer has no chat template; set model.chat_template (chatml)")]
    known = format_of(tokenizer.get_chat_template(tools=[Tool.of(lookup).schema()]))
    if known is None and not tools:
        formats = ", ".join(each.name for each in FORMATS)
        findings = [Finding("tools", "limited", f"no known format of calls ({formats})")]
        return [*findings, *_checks(tokenizer, stop_ids, [])]
    findings = list(_checks(tokenizer, stop_ids, list(tools) or [Tool.of(lookup)]))
    no_tools = ("tools", "failed")
    return [replace(f, state="limited") if not tools and (f.check, f.state) == no_tools else f for f in findings]


def _checks(tokenizer: "PreTrainedTokenizerBase", stop_ids: Sequence[int], tools: list[Tool]) -> Iterator[Finding]:
    try:
        renderer = ChatRenderer(tokenizer, tools)
    except EnvironmentConfigError as error:
        yield Finding("tools", "failed", str(error))
        return
    question: Message = {"role": "user", "content": "Which word?"}
    again: Message = {"role": "user", "content": "And which next?"}
    try:
        prompt = renderer.start([question])
        without, _ = renderer.render([question], "end")
        answered, _ = renderer.render([question, AssistantTurn(ANSWER).message(), again], "answer")
    except DataError as error:
        yield Finding("prompt", "failed", str(error))
        return
    if missing := [tool.name for tool in tools if tool.name not in prompt.text]:
        yield Finding(
            "tools", "failed", f"the template does not write the tool {missing[0]!r}; a prompt must describe it"
        )
    elif tools and renderer.format:
        yield Finding("tools", "ok", f"calls in the format {renderer.format.name}")
    if without == prompt.text:
        yield Finding("prompt", "failed", "add_generation_prompt adds nothing, so a model must write its own header")
    else:
        yield Finding("prompt", "ok", f"ends with {prompt.text[len(without) :]!r}")
    yield _begun_answer(renderer, question)
    yield _stop_token(renderer, stop_ids, answered.rpartition(ANSWER)[2])
    episodes = [
        ("a user answers", AssistantTurn(ANSWER), [again]),
        ("a user answers reasoning", AssistantTurn(ANSWER, THOUGHT), [again]),
    ]
    if tools:
        call = _example_call(tools[0])
        result: Message = {"role": "tool", "name": call.name, "content": "found"}
        episodes += [
            ("a tool answers", AssistantTurn("", "", (call,)), [result]),
            ("a tool answers reasoning", AssistantTurn("", THOUGHT, (call,)), [result]),
            ("two tools answer", AssistantTurn("", "", (call, call)), [result, result]),
        ]
    for check, turn, new in episodes:
        try:
            yield _episode(renderer, stop_ids, check, [question], turn, new)
        except DataError as error:
            yield Finding(check, "limited" if check == "two tools answer" else "failed", str(error))
    if tools:
        yield _round_trip(renderer, [question], AssistantTurn("", "", (call,)))


def _begun_answer(renderer: ChatRenderer, question: Message) -> Finding:
    """Check that a prompt may end with the beginning of an answer."""
    begun, whole = ({"role": "assistant", "content": content} for content in (ANSWER, f"{ANSWER} {ANSWER}"))
    try:
        text, (written, _) = renderer.start([question, begun]).text, renderer.render([question, whole], "end")
    except DataError as error:
        return Finding("a begun answer", "limited", str(error))
    if not written.startswith(text):
        return Finding(
            "a begun answer", "limited", f"the template writes {text[-80:]!r} in another way once it goes on"
        )
    return Finding(
        "a begun answer", "ok", "a prompt may end with the beginning of an answer, which the model continues"
    )


def _stop_token(renderer: ChatRenderer, stop_ids: Sequence[int], after: str) -> Finding:
    marks = [renderer.decode([stop_id]) for stop_id in stop_ids]
    written = next((mark for mark in marks if after.startswith(mark)), None)
    if written:
        return Finding("stop token", "ok", f"a turn ends with {written!r}")
    return Finding(
        "stop token",
        "failed",
        f"after a turn the template writes {after[:40]!r}, but generation stops at {', '.join(map(repr, marks))}; set "
        "eos_token_id in generation_config.json to the token that ends a turn",
    )


def _episode(
    renderer: ChatRenderer,
    stop_ids: Sequence[int],
    check: str,
    messages: list[Message],
    turn: AssistantTurn,
    new: list[Message],
) -> Finding:
    """Check that a turn can be continued, and that the tokens of both turns are those of the whole conversation."""
    prompt, history = renderer.start(messages), [*messages, turn.message()]
    written, _ = renderer.render(history, "end")
    if not written.startswith(prompt.text):
        return Finding(check, "failed", "the template writes the prompt of a turn in another way once it is answered")
    sampled = renderer.encode(written[len(prompt.text) :])
    ends = [place for place, token in enumerate(sampled) if token in stop_ids]
    if ends:
        sampled = sampled[: ends[-1] + 1]
    else:
        stop = renderer.stop_after(history, new, stop_ids)
        sampled.append(stop_ids[0] if stop is None else stop)
    following = renderer.go_on(prompt, sampled, history, new)
    if following.is_new_row:
        return Finding(check, "rows", following.reason)
    row, whole = [*prompt.ids, *sampled, *following.ids], renderer.encode(following.text)
    if renderer.decode(row) != renderer.decode(whole):
        place = next((i for i, (a, b) in enumerate(zip(row, whole, strict=False)) if a != b), min(len(row), len(whole)))
        parts = [renderer.decode(ids[place : place + 8]) for ids in (row, whole)]
        return Finding(check, "failed", f"the turns differ from the conversation at token {place}: {parts}")
    return Finding(check, "ok", f"{len(sampled)} sampled tokens stay, {len(following.ids)} are new")


def _round_trip(renderer: ChatRenderer, messages: list[Message], turn: AssistantTurn) -> Finding:
    """Check that a call that the template writes is parsed as the same call."""
    prompt = renderer.start(messages)
    whole, _ = renderer.render([*messages, turn.message()], "end")
    assert renderer.format is not None, "a renderer with tools knows their format"
    written = whole[len(prompt.text) :] if whole.startswith(prompt.text) else whole
    parsed = renderer.format.parse(written)
    names = [call.name for call in parsed.calls]
    texts = [{key: str(value) for key, value in call.arguments.items()} for call in (*parsed.calls, *turn.calls)]
    if names != [call.name for call in turn.calls] or texts[: len(names)] != texts[len(names) :]:
        wrong = "; ".join(parsed.malformed) or f"parsed {parsed.calls}"
        return Finding("round trip", "failed", f"the template writes {written[:200]!r}, in which {wrong}")
    return Finding("round trip", "ok", "a call that the template writes is parsed as the same call")


def _example_call(tool: Tool) -> ToolCall:
    """Return a call of a tool with a text or a number for each parameter that is required."""
    schema = tool.schema()["function"]["parameters"]
    values = {"string": "word", "integer": 3, "number": 2.5, "boolean": True, "array": [], "object": {}}
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    return ToolCall(tool.name, {name: values.get(properties[name].get("type", "string"), "word") for name in required})
