"""What a wrong or hostile request gets: one table, which docs/agents.md shows."""

import json
import socket
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path

import pytest
from pydantic import ValidationError

from hybridflow.environments.agents.anthropic_messages import AnthropicMessages
from hybridflow.environments.agents.chat import RefusedError
from hybridflow.environments.agents.openai_chat import OpenAIChat

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"
OPENAI, ANTHROPIC = "/s0/v1/chat/completions", "/s0/v1/messages"
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add"}}


@dataclass(frozen=True)
class Case:
    """A request, what it is in words, and the status and a part of the message that it gets."""

    what: str
    status: int
    part: str
    path: str = OPENAI
    body: bytes = b"{}"
    headers: tuple[str, ...] = ("authorization: Bearer the key",)
    method: str = "POST"
    raw: bytes = b""

    def contents(self) -> bytes:
        headers = ("host: x", "connection: close", f"content-length: {len(self.body)}", *self.headers)
        return self.raw or "\r\n".join([f"{self.method} {self.path} HTTP/1.1", *headers, "", ""]).encode() + self.body


def chat(what, part, status=400, **fields):
    return Case(what, status, part, body=json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def message(what, part, **fields):
    body = {"model": "m", "max_tokens": 5, "messages": [USER], **fields}
    return Case(what, 400, part, ANTHROPIC, json.dumps({k: v for k, v in body.items() if v is not None}).encode())


def bytes_of(what, part, body, path=OPENAI, status=400):
    return Case(what, status, part, path, body)


def said(*calls, content=""):
    made = [
        {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}
        for call_id, arguments in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(call_id="a", **fields):
    return {"role": "tool", "tool_call_id": call_id, "content": "1", **fields}


def chat_of(what, part, *messages):
    return chat(what, part, messages=[USER, *messages])


USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "add", "input": {}}]}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "1"}
KEY = "x-api-key: the key"
LARGE = b"x" * 1_000_001
MANY = [{"role": "user", "content": [{"type": "text", "text": ""}] * 100}] * 300
IMAGE = {"role": "user", "content": [{"type": "image"}]}

