from typing import TYPE_CHECKING, Literal

import pytest
from pydantic import Field

from hybridflow.environments import Environment, ToolCall, tool_of, tools_of
from hybridflow.errors import EnvironmentConfigError, ToolError

if TYPE_CHECKING:
    from pathlib import Path


class Calculator(Environment):
    """Two tools, a private method, and one that is none."""

    def add(self, a: int, b: int = 2) -> str:
        """Add two numbers."""
        return str(a + b)

    def say(self, text: str, how: Literal["loud", "low"] = "low") -> str:
        return text.upper() if how == "loud" else text

    def reset(self):
        """Begin."""

    def _hidden(self, a):
        return a


@pytest.fixture
def tools():
    return tools_of(Calculator())


def test_public_methods_are_tools_with_the_schema_of_their_types(tools):
    assert list(tools) == ["add", "say"]
    properties = {"a": {"type": "integer"}, "b": {"default": 2, "type": "integer"}}
    parameters = {"additionalProperties": False, "properties": properties, "required": ["a"], "type": "object"}
    function = {"name": "add", "description": "Add two numbers.", "parameters": parameters}
    assert tools["add"].schema() == {"type": "function", "function": function}


def test_arguments_are_checked_converted_and_have_the_defaults_of_the_method(tools):
    assert tools["add"].function(**tools["add"].arguments(ToolCall("add", {"a": 3}))) == "5"
    assert tools["add"].arguments(ToolCall("add", {"a": "3", "b": "4"}, is_text=True)) == {"a": 3, "b": 4}
    assert tools["say"].arguments(ToolCall("say", {"text": "3"}, is_text=True)) == {"text": "3"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (ToolCall("add", {}), r"add: a: Field required"),
        (ToolCall("add", {"a": "x"}), r"add: a: Input should be a valid integer"),
        (ToolCall("add", {"a": 1, "c": 2}), r"add: c: Extra inputs are not permitted"),
        (ToolCall("say", {"text": "a", "how": "hushed"}), r"say: how: Input should be 'loud' or 'low'"),
        (ToolCall("add", {"a": [[[]]]}, is_text=True), r"add: a: Input should be a valid integer"),
        (ToolCall("subtract"), r"no tool is named 'subtract'; there are add, say"),
    ],
)
def test_a_wrong_call_is_an_error_for_the_model(tools, call, message):
    with pytest.raises(ToolError, match=message):
        tool_of(tools, call).arguments(call)


def untyped(self, a, b): ...


def variadic(self, *numbers: int): ...


def odd(self, a: Calculator): ...


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (untyped, "tool 'untyped': parameter 'a' has no type; write one, as in a: int"),
        (variadic, r"tool 'variadic': \*numbers has no schema"),
        (odd, "tool 'odd': its parameters have no JSON schema"),
    ],
)
def test_a_method_without_a_schema_is_an_error_that_names_it(method, message):
    with pytest.raises(EnvironmentConfigError, match=message):
        tools_of(type("Made", (), {"add": method})())


class Filled:
    def look(self, far: int = Field(default=3, ge=1), how: "Literal['low', 'high']" = "low") -> "Path":
        return f"{far} {how}"


def test_defaults_of_fields_and_types_that_are_texts_are_read():
    tool = tools_of(Filled())["look"]
    assert tool.function(**tool.arguments(ToolCall("look"))) == "3 low"
    assert tool.schema()["function"]["parameters"]["properties"]["far"]["default"] == 3
    assert tool.schema()["function"]["parameters"]["properties"]["how"]["enum"] == ["low", "high"]


def test_a_method_may_have_a_schema_and_a_name_of_its_own():
    async def call(self, /, **arguments):
        return arguments

    call.__name__, call.__doc__ = "reset", "Begin.\n    Again."
    call.json_schema = {"properties": {"self": {"type": "integer", "title": "Self"}}, "title": "R", "type": "object"}
    tools = tools_of(type("Made", (Environment,), {"tool_0": call})())
    function = {"name": "reset", "description": "Begin.\n    Again.", "parameters": call.json_schema}
    assert tools["reset"].schema() == {"type": "function", "function": function}
    assert tools["reset"].arguments(ToolCall("reset", {"self": "3", "b": "x"}, is_text=True)) == {"self": 3, "b": "x"}
    assert tools["reset"].arguments(ToolCall("reset", {"self": "3"})) == {"self": "3"}  # the method checks it


def test_the_methods_of_an_environment_are_not_tools():
    class Shop(Environment):
        def price(self, of: str) -> int: ...

        async def reward(self, episode):
            return 1.0

    assert list(tools_of(Shop())) == ["price"]
