"""`hybridflow serve` as a process, with the clients of OpenAI and Anthropic, and `hybridflow evaluate --agent`."""

import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from fixtures.tiny_episodes import episode_settings, write_episode_task
from hybridflow.cli.main import main
from hybridflow.runtime.observe import read_jsonl

KEY = "the-key"
SETTINGS = ("data.max_response_length=40", "controller.threads=1")
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
TOOL = {"name": "add", "description": "Adds.", "parameters": SCHEMA}

own_run = pytest.mark.own_run("grpo: has no chat template; serves a model in a process")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("serve")
    write_episode_task(directory)
    return directory


@pytest.fixture(scope="module")
def served(task):
    """Yield the address of a server, and a function that returns the rows that it has recorded."""
    command = [sys.executable, "-m", "hybridflow", "serve", task / "model", "--port", "0", "--record", task / "record"]
    with subprocess.Popen(
        [*command, *SETTINGS],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HYBRIDFLOW_API_KEY": KEY},
    ) as process:
        lines = []
        while not lines or (lines[-1] and not lines[-1].startswith("export ANTHROPIC_BASE_URL=")):
            lines.append(process.stdout.readline())
        shown = "".join(lines)
        assert f"key: {KEY}\n" in shown, shown
        url = re.search(r"^base URL: (\S+)$", shown, re.MULTILINE)[1]
        assert f"\nexport OPENAI_BASE_URL={url} OPENAI_API_KEY={KEY}\nexport ANTHROPIC_BASE_URL=" in shown
        yield url, lambda: read_jsonl(task / "record" / "turns.jsonl")
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=120)[0] == "ended\n"
        assert process.returncode == 0


@pytest.fixture
def client(served):
    from openai import OpenAI

    with OpenAI(base_url=served[0], api_key=KEY, max_retries=0) as client:
        yield client


def ask(client, messages, **options):
    return client.chat.completions.create(model="policy", messages=messages, **options)


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.runs
@own_run
def test_recorded_turns_of_a_conversation_continue_each_other_token_by_token(served, client):
    messages, ids = [user("first")], []
    for number in range(3):
        answer = ask(client, messages, logprobs=True)
        ids.append(answer.id.removeprefix("chatcmpl-"))
        said = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": said}, user(f"and {number}?")]
    rows = {row["turn_id"]: row for row in served[1]()}
    turns = [rows[turn_id] for turn_id in ids]
    for before, turn in pairwise(turns):
        known = [*before["prompt_ids"], *before["token_ids"]]
        assert turn["parent_id"] == before["turn_id"]
        assert turn["prompt_ids"][: len(known)] == known
    assert turns[0]["parent_id"] is None
    assert turns[-1]["messages"][:-1] == messages[:-2]
    assert turns[-1]["finish"] in ("stop", "length")
    assert len(turns[-1]["token_ids"]) == len(turns[-1]["versions"]) == answer.usage.completion_tokens <= 40
    assert turns[-1]["log_probs"] == pytest.approx([token.logprob for token in answer.choices[0].logprobs.content])
    assert turns[-1]["seconds"] >= 0


@pytest.mark.runs
@own_run
def test_both_protocols_serve_streams_and_whole_turns_with_tools(served, client):
    from anthropic import Anthropic

    function = [{"type": "function", "function": TOOL}]
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in ask(client, [user("3 + 4")], tools=function, stream=True)
    )
    schema = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
    with Anthropic(base_url=served[0].removesuffix("/v1"), api_key=KEY, max_retries=0) as anthropic:
        asked = {"model": "policy", "max_tokens": 40, "messages": [user("3 + 4")], "tools": [schema]}
        whole = anthropic.messages.create(**asked)
        with anthropic.messages.stream(**asked) as stream:
            final = stream.get_final_message()
    rows = served[1]()[-3:]
    assert [row["tools"] for row in rows] == [function] * 3
    assert len({tuple(row["prompt_ids"]) for row in rows}) == 1
    assert rows[0]["messages"][-1]["content"].strip() == streamed.strip()
    assert [message.id.removeprefix("msg_") for message in (whole, final)] == [row["turn_id"] for row in rows[1:]]
    assert whole.usage.output_tokens == len(rows[1]["token_ids"])