CASES = [
    # who asks, and where
    Case("no key", 401, "the key of the session is needed", headers=()),
    Case("a wrong key", 401, "the key of the session is needed", headers=("authorization: Bearer another key",)),
    Case("a wrong key, to Anthropic's URL", 401, "the key of the session", ANTHROPIC, headers=("x-api-key: another",)),
    Case("the key of another session", 401, "the key of the session", "/s1/v1/chat/completions"),
    Case("a session that does not exist", 404, "there is no session 'none'", "/none/v1/chat/completions"),
    Case("a session that has ended", 410, "the episode of the session 's2' has ended", "/s2/v1/chat/completions"),
    Case("more open requests than the session allows", 429, "the episode has 0 open requests", "/s3/v1/reward"),
    Case("a base URL without /v1", 404, "The base URL of OpenAI's clients ends in /v1", "/s0/chat/completions"),
    Case("another URL", 404, "'/s0/v1/responses' is not served; known: POST /v1/chat/completions", "/s0/v1/responses"),
    Case("a URL that leads out of the session", 404, "is not served", "/s0/../../etc/passwd"),
    Case("a model that does not exist", 404, "there is no model 'other'", "/s0/v1/models/other", method="GET"),
    Case("another method", 405, "GET is not supported here; use POST", method="GET"),
    Case("no HTTP", 400, "Invalid HTTP request received", raw=b"\x16\x03\x01 hello\r\n\r\n"),
    Case("a header of 70 KB without an end", 400, "Invalid HTTP request received", raw=b"header"),
    # bodies
    bytes_of("a body that is too large", "a body may have 1,000,000 bytes", LARGE, status=413),
    Case("a body without length that is too large", 413, "a body may have 1,000,000 bytes", headers=(), raw=b"chunked"),
    Case("a length of 10 TB", 413, "a body may have 1,000,000 bytes", headers=(), raw=b"length"),
    Case("a packed body", 415, "content-encoding='gzip' is not", headers=(KEY, "content-encoding: gzip")),
    bytes_of("no body", "the body is not JSON: EOF", b""),
    bytes_of("half a body of JSON", "the body is not JSON: EOF", b'{"model": "m", "mess'),
    bytes_of("bytes that are not UTF-8", "the body is not JSON: invalid unicode", b'{"model": "\xff"}'),
    bytes_of("half of a character", "the body is not JSON", b'{"model": "\\ud800"}'),
    bytes_of("NaN", "the body is not JSON: expected value", b'{"temperature": NaN}'),
    bytes_of("a number that is infinite", "the body is not JSON: Out of range float", b'{"temperature": 1e999}'),
    bytes_of("a number of 5,000 digits", "number out of range", b'{"max_tokens": ' + b"1" * 5000 + b"}"),
    bytes_of("90,000 lists inside each other", "recursion limit exceeded", b"[" * 90_000),
    bytes_of("two values", "trailing characters", b"{} {}"),
    bytes_of("a list", "the body=(list): Input should be", b"[]"),
    # messages
    Case("no messages", 400, "messages is missing", body=b'{"model": "m"}'),
    chat("an empty list of messages", "messages=(list): List should have at least 1 item", messages=[]),
    chat("300 messages of 100 parts", "has more than 30,000 messages, parts, calls and tools", messages=MANY),
    chat(
        "an object with 101 fields",
        "it has 101 fields; an object",
        messages=[{"role": "user"} | dict.fromkeys(map(str, range(100)), 0)],
    ),
    chat("a text for messages", "messages='hi': Input should be", messages="hi"),
    chat_of("a message without a role", "messages.1=(dict): Unable to extract tag", {"content": "hi"}),
    chat_of("an unknown role", "Input tag 'oracle' found using 'role' does not match", {"role": "oracle"}),
    chat_of("a number as content", "messages.1.user.content=5", {"role": "user", "content": 5}),
    chat_of("null as the user's content", "messages.1.user.content is missing", {"role": "user", "content": None}),
    chat_of("an image", "content.0.type='image_url'", {"role": "user", "content": [{"type": "image_url"}]}),
    chat_of("a name of the user", "messages.1.user.name is not supported", {**USER, "name": "Ann"}),
    chat_of("a result without a call", "the result for 'a' does not follow a call", result()),
    chat_of("a result for another call", "the result for 'b' does not follow", said(("a", "{}")), result("b")),
    chat_of("two results for a call", "or is the second", said(("a", "{}")), result(), result()),
    chat_of("a result with another tool's name", "the tool was 'add'", said(("a", "{}")), result(name="sub")),
    chat_of("a call without a result", "the call 'a' has no result", said(("a", "{}")), USER),
    chat_of("a call as the last message", "the call 'a' has no result", said(("a", "{}"))),
    chat_of("two calls with one id", "two calls of one message have the same id", said(("a", "{}"), ("a", "{}"))),
    chat_of("arguments that are not JSON", "the arguments of a call of 'add', is not JSON", said(("a", "{a"))),
    chat_of("arguments that are a list", "must be the text of a JSON object", said(("a", "[1]"))),
    message(
        "an image, to Anthropic's URL", "Input tag 'image'", messages=[{"role": "user", "content": [{"type": "image"}]}]
    ),
    message(
        "reasoning that is encrypted",
        "Input tag 'redacted_thinking'",
        messages=[USER, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}],
    ),
    message(
        "a text before the result of a call",
        "the tool_result blocks of a message must come before",
        messages=[USER, USE, {"role": "user", "content": [{"type": "text", "text": "x"}, RESULT]}],
    ),
    message(
        "a call without a result, to Anthropic's URL",
        "the call 'a' has no result",
        messages=[USER, USE, USER],
    ),
    # what would change the sampled tokens
    chat(
        "`tool_choice` that requires a call",
        "tool_choice='required': Input should be 'auto' or 'none'",
        tool_choice="required",
    ),
    chat("`tool_choice` with a name", "tool_choice=(dict): Input should be 'auto' or 'none'", tool_choice=TOOL),
    chat("`parallel_tool_calls = false`", "parallel_tool_calls=False: Input should be True", parallel_tool_calls=False),
    chat("two tools of one name", "2 tools have the name 'add'", tools=[TOOL, TOOL]),
    chat("a tool of the server", "tools.0.type='web_search'", tools=[{"type": "web_search"}]),
    chat("`functions`, the old form of tools", "functions is not supported; leave it out", functions=[]),
    chat("two choices", "n=2: Input should be 1", n=2),
    chat("a seed", "seed is not supported; leave it out", seed=1),
    chat("a bias of tokens", "logit_bias=(dict): Dictionary should have at most 0 items", logit_bias={"5": 100}),
    chat("a penalty", "presence_penalty=0.5: Input should be less than or equal to 0", presence_penalty=0.5),
    chat("log-probs of other tokens", "top_logprobs=5: Input should be 0", logprobs=True, top_logprobs=5),
    chat("a schema of the answer", "response_format.type='json_schema'", response_format={"type": "json_schema"}),
    chat("an effort of reasoning", "reasoning_effort is not supported", reasoning_effort="high"),
    chat("a field of another server", "guided_regex is not supported", guided_regex="a*"),
    chat("a temperature below 0", "temperature=-1: Input should be greater than or equal to 0", temperature=-1),
    chat("a text for a number", "temperature='0.5': Input should be a valid number", temperature="0.5"),
    chat("a text for a truth", "stream='yes': Input should be a valid boolean", stream="yes"),
    chat("no tokens", "max_tokens=0: Input should be greater than or equal to 1", max_tokens=0),
    chat("a truth for a number", "max_tokens=True: Input should be a valid integer", max_tokens=True),
    chat("10^30 tokens", "Input should be less than or equal to 2147483647", max_tokens=10**30),
    chat("two limits of tokens", "max_tokens=5 is not max_completion_tokens", max_tokens=5, max_completion_tokens=6),
    chat("an empty stop text", "stop.0='': String should have at least 1 character", stop=""),
    chat("17 stop texts", "stop=(list): List should have at most 16 items", stop=["x"] * 17),
    message("no `max_tokens`, to Anthropic's URL", "max_tokens is missing", max_tokens=None),
    message("`thinking` that is enabled", "thinking.type='enabled'", thinking={"type": "enabled", "budget_tokens": 9}),
    message(
        "`tool_choice` any", "tool_choice.type='any': Input should be 'auto' or 'none'", tool_choice={"type": "any"}
    ),
    message("a tool of Anthropic's server", "tools.0.type='bash_20250124'", tools=[{"type": "bash_20250124"}]),
    message("servers of MCP", "mcp_servers is not supported", mcp_servers=[]),
    # rewards
    bytes_of("a reward that is a text", "the reward 'much' is not a number", b'"much"', "/s0/v1/reward"),
    bytes_of("a reward that is not JSON", "the body is not JSON", b"much", "/s0/v1/reward"),
]
SPECIAL = {
    b"header": f"POST {OPENAI} HTTP/1.1\r\nx: ".encode() + b"y" * 70_000,
    b"chunked": f"POST {OPENAI} HTTP/1.1\r\nhost: x\r\n{KEY}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    + b"f4241\r\n%s\r\n0\r\n\r\n" % LARGE,
    b"length": f"POST {OPENAI} HTTP/1.1\r\nhost: x\r\n{KEY}\r\ncontent-length: 10000000000000\r\n\r\n{{".encode(),
}


