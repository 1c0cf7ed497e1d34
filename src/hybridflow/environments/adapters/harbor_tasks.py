"""Directories of tasks in Harbor's format, as data: limits, variables, what makes the sandbox, and its files.

A local sandbox has no image: what its Dockerfile copies and sets is read here.
"""

import json
import posixpath
import re
import shlex
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hybridflow.environments.sandbox import READABLE, LocalSandbox, Sandbox, sandbox_of
from hybridflow.errors import EnvironmentConfigError

_LIMIT_S = 600.0
"""Seconds of a part of a task without `timeout_sec`."""

_NOT_SUPPORTED = {
    "environment": ("gpus", "tpu", "mcp_servers", "healthcheck", "skills_dir"),
    "agent": ("user",),
    "verifier": ("user", "environment"),
}
_NO_EFFECT = ("ARG", "CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL")


@dataclass
class Layout:
    """Pairs of a file or directory and its path in the image, the working directory, and texts NAME=VALUE."""

    files: list[tuple[Path, str]] = field(default_factory=list)
    workdir: str = "/"
    variables: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class HarborTask:
    """A task: what makes its sandbox, what is copied there, limits in seconds, and variables as texts NAME=VALUE."""

    directory: Path
    sandbox: Callable[[], Sandbox]
    layout: Layout
    agent_s: float
    verifier_s: float
    variables: Sequence[str]
    of_verifier: Sequence[str]


def directories_of(directory: str) -> list[Path]:
    """Return the directories of tasks. Raises EnvironmentConfigError if there are none, or if a file is missing."""
    paths = sorted(path.parent for path in Path(directory).expanduser().resolve().glob("*/task.toml"))
    if not paths:
        raise EnvironmentConfigError(f"{directory!r} has no tasks; expected directories in it with a task.toml each.")
    for file in (path / name for path in paths for name in ("instruction.md", "tests/test.sh")):
        if not file.is_file():
            raise EnvironmentConfigError(f"{str(file)!r} does not exist; each task needs it.")
    return paths


def task_of(path: Path, sandbox: str = "local", network: bool = False, skip: str = "") -> HarborTask:
    """Return the task of a directory. Raises EnvironmentConfigError for one that the sandbox cannot serve."""
    try:
        settings = tomllib.loads((path / "task.toml").read_text("utf-8"))
    except ValueError as error:
        raise EnvironmentConfigError(f"{str(path / 'task.toml')!r} cannot be read: {error}") from error
    environment, agent, verifier = (settings.get(name, {}) for name in ("environment", "agent", "verifier"))
    used = [f"{part}.{key}" for part, keys in _NOT_SUPPORTED.items() for key in keys if settings.get(part, {}).get(key)]
    used += ["steps"] * ("steps" in settings) + ["environment.os"] * (environment.get("os", "linux") != "linux")
    used += ["docker-compose.yaml"] * (path / "environment/docker-compose.yaml").exists()
    variables, of_verifier = (
        [f"{key}={value}" for key, value in part.get("env", {}).items()] for part in (environment, verifier)
    )
    used += [f"env {each}" for each in variables + of_verifier if "${" in each]
    if used:
        raise EnvironmentConfigError(
            f"the task {str(path)!r} has {', '.join(used)}, which is not supported; remove it."
        )
    agent_s, verifier_s = (float(part.get("timeout_sec") or _LIMIT_S) for part in (agent, verifier))
    build, context = sandbox_of(str(sandbox)), path / "environment"
    if build is LocalSandbox:
        if network or any(path.is_relative_to(each) for each in READABLE):
            problem = "network=true" if network else f"tests that it can read, below {str(path)!r}"
            raise EnvironmentConfigError(f"a local sandbox does not support {problem}; use sandbox=docker.")
        layout = _layout_of(context, str(skip).upper().split(","))
        return HarborTask(
            path, partial(build, layout.workdir), layout, agent_s, verifier_s, layout.variables + variables, of_verifier
        )
    memory = f"{environment['memory_mb']}m" if environment.get("memory_mb") else environment.get("memory", "").lower()
    asked = {"--memory": memory, "--cpus": environment.get("cpus")}
    flags = [str(word) for flag, value in asked.items() if value for word in (flag, value)]
    image = {"image": environment["docker_image"]} if environment.get("docker_image") else {"context": context}
    made = partial(build, **image, network=network, options=flags)
    return HarborTask(path, made, Layout(), agent_s, verifier_s, variables, of_verifier)


def _layout_of(context: Path, skip: Sequence[str]) -> Layout:
    """Return what FROM, WORKDIR, ENV and COPY say in a directory's Dockerfile, without the instructions `skip`.

    Raises EnvironmentConfigError for other instructions, and for forms of these that need a build.
    """
    path, layout, has_base = context / "Dockerfile", Layout(), False
    if not path.is_file():
        raise EnvironmentConfigError(
            f"{str(path)!r} does not exist, which a local sandbox follows; use sandbox=docker."
        )
    text = re.sub(r"^\s*#.*\n", "", path.read_text("utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        name = name.upper()
        if name in _NO_EFFECT or name in skip:
            continue
        try:
            words = json.loads(rest) if rest.strip().startswith("[") else shlex.split(rest)
        except ValueError:
            words = []
        words = [word for word in words if not word.startswith("--chown=")]
        needs_build = "$" in rest or not words or words[0].startswith("--")
        if name == "FROM" and words and not has_base:
            has_base = True
        elif name == "WORKDIR" and not needs_build:
            layout.workdir = posixpath.normpath(posixpath.join(layout.workdir, words[0]))
        elif name == "ENV" and not needs_build and all("=" in word for word in words):
            layout.variables += words
        elif name == "COPY" and not needs_build and len(words) > 1:
            _copy(layout, context, words[:-1], words[-1], line)
        else:
            raise EnvironmentConfigError(
                f"{str(path)!r} has `{line[:80]}`, and a local sandbox builds no image; use sandbox=docker, or add "
                f"skip={name} to leave such lines out, if the programs of this machine are enough."
            )
    return layout


def _copy(layout: Layout, context: Path, sources: Sequence[str], target: str, line: str) -> None:
    names = [posixpath.normpath(each.lstrip("/") or ".") for each in sources]
    found = [path for name in names for path in ([context] if name == "." else sorted(context.glob(name)))]
    if not found or not all(path.resolve().is_relative_to(context) for path in found):
        raise EnvironmentConfigError(
            f"`{line[:80]}` in {str(context / 'Dockerfile')!r} copies no file of this directory."
        )
    place = posixpath.normpath(posixpath.join(layout.workdir, target))
    is_directory = len(found) > 1 or target.endswith("/") or place in ("/", layout.workdir)
    for path in found:
        layout.files.append((path, posixpath.join(place, path.name) if is_directory and path.is_file() else place))
