"""Tasks of Harbor (terminal-bench 2): "harbor:DIR", or "harbor:DIR?sandbox=docker&network=true".

DIR has a directory for each task, with task.toml, instruction.md, environment/Dockerfile and tests/test.sh. The model
has a tool `bash`; then the tests are copied to /tests, and test.sh writes the reward to /logs/verifier. In a local
sandbox no image is built: it gets what the Dockerfile copies, its variables and its working directory.
"""

import hashlib
import io
import json
import posixpath
import random
import re
import shlex
import tarfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hybridflow.environments.adapters import arguments_of
from hybridflow.environments.episodes.environment import Environment, Episode
from hybridflow.environments.episodes.messages import Message
from hybridflow.environments.sandbox import FILE_S, LATE, READABLE, LocalSandbox, Sandbox, SandboxError, sandbox_of
from hybridflow.errors import EnvironmentConfigError, RewardError, ToolError

_CLEAR = """
chmod -R u+rwX /tests /logs 2> /dev/null
rm -rf /tests /logs/verifier && mkdir -p /logs/verifier /logs/agent
"""
"""Leaves no reward and no test that the model has written."""

_LIMIT_S = 600.0
"""Seconds of a part of a task without `timeout_sec`."""

_OF_ENVIRONMENT = ("gpus", "tpu", "mcp_servers", "healthcheck", "skills_dir")
_NOT_SUPPORTED = (
    *("steps", "agent.user", "verifier.user", "verifier.environment"),
    *(f"environment.{name}" for name in _OF_ENVIRONMENT),
)


@dataclass(frozen=True)
class HarborTask:
    """A task: what makes its sandbox, files and their paths there, variables NAME=VALUE, and limits in seconds."""

    directory: Path
    sandbox: Callable[[], Sandbox]
    files: Sequence[tuple[Path, str]]
    variables: Sequence[str]
    of_verifier: Sequence[str]
    agent_s: float
    verifier_s: float


def directories_of(directory: str) -> list[Path]:
    """Return the directories of tasks. Raises EnvironmentConfigError if there are none, or if a file is missing."""
    paths = sorted(path.parent for path in Path(directory).expanduser().resolve().glob("*/task.toml"))
    if not paths:
        raise EnvironmentConfigError(f"{directory!r} has no tasks; expected directories in it with a task.toml each.")
    for file in (path / name for path in paths for name in ("instruction.md", "tests/test.sh")):
        if not file.is_file():
            raise EnvironmentConfigError(f"{str(file)!r} does not exist; each task needs it.")
    return paths


def task_of(path: Path, sandbox: str = "local", network: bool = False) -> HarborTask:
    """Return the task of a directory. Raises EnvironmentConfigError for one that the sandbox cannot serve."""
    try:
        given = tomllib.loads((path / "task.toml").read_text("utf-8"))
    except ValueError as error:
        raise EnvironmentConfigError(f"{str(path / 'task.toml')!r} cannot be read: {error}") from error
    parts = [(name, part) for name, part in given.items() if isinstance(part, dict)]
    given |= {f"{name}.{key}": value for name, part in parts for key, value in part.items()}
    variables, of_verifier = (
        [f"{name}={value}" for name, value in given.get(key, {}).items()] for key in ("environment.env", "verifier.env")
    )
    used = [key for key in _NOT_SUPPORTED if given.get(key)]
    used += ["docker-compose.yaml"] * (path / "environment/docker-compose.yaml").exists()
    used += [f"env {each}" for each in variables + of_verifier if "${" in each]
    if used:
        raise EnvironmentConfigError(
            f"the task {str(path)!r} has {', '.join(used)}, which is not supported; remove it."
        )
    build, context, files = sandbox_of(str(sandbox)), path / "environment", list[tuple[Path, str]]()
    if build is LocalSandbox:
        if network or any(path.is_relative_to(each) for each in READABLE):
            problem = "network=true" if network else f"tests that it can read, below {str(path)!r}"
            raise EnvironmentConfigError(f"a local sandbox does not support {problem}; use sandbox=docker.")
        workdir, files, of_image = _followed(context / "Dockerfile")
        made, variables = partial(build, workdir), of_image + variables
    else:
        megabytes, older = given.get("environment.memory_mb"), given.get("environment.memory", "").lower()
        asked = {"--memory": f"{megabytes}m" if megabytes else older, "--cpus": given.get("environment.cpus")}
        flags = [str(word) for flag, value in asked.items() if value for word in (flag, value)]
        name = given.get("environment.docker_image")
        made = partial(build, **({"image": name} if name else {"context": context}), network=network, options=flags)
    agent_s, verifier_s = (float(given.get(f"{part}.timeout_sec") or _LIMIT_S) for part in ("agent", "verifier"))
    return HarborTask(path, made, files, variables, of_verifier, agent_s, verifier_s)


