"""Runs whose environments a Python program holds: those of files, without a file."""

import asyncio
import inspect
import threading
from pathlib import Path

import pytest

import hybridflow
from hybridflow.cli.api.environment_argument import environment_sources
from hybridflow.environments import CallLimits, Done, Environment, EnvironmentPool, Episode, Reply, Turn
from hybridflow.environments.episodes.answers import Begin, Finish
from hybridflow.environments.processes import closure
from hybridflow.errors import EnvironmentConfigError

pytestmark = pytest.mark.usefixtures("restores_the_process")
WORDS = 5
OWN = pytest.mark.own_run("episodes: its environment is a class of the program")


class Talk(Environment):
    """Answers a turn twice; worth what a variable of the program says."""

    def count(self, text: str = "") -> int:
        """Count letters."""
        return len(text)

    async def step(self, turn: Turn):
        return Done(0.25) if turn.number else Reply([{"role": "user", "content": "more"}], reward=0.125)

    async def reward(self, episode: Episode):
        return sum(len(turn.content) for turn in episode.turns) % WORDS / 4


class Other(Talk):
    async def reward(self, episode: Episode):
        return 0.5


IMPORTS = "from hybridflow.environments import Done, Environment, Episode, Reply, Turn"
FILE = f"WORDS = {WORDS}\n{IMPORTS}\n\n{inspect.getsource(Talk)}"

SETTINGS = {
    "data": {"train_batch_size": 4, "max_prompt_length": 700, "max_response_length": 120},
    "rollout.group_size": 3,
    "controller.threads": 1,
    "actor.optimizer.lr": 1e-2,
    "trainer.total_steps": 2,
    "environment": {"max_turns": 3},
}


@pytest.fixture(scope="module")
def task(episode_task):
    return episode_task


def train(task, run_dir, environments, **changes):
    file, settings = task / "train.parquet", {**SETTINGS, **changes}
    return hybridflow.train(task / "model", file, environments=environments, run_dir=run_dir, **settings)


@pytest.fixture(scope="module")
def of_file(task, tmp_path_factory):
    directory = tmp_path_factory.mktemp("file")
    (directory / "talk.py").write_text(FILE)
    return train(task, directory / "run", f"{directory}/talk.py:Talk").fit()


def samples_of(run):
    return [(each["step"], each["messages"], each["score"]) for each in run.samples()]


@pytest.mark.runs
@OWN
@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_class_of_the_program_equals_the_same_class_in_a_file(task, tmp_path, of_file, processes):
    run = train(task, tmp_path / "run", Talk, **{"reward.processes": processes}).fit()
    assert list(run.config.environment.classes) == ["talk"]
    assert samples_of(run) == samples_of(of_file)
    assert any(len(each["messages"]) > 2 for each in run.samples())
    names = [name for name in of_file.metrics[-1] if name.startswith(("critic/", "actor/", "episode/"))]
    assert [run.metrics[-1][name] for name in names] == [of_file.metrics[-1][name] for name in names]


@pytest.mark.runs
@OWN
def test_a_run_goes_on_with_its_class_and_with_no_other(task, tmp_path, monkeypatch):
    run = train(task, tmp_path / "run", {"talk": Talk}, **{"reward.processes": 0}).fit(stop_after=1)
    stored = (Path(run.path) / "config.toml").read_text()
    assert "closure:Talk-" in stored
    monkeypatch.setattr(closure, "_offered", {})
    forgotten = hybridflow.open_run(run.path)
    with pytest.raises(EnvironmentConfigError, match=r"environments='closure:Talk-.*open_run.*environments="):
        forgotten.fit()
    with pytest.raises(EnvironmentConfigError, match=r"the environment is Other-.*that of the run in .* was Talk-"):
        hybridflow.open_run(run.path, environments=Other)
    again = hybridflow.open_run(run.path, environments={"talk": Talk})
    assert again.resume().metrics[-1]["step"] == 2
    assert again.replay(2).differs == {}
    assert "critic/score/mean" in again.metrics[-1]
    assert again.evaluate(task / "test.parquet")["val/score/mean"] >= 0


@pytest.mark.runs
@OWN
def test_environments_of_a_file_are_stored(of_file):
    with pytest.raises(EnvironmentConfigError, match="which is stored; leave environments out"):
        hybridflow.open_run(of_file.path, environments=Talk)