def answer(port, contents):
    """Return the status and the body of the response to what is written to a connection."""
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.sendall(contents)
        with HTTPResponse(connection) as response:
            response.begin()
            return response.status, response.read()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what.replace(" ", "_"))
def test_a_wrong_request_gets_an_error_of_its_protocol(case, endpoint, serve, on_loop):
    sessions = [serve()[0] for _ in range(4)]
    sessions[1].key, sessions[3].max_open = "the key of another", 0
    on_loop(endpoint.remove, "s2")
    status, body = answer(endpoint.port, SPECIAL.get(case.raw, case.contents()))
    text = body.decode()
    if "Invalid HTTP" not in text:
        error = json.loads(text)
        assert ("type" in error) == (case.path == ANTHROPIC)
        assert error["error"]["type"].endswith("error") or status == 413
        text = error["error"]["message"]
    assert case.part in text
    assert status == case.status
    assert all(not each.requests and not each.num_open and each.reward is None for each in sessions)
    models = Case("", 200, "", "/s0/v1/models", b"", method="GET")
    assert answer(endpoint.port, models.contents())[0] == 200


def test_table_of_wrong_requests_equals_the_cases():
    def cell(text):
        return text.replace("|", "\\|")

    rows = [f"| {cell(case.what)} | {case.status} | {cell(case.part)} |" for case in CASES]
    table = "\n".join(["| request | status | message, or a part of it |", "|---|---|---|", *rows]) + "\n"
    assert len(CASES) >= 60
    assert table in PAGE.read_text("utf-8"), f"put this into docs/agents.md:\n{table}"


WRONG = [0] * 3000


@pytest.mark.parametrize(
    ("protocol", "fields"),
    [
        (OpenAIChat, {"messages": WRONG}),
        (OpenAIChat, {"messages": [{"role": "user", "content": WRONG}]}),
        (OpenAIChat, {"messages": [{"role": "assistant", "tool_calls": WRONG}]}),
        (OpenAIChat, {"messages": [USER], "tools": WRONG}),
        (OpenAIChat, {"messages": [USER], "modalities": WRONG}),
        (OpenAIChat, {"messages": [USER], "stop": WRONG}),
        (OpenAIChat, {"messages": [USER], **{f"x{number}": 0 for number in range(3000)}}),
        (OpenAIChat, {"messages": [USER], "response_format": {f"x{number}": 0 for number in range(3000)}}),
        (AnthropicMessages, {"messages": WRONG}),
        (AnthropicMessages, {"messages": [{"role": "user", "content": WRONG}]}),
        (AnthropicMessages, {"messages": [{"role": "assistant", "content": WRONG}]}),
        (AnthropicMessages, {"messages": [USER], "tools": WRONG}),
        (AnthropicMessages, {"messages": [USER], "system": WRONG}),
        (AnthropicMessages, {"messages": [USER], "thinking": {f"x{number}": 0 for number in range(3000)}}),
    ],
)
def test_a_body_with_thousands_of_errors_is_read_up_to_the_first(protocol, fields):
    with pytest.raises(ValidationError) as error:
        protocol.model_validate({"model": "m", "max_tokens": 5, **fields})
    assert error.value.error_count() < 3


def test_an_error_shows_the_beginning_of_what_was_sent():
    body = {"model": "m", "messages": [USER], "y" * 90_000: 1, "temperature": "z" * 90_000}
    with pytest.raises(RefusedError) as error:
        OpenAIChat.read(json.dumps(body).encode())
    assert len(str(error.value)) < 500
