"""Tasks of Harbor: directories as its documentation describes them, in a local sandbox."""

import asyncio

import pytest

from hybridflow.environments import AssistantTurn, CallLimits, EnvironmentPool, EpisodeClient, ToolCall
from hybridflow.environments.adapters import harbor, load, rows_of
from hybridflow.environments.adapters.harbor import task_of
from hybridflow.environments.episodes.answers import Begin, Finish, TakeTurn
from hybridflow.environments.sandbox import LocalSandbox, SandboxError
from hybridflow.errors import EnvironmentConfigError

HELLO = {  # the task of Harbor's documentation, with a test that needs no network
    "task.toml": """version = "1.0"

[metadata]
author_name = "Alex Shaw"
difficulty = "easy"
category = "programming"
tags = ["trivial"]

[verifier]
timeout_sec = 120.0
env = { EXPECTED = "Hello, world!" }

[agent]
timeout_sec = 120.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 2048
storage_mb = 10240
""",
    "instruction.md": 'Create a file called hello.txt with "Hello, world!" as the content.\n',
    "environment/Dockerfile": """# The image
FROM ubuntu:24.04
ENV GREETING="Hello" \\
    NAME=world
WORKDIR /app
COPY notes ./notes
COPY first.txt second.txt .
COPY first.txt /etc/renamed.txt
CMD ["bash"]
""",
    "environment/notes/deep/note.txt": "a note",
    "environment/first.txt": "1",
    "environment/second.txt": "2",
    "tests/test.sh": """#!/bin/bash
if [ "$(cat /app/hello.txt)" = "$EXPECTED" ] && [ -f /tests/data/expected.txt ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
exit 1
""",
    "tests/data/expected.txt": "hidden",
    "solution/solve.sh": '#!/bin/bash\necho "Hello, world!" > hello.txt\n',
}


@pytest.fixture
def tasks(tmp_path):
    """Return the directory of tasks, and `write(name, **changes)`, which adds one."""

    def write(name="hello", **changes):
        for path, text in (HELLO | changes).items():
            file = tmp_path / "tasks" / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path / "tasks" / name

    write()
    return tmp_path / "tasks", write


def play(directory, task, *commands, processes=0):
    """Return the results of commands, and the last answer of the episode."""
    if problem := asyncio.run(no_namespaces()):
        pytest.skip(problem)
    pool = EnvironmentPool({"task": f"harbor:{directory}"}, num_processes=processes, limits=CallLimits(30.0))
    client = EpisodeClient(pool.environment("task", 0))

    async def episode():
        (row,) = [row for row in rows_of(f"harbor:{directory}", "train", 9, 0) if row["extra_info"]["task"] == task]
        begun = await client(Begin(row))
        assert not begun.failure, begun.error
        calls = [ToolCall("bash", {"command": each}) for each in commands]
        turns = [await client(TakeTurn(AssistantTurn("", calls=(call,)))) for call in calls]
        return [turn.messages[0]["content"] for turn in turns], await client(Finish("done"))

    try:
        return asyncio.run_coroutine_threadsafe(episode(), pool.loop).result(100)
    finally:
        pool.close()


NAMESPACES = []


async def no_namespaces():
    """Return why a local sandbox cannot be started here; empty if one can be."""
    if not NAMESPACES:
        sandbox = LocalSandbox()
        try:
            await sandbox.exec("true", timeout_s=30)
            NAMESPACES.append("")
        except SandboxError as error:
            NAMESPACES.append(str(error))
        finally:
            await sandbox.close()
    return NAMESPACES[0]


def in_processes(test):
    """Mark a test that starts processes."""
    return pytest.mark.runs(pytest.mark.own_run("episodes: its environments run no commands")(test))


