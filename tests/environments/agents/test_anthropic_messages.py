"""The real Anthropic client, synchronous and not, streaming and not, against the endpoint."""

import asyncio

import anthropic
import pytest

from hybridflow.environments.agents.chat import RefusedError
from hybridflow.environments.episodes.messages import AssistantTurn, ToolCall

TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {"a": {}}}}
SCHEMA = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": TOOL["input_schema"]},
}
CALLS = AssistantTurn("Both:", "I add twice.", (ToolCall("add", {"a": 1}), ToolCall("add", {"a": "é" * 1500})))
FINAL = AssistantTurn("word " * 500)
USER = {"role": "user", "content": "hi"}
CACHED = {"cache_control": {"type": "ephemeral"}}


def create(kind, address, **asked):
    """Return a message by one of the four ways of the client."""
    is_async, is_stream = kind
    settings = {"base_url": address, "api_key": "the key", "max_retries": 0}
    asked = {"model": "any", "max_tokens": 9} | asked

    async def run():
        async with anthropic.AsyncAnthropic(**settings) as client:
            if not is_stream:
                return await client.messages.create(**asked)
            async with client.messages.stream(**asked) as stream:
                return await stream.get_final_message()

    if is_async:
        return asyncio.run(run())
    with anthropic.Anthropic(**settings) as client:
        if not is_stream:
            return client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            return stream.get_final_message()


KINDS = pytest.mark.parametrize("kind", [(False, False), (False, True), (True, False), (True, True)])


@KINDS
def test_anthropic_client_calls_tools_over_two_turns(kind, serve):
    session, address = serve(CALLS, FINAL)
    system = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", **CACHED}]
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 3}  # which the client has no arguments for
    settings = {"extra_body": sampling, "stop_sequences": ["\n\n"], "metadata": {"user_id": "u"}}
    first = create(kind, address, system=system, messages=[USER], tools=[{**TOOL, **CACHED}], **settings)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (first.content[0].thinking, first.content[1].text) == ("I add twice.", "Both:")
    assert [block.id for block in first.content[2:]] == ["toolu_t1_0", "toolu_t1_1"]
    assert [block.input for block in first.content[2:]] == [{"a": 1}, {"a": "é" * 1500}]
    assert (first.stop_reason, first.usage.input_tokens, first.usage.output_tokens) == ("tool_use", 2, 3)
    answer = [
        {"type": "tool_result", "tool_use_id": "toolu_t1_1", "content": [{"type": "text", "text": "x", **CACHED}]},
        {"type": "tool_result", "tool_use_id": "toolu_t1_0", "content": "too large", "is_error": True},
        {"type": "text", "text": "go on"},
    ]
    messages = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": answer}]
    second = create(kind, address, messages=messages, tools=[TOOL], tool_choice={"type": "none"})
    assert [block.text for block in second.content] == [FINAL.content]
    assert second.stop_reason == "end_turn"
    one, two = session.requests
    assert one.messages == ({"role": "system", "content": "a\nb"}, USER)
    assert (one.tools, one.may_call, one.stop, one.max_tokens) == ((SCHEMA,), True, ("\n\n",), 9)
    assert (one.temperature, one.top_p, one.top_k) == (0.5, 0.9, 3)
    assert two.messages == (
        USER,
        CALLS.message(),
        {"role": "tool", "content": "error: too large", "name": "add"},
        {"role": "tool", "content": "x", "name": "add"},
        {"role": "user", "content": "go on"},
    )
    assert not two.may_call


@KINDS
def test_anthropic_client_begins_a_turn_and_a_stop_sequence_ends_it(kind, serve):
    session, address = serve(AssistantTurn("B"), stopped_at=")")
    begun = {"role": "assistant", "content": "The answer is ("}
    said = create(kind, address, messages=[USER, begun], stop_sequences=[")"])
    assert session.requests[0].messages == (USER, begun)
    assert [block.text for block in said.content] == ["B"]
    assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", ")")


def test_an_empty_turn_and_a_cut_one_reach_the_anthropic_client(serve):
    _, address = serve(AssistantTurn(""), AssistantTurn("Hello"), cut=True)
    empty = create((False, True), address, messages=[USER])
    assert (empty.content, empty.stop_reason) == ([], "max_tokens")
    messages = [USER, {"role": "assistant", "content": empty.content}, USER]
    assert create((False, False), address, messages=messages).stop_reason == "max_tokens"


def test_errors_of_the_session_reach_the_anthropic_client(serve):
    _, address = serve(RefusedError(400, "max_turns", "no further turn"))
    with pytest.raises(anthropic.BadRequestError, match="no further turn") as refused:
        create((False, True), address, messages=[USER])
    assert refused.value.body["error"]["type"] == "invalid_request_error"


def test_anthropic_client_counts_tokens_and_lists_the_model(serve):
    session, address = serve()
    with anthropic.Anthropic(base_url=address, auth_token="the key", api_key=None, max_retries=0) as client:
        assert client.messages.count_tokens(model="any", messages=[USER], tools=[TOOL]).input_tokens == 11
        assert [each.id for each in client.models.list()] == ["hybridflow"]
        assert client.models.retrieve("hybridflow").id == "hybridflow"
    assert session.requests[0].tools == (SCHEMA,)
