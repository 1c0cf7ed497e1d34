"""Tasks of Harbor (terminal-bench 2): "harbor:DIR", or "harbor:DIR?sandbox=docker&network=true".

DIR has a directory for each task, with task.toml, instruction.md, environment/Dockerfile and tests/test.sh. The model
has a tool `bash`; then the tests are copied to /tests, and test.sh writes the reward to /logs/verifier. In a local
sandbox no image is built, see harbor_tasks.
"""

import hashlib
import io
import json
import random
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybridflow.environments.adapters import arguments_of
from hybridflow.environments.adapters.harbor_tasks import HarborTask, directories_of, task_of
from hybridflow.environments.episodes.environment import Environment, Episode
from hybridflow.environments.episodes.messages import Message
from hybridflow.environments.sandbox import FILE_S, LATE, Sandbox, SandboxError
from hybridflow.errors import EnvironmentConfigError, RewardError, ToolError

_CLEAR = """
chmod -R u+rwX /tests /logs 2> /dev/null
rm -rf /tests /logs/verifier && mkdir -p /logs/verifier /logs/agent
"""
"""Leaves no reward and no test that the model has written."""


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
    """An episode of the task that a row names."""

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