@in_processes
@pytest.mark.parametrize("processes", [0, 1])
def test_a_task_is_solved_with_commands_and_its_tests_are_hidden(tasks, processes):
    directory, _ = tasks
    look = f"pwd; ls -R; cat /etc/renamed.txt; echo $GREETING $NAME; ls /tests /solution /logs/verifier {directory}"
    (seen, solved), ended = play(
        directory, "hello", look, (directory / "hello/solution/solve.sh").read_text(), processes=processes
    )
    listed, _, errors = seen.partition("1Hello world\n")
    assert " ".join(listed.split()) == "/app .: first.txt notes second.txt ./notes: deep ./notes/deep: note.txt"
    assert errors.count("No such file or directory") == 4
    assert errors.endswith("\n[exit code 2]")
    assert solved == ""
    assert (ended.failure, ended.rewards) == (None, {"score": 1.0})


@in_processes
def test_a_reward_is_what_the_tests_write_after_the_episode(tasks):
    directory, write = tasks
    plant = "mkdir -p /logs/verifier /tests; echo '{\"reward\": 1}' > /logs/verifier/reward.json; touch /tests/x"
    assert play(directory, "hello", f"{plant}; chmod 555 /logs /logs/verifier /tests")[1].rewards == {"score": 0.0}
    locked = play(directory, "hello", f"{plant}; chmod 555 /")[1]
    assert "what the model has left in /tests or /logs cannot be removed: rm: cannot remove" in locked.error
    write(
        "several",
        **{"tests/test.sh": """echo '{"reward": 0.5, "style": 1, "note": "x"}' > /logs/verifier/reward.json"""},
    )
    assert play(directory, "several")[1].rewards == {"score": 0.5, "style": 1.0}
    write(
        "both", **{"tests/test.sh": "cd /logs/verifier; echo '{\"passed\": 3}' > reward.json; echo 0.25 > reward.txt"}
    )
    assert play(directory, "both")[1].rewards == {"score": 0.25, "passed": 3.0}


@in_processes
def test_tests_that_write_no_reward_are_errors_and_not_zeros(tasks):
    directory, write = tasks
    late = HELLO["task.toml"].replace("timeout_sec = 120.0\nenv", "timeout_sec = 0.5\nenv")
    for name, changes, problem in (
        (
            "none",
            {"tests/test.sh": "echo no pytest >&2"},
            "it ends with: no pytest",
        ),
        (
            "text",
            {"tests/test.sh": "echo good > /logs/verifier/reward.txt"},
            "could not convert string to float: 'good",
        ),
        ("list", {"tests/test.sh": "echo [1] > /logs/verifier/reward.json"}, "has not written a reward"),
        ("late", {"tests/test.sh": "sleep 1000", "task.toml": late}, "took longer than verifier.timeout_sec=0.5"),
    ):
        write(name, **changes)
        ended = play(directory, name)[1]
        assert (ended.failure, problem in ended.error) == ("raised", True), ended.error


@in_processes
def test_commands_have_the_time_of_the_agent_together(tasks):
    directory, write = tasks
    write(
        "short",
        **{"task.toml": HELLO["task.toml"].replace("[agent]\ntimeout_sec = 120.0", "[agent]\ntimeout_sec = 0.5")},
    )
    results, ended = play(directory, "short", "echo a; sleep 1000", "echo b")
    assert results[0].startswith("a\n\n[killed after 0.5 s]\n")
    assert results[0].endswith("[exit code 124]")
    assert results[1] == "error: the time for commands is over"
    assert ended.rewards == {"score": 0.0}


def test_each_task_is_a_row_and_splits_begin_at_both_ends(tasks):
    directory, write = tasks
    write("another", **{"instruction.md": "Do another thing."})
    source = f"harbor:{directory}?sandbox=docker"
    train, test = (rows_of(source, split, 9, 0) for split in ("train", "test"))
    names = [[row["extra_info"]["task"] for row in rows] for rows in (train, test)]
    assert names[0] == names[1][::-1]
    assert sorted(names[0]) == ["another", "hello"]
    content = {name: row["prompt"][0]["content"] for name, row in zip(names[0], train, strict=True)}
    assert content["another"] == "Do another thing."
    assert rows_of(source, "train", 1, 0) == train[:1]


