"""The real OpenAI client, synchronous and not, streaming and not, against the endpoint."""

import asyncio
import json

import openai
import pytest

from hybridflow.environments.agents.chat import RefusedError
from hybridflow.environments.episodes.messages import AssistantTurn, ToolCall

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "strict": True,
    },
}
SCHEMA = {"type": "function", "function": {k: v for k, v in TOOL["function"].items() if k != "strict"}}
CALLS = AssistantTurn("Both:", "I add twice.", (ToolCall("add", {"a": 1}), ToolCall("add", {"a": "é" * 1500})))
FINAL = AssistantTurn("word " * 500)
USER = {"role": "user", "content": "hi"}


def complete(kind, address, **asked):
    """Return a completion by one of the four ways of the client."""
    is_async, is_stream = kind
    settings = {"base_url": f"{address}/v1", "api_key": "the key", "max_retries": 0}
    asked = {"model": "any"} | asked

    async def run():
        async with openai.AsyncOpenAI(**settings) as client:
            if not is_stream:
                return await client.chat.completions.create(**asked)
            async with client.chat.completions.stream(**asked) as stream:
                return await stream.get_final_completion()

    if is_async:
        return asyncio.run(run())
    with openai.OpenAI(**settings) as client:
        if not is_stream:
            return client.chat.completions.create(**asked)
        with client.chat.completions.stream(**asked) as stream:
            return stream.get_final_completion()


KINDS = pytest.mark.parametrize("kind", [(False, False), (False, True), (True, False), (True, True)])


@KINDS
def test_openai_client_calls_tools_over_two_turns(kind, serve):
    session, address = serve(CALLS, FINAL)
    system = {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    asked = {"tools": [TOOL], "temperature": 0.5, "top_p": 0.9, "max_completion_tokens": 9, "stop": "\n\n"}
    if kind[1]:
        asked["stream_options"] = {"include_usage": True}
    first = complete(kind, address, messages=[system, USER], **asked, extra_body={"top_k": 3})
    said = first.choices[0].message
    assert (said.content, said.reasoning_content, first.choices[0].finish_reason) == (
        "Both:",
        "I add twice.",
        "tool_calls",
    )
    assert [(each.id, each.function.name) for each in said.tool_calls] == [("call_t1_0", "add"), ("call_t1_1", "add")]
    assert [json.loads(each.function.arguments) for each in said.tool_calls] == [{"a": 1}, {"a": "é" * 1500}]
    assert first.usage.to_dict() == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    results = [{"role": "tool", "tool_call_id": f"call_t1_{n}", "content": f"result {n}"} for n in (1, 0)]
    second = complete(kind, address, messages=[system, USER, said, *results], tools=[TOOL], tool_choice="none")
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == (FINAL.content, "stop")
    one, two = session.requests
    assert one.messages == ({"role": "system", "content": "a\nb"}, USER)
    assert (one.tools, one.may_call, one.stop) == ((SCHEMA,), True, ("\n\n",))
    assert (one.temperature, one.top_p, one.top_k, one.max_tokens) == (0.5, 0.9, 3, 9)
    assert two.messages[2:] == (
        CALLS.message(),
        {"role": "tool", "content": "result 0", "name": "add"},
        {"role": "tool", "content": "result 1", "name": "add"},
    )
    assert not two.may_call
    assert session.dropped == []


@KINDS
def test_log_probs_token_ids_and_a_cut_turn_reach_the_openai_client(kind, serve):
    _, address = serve(AssistantTurn("Hello"), cut=True)
    try:
        asked = complete(kind, address, messages=[USER], logprobs=True, extra_body={"return_token_ids": True})
    except openai.LengthFinishReasonError as cut:  # so says the client where it puts a stream together
        asked = cut.completion
    choice = asked.choices[0]
    if not kind[1]:  # the client's stream helper keeps no other fields
        assert (choice.token_ids, asked.prompt_token_ids) == ([1, 2, 3], [7, 8])
    assert [(each.token, each.logprob, each.bytes) for each in choice.logprobs.content] == [
        ("He", -0.5, [72, 101]),
        ("llo", -0.25, [108, 108, 111]),
        ("<end>", -9999.0, [60, 101, 110, 100, 62]),
    ]
    assert choice.finish_reason == "length"


@KINDS
def test_errors_of_the_session_reach_the_openai_client_with_their_status(kind, serve):
    _, address = serve(RefusedError(400, "max_turns", "no further turn"), ValueError("a fault"))
    with pytest.raises(openai.BadRequestError, match="no further turn") as refused:
        complete(kind, address, messages=[USER])
    assert (refused.value.code, refused.value.type) == ("max_turns", "invalid_request_error")
    with pytest.raises(openai.InternalServerError, match="the log of the run says why"):
        complete(kind, address, messages=[USER])


def test_a_dumped_message_of_the_openai_client_is_accepted_back(serve):
    session, address = serve(CALLS, FINAL)
    said = complete((False, False), address, messages=[USER], tools=[TOOL]).choices[0].message.model_dump()
    assert said["function_call"] is None
    results = [{"role": "tool", "tool_call_id": f"call_t1_{n}", "content": "", "name": "add"} for n in (0, 1)]
    complete((False, False), address, messages=[USER, said, *results])
    assert session.requests[1].messages[1] == CALLS.message()


def test_openai_client_lists_the_model_and_a_program_posts_the_reward(serve):
    session, address = serve()
    with openai.OpenAI(base_url=f"{address}/v1", api_key="the key", max_retries=0) as client:
        assert [each.id for each in client.models.list()] == ["hybridflow"]
        assert client.models.retrieve("hybridflow").id == "hybridflow"
        assert client.post("/reward", body=0.5, cast_to=object) == {"accepted": True}
        assert session.reward == 0.5
        with pytest.raises(openai.BadRequestError, match="the reward 'much' is not a number"):
            client.post("/reward", body="much", cast_to=object)