@pytest.mark.runs
@own_run
def test_each_request_has_its_own_sampling_or_that_of_the_run(served, client):
    greedy = [ask(client, [user("same")], temperature=0).choices[0].message.content for _ in range(2)]
    assert greedy[0] == greedy[1]
    answers = [ask(client, [user("same")]) for _ in range(4)]
    assert len({answer.choices[0].message.content for answer in answers}) > 1
    assert len({answer.id for answer in answers}) == 4
    assert ask(client, [user("same")], max_tokens=1).usage.completion_tokens == 1


@pytest.mark.runs
@own_run
def test_concurrent_requests_are_answered_each_with_its_own_turn(served, client):
    with ThreadPoolExecutor(24) as threads:
        answers = list(threads.map(lambda number: ask(client, [user(f"question {number}")]), range(48)))
    rows = {row["turn_id"]: row for row in served[1]()}
    for number, answer in enumerate(answers):
        row = rows[answer.id.removeprefix("chatcmpl-")]
        assert row["messages"][0]["content"] == f"question {number}"
        assert row["messages"][-1]["content"].strip() == answer.choices[0].message.content.strip()


@pytest.mark.runs
@own_run
def test_a_wrong_key_and_a_conversation_without_room_are_refused(served, client):
    import openai

    with pytest.raises(openai.AuthenticationError, match="key of the session"):
        ask(client.with_options(api_key="another"), [user("hi")])
    with pytest.raises(openai.BadRequestError, match="a row may have 2048 tokens; shorten"):
        ask(client, [user("word " * 3000)])
    assert ask(client, [user("hi")]).choices


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--port", "70000"], "'70000' is invalid: expected a port from 0 to 65535"),
        (["--key", "two words"], "--key is invalid: a key has one or more ASCII characters without spaces"),
        (["--key", ""], "--key is invalid"),
        (["--record", "/dev/null/x"], "--record /dev/null/x cannot be written"),
    ],
)
def test_wrong_options_of_serve_are_errors_that_name_them(task, arguments, problem, shown, restores_the_process):
    assert problem in shown("serve", task / "model", "--port", "0", *arguments, status=2)[1]


def test_a_port_in_use_and_a_directory_without_a_model_are_errors(task, tmp_path, shown, restores_the_process):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"cannot listen on 127.0.0.1, port {port}" in shown("serve", task / "model", "--port", port, status=2)[1]
    assert "is neither a run" in shown("serve", tmp_path, status=2)[1]


AGENT = """
import json, sys
from openai import OpenAI

row = json.load(sys.stdin)
with OpenAI(max_retries=0) as client:
    client.chat.completions.create(model="policy", messages=row["prompt"], max_tokens=8)
if row["extra_info"]["index"] % 2:
    print(json.dumps({"score": 2.0}))
"""


@pytest.mark.runs
@pytest.mark.own_run("grpo: has no chat template; evaluates an agent, which is a process")
def test_evaluation_of_a_command_takes_its_reward_or_that_of_the_function(task, tmp_path, shown, restores_the_process):
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "score.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n    return 0.5\n"
    )
    changes = [f"data.val_files=['{task}/test.parquet']", f"reward.function={tmp_path}/score.py:score"]
    command = ("--agent", f"{sys.executable} {tmp_path}/agent.py", "--output", tmp_path / "rows.jsonl")
    shown("evaluate", *episode_settings(task), *changes, *command)
    scores = [row["score"] for row in read_jsonl(tmp_path / "rows.jsonl")]
    assert scores == [0.5, 2.0, 0.5]  # of the rows 16 to 18


@pytest.mark.parametrize(
    ("agent", "source"),
    [
        ("python agent.py --fast", "command:python agent.py --fast"),
        ("agents.py:talk", "agents.py:talk"),
        ("command:sh run.sh", "command:sh run.sh"),
        ("uvx app.py:main", "command:uvx app.py:main"),
    ],
)
def test_an_agent_of_evaluate_is_a_source_or_else_a_command(agent, source, monkeypatch):
    built = []
    monkeypatch.setattr("hybridflow.trainers.build_validator", lambda config, _: built.append(config) or sys.exit(0))
    with pytest.raises(SystemExit):
        main(["evaluate", "model.path=model", "environment.classes={a = 'a.py:A'}", "--agent", agent])
    assert built[0].environment.classes == {"agent": source}
