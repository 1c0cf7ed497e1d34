"""Commands as agents: what they get, what they print, and what becomes of the processes that they start."""

import asyncio
import shlex

import pytest

from hybridflow.environments.agents.agent import AgentSession
from hybridflow.environments.agents.command import MAX_OUTPUT, CommandError, make
from hybridflow.errors import EnvironmentConfigError

pytestmark = [pytest.mark.runs, pytest.mark.own_run("episodes: agents that are commands")]


def run(script, row=None):
    """Return what a script of the shell is worth, and what is kept of its output."""
    agent = make(shlex.join(["sh", "-c", script]))()
    return asyncio.run(agent.run(AgentSession("http://127.0.0.1:1/s/v1", "key"), row or {})), agent.output


def test_a_command_gets_the_row_and_the_addresses_and_prints_its_reward():
    script = (
        'cat; echo " $OPENAI_BASE_URL $ANTHROPIC_BASE_URL $OPENAI_API_KEY" >&2; echo \'{"reward": 0.5, "words": 2}\''
    )
    reward, output = run(script, {"prompt": "é" * 100_000})
    assert reward == {"score": 0.5, "words": 2}
    assert len(output) == MAX_OUTPUT
    assert ' http://127.0.0.1:1/s/v1 http://127.0.0.1:1/s key\n{"reward"' in output
    assert run("sleep 98763 & echo 1", {"prompt": "x" * 100_000})[0] == 1
    assert run("echo; echo done")[0] is None


def test_a_command_ends_with_its_time_and_with_what_it_has_started():
    async def late():
        agent = make("sh -c 'echo begun; sleep 98762 & echo $!; wait'")()
        task = asyncio.create_task(agent.run(AgentSession("http://127.0.0.1:1/s/v1", "key"), {}))
        while agent.output.count("\n") < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        return agent.output.split()

    begun, number = asyncio.run(late())
    assert begun == "begun"
    assert run(f"while kill -0 {number} 2> /dev/null; do :; done; echo 1")[0] == 1


@pytest.mark.parametrize(("script", "how"), [("echo why; exit 3", "exited with status 3"), ("kill -9 $$", "signal 9")])
def test_a_command_that_fails_says_how_and_what_it_printed(script, how):
    with pytest.raises(CommandError, match=f"the command .*{how}; its output ends with: "):
        run(script)


def test_a_command_that_is_not_installed_is_named():
    with pytest.raises(EnvironmentConfigError, match="'no-such-program' is not a program on PATH or an executable"):
        make("no-such-program --fast")