def _followed(path: Path) -> tuple[str, list[tuple[Path, str]], list[str]]:
    """Return the working directory, files and variables of a Dockerfile of FROM, WORKDIR, ENV and COPY.

    Raises EnvironmentConfigError for other instructions, and for forms of these that need a build.
    """
    if not path.is_file():
        raise EnvironmentConfigError(
            f"{str(path)!r} does not exist, which a local sandbox follows; use sandbox=docker."
        )
    context, workdir, files, variables = path.parent, "/", list[tuple[Path, str]](), list[str]()
    text = re.sub(r"^\s*#.*\n", "", path.read_text("utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(str.strip, text.splitlines()):
        match ["$"] if "$" in line else line.split():
            case ["FROM", _] | ["CMD" | "ENTRYPOINT" | "EXPOSE" | "LABEL", *_]:
                pass
            case ["WORKDIR", to]:
                workdir = posixpath.normpath(posixpath.join(workdir, to))
            case ["ENV", first, *_] if "=" in first:
                variables += shlex.split(line)[1:]
            case ["COPY", *names, to] if names and all(_is_in(context, name) for name in names):
                place = posixpath.normpath(posixpath.join(workdir, to))
                is_directory = len(names) > 1 or to.endswith("/") or place in ("/", workdir)
                for source in (context / name.lstrip("/") for name in names):
                    is_within = is_directory and source.is_file()
                    files.append((source, posixpath.join(place, source.name) if is_within else place))
            case _:
                raise EnvironmentConfigError(
                    f"{str(path)!r} has `{line.strip()[:80]}`, and a local sandbox builds no image; use "
                    "sandbox=docker, or remove such lines, if the programs of this machine are enough."
                )
    return workdir, files, variables


def _is_in(context: Path, name: str) -> bool:
    path = (context / name.lstrip("/")).resolve()
    return path.exists() and path.is_relative_to(context)


def make(rest: str) -> type[Environment]:
    """Return the class of the tasks of a directory. Raises EnvironmentConfigError for one that cannot be served."""
    directory, options = arguments_of(rest)
    tasks = {path.name: task_of(path, **options) for path in directories_of(directory)}
    return type("Harbor", (_HarborEnvironment,), {"tasks": tasks})


def digest(rest: str) -> str:
    """Return a digest of the files of all tasks."""
    found = hashlib.blake2b(digest_size=16)
    for task in directories_of(arguments_of(rest)[0]):
        for path in sorted(path for path in task.rglob("*") if path.is_file()):
            found.update(f"{task.name}/{path.relative_to(task)} {path.stat().st_size}\n".encode())
            found.update(path.read_bytes())
    return found.hexdigest()


def rows(rest: str, split: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each task, in an order of the seed, which for "test" is reversed."""
    del count
    paths = directories_of(arguments_of(rest)[0])
    random.Random(seed).shuffle(paths)
    for path in paths if split == "train" else reversed(paths):
        yield {
            "prompt": [{"role": "user", "content": (path / "instruction.md").read_text("utf-8")}],
            "data_source": "harbor",
            "reward_model": {"style": "rule", "ground_truth": path.name},
            "extra_info": {"task": path.name},
        }


class _HarborEnvironment(Environment):
    tasks: Mapping[str, HarborTask]
    _sandbox: Sandbox | None = None

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        name = str((row.get("extra_info") or {}).get("task"))
        if name not in self.tasks:
            raise EnvironmentConfigError(f"extra_info.task={name!r} of a row is not a task of the directory.")
        self._task = self.tasks[name]
        self._left_s, self._sandbox = self._task.agent_s, self._task.sandbox()
        await _copy(self._sandbox, self._task.files)  # starts it here, not within the time for commands
        return await super().reset(row)

    async def bash(self, command: str) -> str:
        """Run a command in a new bash in the working directory of the task, and return what it writes."""
        assert self._sandbox is not None
        if self._left_s <= 0:
            raise ToolError("the time for commands is over")
        begun = time.monotonic()
        argv = ["env", *self._task.variables, "bash", "-c", command]
        done = await self._sandbox.exec(argv, timeout_s=self._left_s)
        self._left_s -= time.monotonic() - begun
        return done.stdout + done.stderr + (f"\n[exit code {done.exit_code}]" if done.exit_code else "")

    async def reward(self, episode: Episode) -> Mapping[str, float]:
        sandbox, task = self._sandbox, self._task
        assert sandbox is not None
        done = await sandbox.exec(_CLEAR, timeout_s=FILE_S)
        if done.exit_code:
            raise RewardError(
                f"what the model has left in /tests or /logs cannot be removed: {done.stderr.strip()[:500]}"
            )
        await _copy(sandbox, [(task.directory / "tests", "/tests")])
        argv = ["env", *task.variables, *task.of_verifier, "bash", "/tests/test.sh"]
        done = await sandbox.exec(argv, timeout_s=task.verifier_s)
        what = f"tests/test.sh of the task {task.directory.name!r}"
        if done.exit_code == LATE:
            raise RewardError(f"{what} took longer than verifier.timeout_sec={task.verifier_s:g}")
        rewards: dict[str, float] = {}
        try:
            with suppress(SandboxError):  # it need not exist
                found = json.loads(await sandbox.get("/logs/verifier/reward.json"))
                rewards = {name: value for name, value in found.items() if type(value) in (int, float)}
            if "reward" not in rewards:
                rewards["reward"] = float((await sandbox.get("/logs/verifier/reward.txt")).decode())
        except (SandboxError, ValueError, AttributeError) as error:
            wrote = (done.stdout + done.stderr)[-500:].strip()
            raise RewardError(f"{what} has not written a reward ({error}); it ends with: {wrote}") from error
        return {"score": rewards.pop("reward"), **rewards}

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()


async def _copy(sandbox: Sandbox, files: Iterable[tuple[Path, str]]) -> None:
    """Copy files, and what directories have, to paths in the sandbox."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for source, target in files:
            tar.add(source, target.lstrip("/") or ".")
    await sandbox.put("/tmp/files.tar", archive.getvalue())
    done = await sandbox.exec("tar -xof /tmp/files.tar -C / && rm /tmp/files.tar", timeout_s=FILE_S)
    if done.exit_code:
        raise SandboxError(f"files cannot be copied to the sandbox: {done.stderr.strip()}")