def test_classes_by_name_and_names_of_files_are_mixed():
    sources, closures = environment_sources({"talk": Talk, "maze": "maze.py:Maze"})
    assert sources == {"talk": closures[0].name, "maze": "maze.py:Maze"}
    assert environment_sources("tasks/my.py:MyMaze")[0] == {"my_maze": "tasks/my.py:MyMaze"}
    assert environment_sources(None) == ({}, [])


class NoReward(Environment): ...


@pytest.mark.parametrize(
    ("environment", "reward", "message"),
    [
        (NoReward, None, "NoReward has no method `reward`, .*; write one, or set reward"),
        (Talk, lambda completion: 1.0, r"Talk has a method `reward`, and reward='closure:lambda-\w+' is set: both"),
    ],
)
def test_an_episode_has_one_reward(task, tmp_path, environment, reward, message):
    with pytest.raises(EnvironmentConfigError, match=message):
        hybridflow.train(task / "model", [{"prompt": "a"}], environments=environment, reward=reward, run_dir=tmp_path)


@pytest.mark.runs
@OWN
def test_a_function_of_the_program_scores_episodes_of_its_class(task, tmp_path):
    def many(completion, messages):
        return float(len(messages)) if messages[-1]["content"] == completion else 0.0

    class Bare(NoReward):
        async def step(self, turn: Turn):
            return await Talk.step(self, turn)

    run = hybridflow.train(
        task / "model",
        [{"prompt": "a"}, {"prompt": "b"}] * 2,
        environments=Bare,
        reward=many,
        run_dir=tmp_path / "run",
        **{**SETTINGS, "trainer.total_steps": 1, "rollout.group_size": 2, "reward.processes": 0},
    ).fit()
    assert [each["score"] for each in run.samples()] == [4 + 0.375] * 4


def scoring(value):
    class Scoring(Talk):
        async def reward(self, episode: Episode):
            return value

    return Scoring


@pytest.mark.runs
@OWN
def test_classes_of_one_function_are_different_ones():
    sources, closures = environment_sources({"a": scoring(1), "b": scoring(2)})
    assert sources["b"] == f"{sources['a']}#1"
    pool = EnvironmentPool(sources, num_processes=1, limits=CallLimits(), closures=closures)
    try:
        questions = [Begin({"prompt": "a"}), Finish("done")]
        for name, value in (("a", 1.0), ("b", 2.0)):
            answer = asyncio.run_coroutine_threadsafe(pool.environment(name, 0).ask(questions), pool.loop).result(60)
            assert answer.rewards == {"score": value}
    finally:
        pool.close()


@pytest.mark.runs
@OWN
def test_types_that_only_annotations_name_travel():
    scope = {}
    code = (
        "from __future__ import annotations\nfrom typing import Literal\n"
        "from hybridflow.environments import Environment\n\n\nclass Looks(Environment):\n"
        "    def look(self, where: Literal['near', 'far']) -> str:\n        return where\n\n"
        "    async def reward(self, episode):\n        return 1.0\n"
    )
    exec(code, scope)
    scope["Looks"].__module__ = "__main__"  # as in a notebook
    sources, closures = environment_sources(scope["Looks"])
    pool = EnvironmentPool(sources, num_processes=1, limits=CallLimits(), closures=closures)
    try:
        (schema,) = pool.kinds["looks"].schemas
        assert schema["function"]["parameters"]["properties"]["where"]["enum"] == ["near", "far"]
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Talk(), "is a Talk; expected a class"),
        (int, "'int' does not name a subclass of hybridflow.environments.Environment"),
        ({"talk": 3}, "'3' is neither a class nor an `async` function"),
        ({}, "environments={} names no class"),
        ({"max_turns": 4}, "'4' is neither a class nor"),
    ],
)
def test_what_is_not_an_environment_is_an_error(given, message):
    with pytest.raises(EnvironmentConfigError, match=message):
        environment_sources(given)


def test_a_class_that_cannot_travel_is_an_error_that_names_what_it_holds():
    lock = threading.Lock()

    class Holding(Talk):
        async def close(self):
            with lock:
                pass

    with pytest.raises(EnvironmentConfigError, match=r"environment 'Holding' cannot travel.*it holds lock"):
        environment_sources(Holding)
