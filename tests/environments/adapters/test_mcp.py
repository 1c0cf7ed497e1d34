"""A server of the package `mcp`, whose tools a model calls; each episode has a process of its own."""

import asyncio
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from hybridflow.environments import AssistantTurn, CallLimits, EnvironmentPool, ToolCall
from hybridflow.environments.adapters import load, rows_of
from hybridflow.environments.episodes.answers import Begin, TakeTurn
from hybridflow.environments.episodes.tools import tools_of
from hybridflow.errors import EnvironmentConfigError

pytestmark = [pytest.mark.runs, pytest.mark.own_run("episodes: servers of MCP")]

SERVER = '''
import os, sys
from typing import Literal
from mcp.server.fastmcp import FastMCP
from mcp.types import EmbeddedResource, TextContent, TextResourceContents

server, steps = FastMCP("counter"), []


@server.tool()
def add(a: int, b: int = 3, how: Literal["loud", "low"] = "low") -> int:
    """Add two numbers.

    They are whole.
    """
    return a + b


@server.tool(name="step")
def count(self: str) -> list:
    """Count."""
    steps.append(self)
    resource = TextResourceContents(uri="text://steps", text=" ".join(steps))
    return [TextContent(type="text", text=str(len(steps))), EmbeddedResource(type="resource", resource=resource)]


@server.tool()
def process() -> str:
    return str(os.getpid())


@server.tool()
def end(text: str) -> str:
    print(text, file=sys.stderr, flush=True)
    os._exit(3)


server.run()
'''


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    file = tmp_path_factory.mktemp("server") / "the server.py"
    file.write_text(SERVER)
    (file.parent / "judge.py").write_text("def judge(completion, answer): return float(completion == answer)")
    return f"mcp:{shlex.join([sys.executable, str(file)])}"


@pytest.fixture
def play(play, source):
    judge = f"{os.path.dirname(shlex.split(source)[1])}/judge.py:judge"
    row = {"prompt": [{"role": "user", "content": "Count."}], "reward_model": {"ground_truth": "2"}}
    return lambda *turns, processes=0: play(source, row, turns, processes, judge)


def results(answer):
    return [(called.result, called.is_error) for called in answer.called]


def test_the_tools_of_a_server_are_those_that_it_describes(source):
    tools = tools_of(load(source, "environment.classes.a")[0]())
    assert list(tools) == ["add", "step", "process", "end"]
    assert tools["add"].schema() == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.\n\n    They are whole.\n    ",
            "parameters": {
                "properties": {
                    "a": {"title": "A", "type": "integer"},
                    "b": {"default": 3, "title": "B", "type": "integer"},
                    "how": {"default": "low", "enum": ["loud", "low"], "title": "How", "type": "string"},
                },
                "required": ["a"],
                "title": "addArguments",
                "type": "object",
            },
        },
    }


def test_the_server_of_the_page_has_its_tool(tmp_path):
    page = (Path(__file__).parents[3] / "docs/other_environments.md").read_text()
    (tmp_path / "server.py").write_text(re.findall(r"```python server.py\n(.*?)```", page, re.DOTALL)[0])
    made, _ = load(f"mcp:{sys.executable} {tmp_path}/server.py", "environment.classes.a")
    assert list(tools_of(made())) == ["price"]


@pytest.mark.parametrize("processes", [0, 1])
def test_each_episode_has_a_server_of_its_own_and_a_function_scores_it(play, processes):
    for _ in range(2):
        calls = [("step", {"self": "a"}), ("step", {"self": "b"}), ("add", {"a": 4}), ("process", {})]
        begun, called, answered, ended = play(calls, "2", processes=processes)
        assert begun.messages == ({"role": "user", "content": "Count."},)
        assert results(called)[:3] == [("1\na", False), ("2\na b", False), ("7", False)]
        assert answered.is_done
        assert ended.rewards == {"score": 1.0}
        with pytest.raises(ProcessLookupError):
            os.kill(int(called.called[3].result), 0)


def test_servers_end_with_the_process_of_their_environments(source, tmp_path):
    judge = f"{os.path.dirname(shlex.split(source)[1])}/judge.py:judge"
    pool = EnvironmentPool({"it": source}, num_processes=1, limits=CallLimits(60.0), reward_function=judge)
    questions = [Begin({"prompt": "Count."}), TakeTurn(AssistantTurn("", calls=(ToolCall("process"),)))]
    try:
        answer = asyncio.run_coroutine_threadsafe(pool.environment("it", 0).ask(questions), pool.loop).result(120)
        os.kill(int(answer.called[0].result), 0)
    finally:
        pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(answer.called[0].result), 0)


def test_what_a_server_refuses_is_an_answer_and_its_end_is_a_failure(play):
    _, refused, failed, _ = play([("add", {"a": "x"}), ("subtract", {})], [("end", {"text": "no disk"})])
    assert not refused.failure
    (wrong, is_error), missing = results(refused)
    assert is_error
    assert "error: Error executing tool add: 1 validation error" in wrong
    assert missing == ("error: no tool is named 'subtract'; there are add, step, process, end", True)
    assert failed.failure == "raised"
    assert "step raised ServerEndedError: the server " in failed.error
    assert "has failed: it closed the connection. " in failed.error
    assert failed.error.endswith("no disk")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("'a", "No closing quotation"),
        ("no-such-program", "the server 'no-such-program' has failed: FileNotFoundError: .*'no-such-program'"),
        ("sh -c 'echo no licence >&2'", "has failed: it closed the connection. no licence"),
        ("cat", "the server 'cat' has failed: McpError: "),
        ("sleep 30", "the server did not name its tools in 0.2 s; try its command"),
    ],
)
def test_a_command_that_is_not_a_server_is_an_error(command, message, monkeypatch):
    monkeypatch.setattr("hybridflow.environments.adapters.mcp.START_S", 0.2 if "sleep" in command else 60)
    with pytest.raises(EnvironmentConfigError, match=f"^environment.classes.a=.*{message}"):
        load(f"mcp:{command}", "environment.classes.a")


def test_a_server_has_no_rows(source):
    with pytest.raises(EnvironmentConfigError, match="has no rows of its own; write a file with the column `prompt`"):
        rows_of(source, "train", 3, 0)
