"""Directories of tasks in Harbor's format, as data.

A local sandbox has no image: it gets what the Dockerfile copies, its variables and its working directory.
"""

import posixpath
import re
import shlex
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hybridflow.environments.sandbox import READABLE, LocalSandbox, Sandbox, sandbox_of
from hybridflow.errors import EnvironmentConfigError

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
