"""Servers of OpenEnv on loopback, as their own package makes them; it takes seconds to import."""

import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from hybridflow.environments.adapters import load, rows_of
from hybridflow.errors import EnvironmentConfigError

pytestmark = [pytest.mark.runs, pytest.mark.own_run("episodes: environments of OpenEnv")]

SERVER = '''
import asyncio, random, sys, uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Said(Action):
    message: str


class Heard(Observation):
    text: str


class Echo(Environment):
    """Echoes three messages; each is worth a tenth of its length."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **others):
        self.count = 0
        return Heard(text=f"begin {random.Random(seed).random()}")

    def step(self, action, timeout_s=None, **others):
        self.count += 1
        if "fail" in action.message:
            raise OSError("no disk")
        return Heard(text=f"{self.count}: {action.message}", reward=len(action.message) / 10, done=self.count == 3)

    @property
    def state(self):
        return State(step_count=self.count)


class Move(Action):
    x: int
    y: int = 0


class Seen(Observation):
    place: list[int]
    steps: int


class Walk(Echo):
    """Walks."""

    def reset(self, seed=None, episode_id=None, **others):
        self.count, self.place = 0, [0, 0]
        return Seen(place=self.place, steps=0)

    def step(self, action, timeout_s=None, **others):
        self.count, self.place = self.count + 1, [self.place[0] + action.x, self.place[1] + action.y]
        return Seen(place=self.place, steps=self.count)


async def serve(port, *types):
    app = create_app(*types, max_concurrent_envs=2)
    await uvicorn.Server(uvicorn.Config(app, port=int(port), log_level="error")).serve()


async def main():
    await asyncio.gather(serve(sys.argv[1], Echo, Said, Heard), serve(sys.argv[2], Walk, Move, Seen))


asyncio.run(main())
'''


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Return the sources of two servers, of one process, by name."""
    file = tmp_path_factory.mktemp("openenv") / "server.py"
    file.write_text(SERVER)
    with socket.socket() as first, socket.socket() as second:
        for free in (first, second):
            free.bind(("127.0.0.1", 0))
        ports = [str(free.getsockname()[1]) for free in (first, second)]
    process = subprocess.Popen([sys.executable, file, *ports])
    for port in ports:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            except OSError:
                assert process.poll() is None
                time.sleep(0.2)
    yield {name: f"openenv:http://127.0.0.1:{port}" for name, port in zip(("echo", "walk"), ports, strict=True)}
    process.kill()
    process.wait()


def shown(answers):
    return [answer.messages[0]["content"] if answer.messages else "" for answer in answers]


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_an_episode_over_the_client_of_the_package_gets_its_rewards(play, servers, processes):
    row = {"prompt": "Say something.", "extra_info": {"seed": 3}}
    answers = play(servers["echo"], row, [" hello ", "a", "the end"], processes)
    assert shown(answers)[0].startswith("Say something.\n\nbegin 0.2379")
    assert shown(answers)[1:] == ["1: hello", "2: a", "", ""]
    assert [answer.reward for answer in answers] == [0, 0.5, 0.1, 0.7, 0]
    assert [answer.is_done for answer in answers] == [False, False, False, True, True]
    assert answers[-1].rewards == {"score": 0.0}
    assert shown(play(servers["echo"], row, [], processes))[0] == shown(answers)[0]


def test_actions_of_several_fields_are_json_and_a_wrong_one_says_what_is_valid(play, servers):
    turns = ['I go {"x": 2, "y": 1}', '{"x": "far"}', "north", '```json\n{"x": 1}\n```', "[1]", '{"x": 1} {"y": 2}']
    texts = shown(play(servers["walk"], {"prompt": "Walk."}, turns))
    wrong = texts[2]
    assert wrong.startswith('This is not an action. Answer with a JSON object with the fields {"x": {"title": "X"')
    seen = [json.dumps({"place": place, "steps": steps}) for place, steps in (([0, 0], 0), ([2, 1], 1), ([3, 1], 2))]
    assert texts[:-1] == [f"Walk.\n\n{seen[0]}", seen[1], wrong, wrong, seen[2], wrong, wrong]


def test_what_a_server_fails_at_is_an_error_of_the_environment(play, servers):
    failed = play(servers["echo"], {"prompt": "Say."}, ["fail"])[1]
    assert (failed.failure, "no disk (code: EXECUTION_ERROR)" in failed.error) == ("raised", True)


def test_more_episodes_than_a_server_has_sessions_are_an_error_with_the_fix(servers):
    async def begin(count):
        environments = [load(servers["walk"], "environment.classes.a")[0]() for _ in range(count)]
        try:
            for environment in environments:
                await environment.reset({"prompt": "Walk."})
        finally:
            for environment in environments:
                await environment.close()

    with pytest.raises(
        EnvironmentConfigError,
        match=r"(at capacity: 2/2 |received 1000).* start the server with max_concurrent_envs of",
    ):
        asyncio.run(begin(3))


def test_a_server_that_does_not_answer_is_an_error_at_the_start(servers):
    for url, message in (
        ("http://127.0.0.1:1", "no OpenEnv server answers http://127.0.0.1:1/schema"),
        ("x", "expected http://"),
    ):
        with pytest.raises(EnvironmentConfigError, match=message):
            load(f"openenv:{url}", "environment.classes.a")
    with pytest.raises(EnvironmentConfigError, match="has no rows of its own; write a file"):
        rows_of(servers["echo"], "train", 1, 0)