def test_a_file_of_a_task_that_changes_is_another_environment_for_the_journal(tasks):
    directory, write = tasks
    _, before = load(f"harbor:{directory}", "key")
    assert load(f"harbor:{directory}", "key")[1] == before != ""
    write(**{"tests/data/expected.txt": "other"})
    assert load(f"harbor:{directory}", "key")[1] != before


def test_a_container_has_the_image_and_limits_of_its_task(tasks):
    directory, write = tasks
    built = task_of(directory / "hello", sandbox="docker").sandbox.keywords
    assert built == {
        "context": directory / "hello/environment",
        "network": False,
        "options": ["--memory", "2048m", "--cpus", "1"],
    }
    image = '\n[environment]\ndocker_image = "org/name:tag"\nmemory = "4G"\n'
    path = write("image", **{"task.toml": HELLO["task.toml"].partition("\n[environment]")[0] + image})
    made = task_of(path, sandbox="podman", network=True)
    assert made.sandbox.keywords == {"image": "org/name:tag", "network": True, "options": ["--memory", "4g"]}
    assert made.sandbox()._flags[:2] == ["--memory", "4g"]
    assert made.of_verifier == ["EXPECTED=Hello, world!"]


def test_what_a_local_sandbox_cannot_do_is_an_error_that_names_it(tasks, monkeypatch):
    directory, write = tasks
    dockerfile = HELLO["environment/Dockerfile"]
    for line in (
        "RUN apt-get install -y \\\n  gcc",
        "COPY --from=0 /a /b",
        "ENV PATH=/x:$PATH",
        "FROM other AS base",
        "COPY ../.. /x",
        "COPY missing /x",
    ):
        path = write("built", **{"environment/Dockerfile": f"{dockerfile}{line}\n"})
        word = line.split()[0]
        with pytest.raises(EnvironmentConfigError, match=rf"`{word} .*builds no image.* use sandbox=docker, or remove"):
            task_of(path)
    whole = task_of(write("whole", **{"environment/Dockerfile": "FROM x\nCOPY . /app/\n"}))
    assert whole.files == [(directory / "whole/environment", "/app")]
    with pytest.raises(EnvironmentConfigError, match=r"does not support network=true; use sandbox=docker"):
        task_of(directory / "hello", network=True)
    monkeypatch.setattr(harbor, "READABLE", (str(directory),))
    with pytest.raises(EnvironmentConfigError, match=r"does not support tests that it can read, below '.*/hello'"):
        task_of(directory / "hello")


def test_a_directory_of_tasks_that_is_wrong_is_an_error_at_the_start(tasks):
    directory, write = tasks
    for name, changes, problem in (
        ("toml", {"task.toml": "version ="}, r"task.toml' cannot be read"),
        ("parts", {"task.toml": "[[steps]]\n[environment]\ngpus = 1\n"}, r"has steps, environment.gpus, which is not"),
        ("key", {"task.toml": '[verifier.env]\nKEY = "${KEY}"\n'}, r"has env KEY=\$\{KEY\}, which is not supported"),
    ):
        with pytest.raises(EnvironmentConfigError, match=problem):
            task_of(write(name, **changes))
    key = "environment.classes.t"
    for rest, problem in (
        (
            f"{directory}/none",
            rf"{key}='harbor:.*/none': '.*' has no tasks; expected directories in it with a task.toml",
        ),
        (f"{directory}?image=x", "unexpected keyword argument 'image'"),
        (f"{directory}?sandbox=dcoker", "sandbox='dcoker' is not known"),
    ):
        with pytest.raises(EnvironmentConfigError, match=problem):
            load(f"harbor:{rest}", key)
    (directory / "hello/tests/test.sh").unlink()
    with pytest.raises(EnvironmentConfigError, match=r"hello/tests/test.sh' does not exist; each task needs it"):
        load(f"harbor:{directory}", key)
