"""The paths of a run's configuration, relative to the directory in which the run was started."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from hybridflow.config import leaf_keys, load_config
from hybridflow.config.environment_sources import scheme_of
from hybridflow.config.keys import DIRECTORIES, FILES, PROMPT_FILE
from hybridflow.config.render import toml_value

FUNCTIONS = ("reward.function", "data.map", "data.order", "algorithm.advantage", "actor.policy_loss")
"""Keys whose value may be 'path.py:function'."""

TRACKERS = "trainer.trackers"
"""Key of a list of names, each of which may be 'path.py:class'."""

ON_HUB = re.compile(r"hf://|[\w.-]+/[\w.-]+@[0-9a-f]{40}$")
"""A file or model on the Hugging Face hub, as a run records it: with the exact revision."""

CLASSES = "environment.classes"
"""Key of sources by name, which may be 'path.py:Class' or 'harbor:DIR'."""


def absolute_paths(config_file: Path, overrides: Sequence[str] = (), start: int = -1) -> list[str]:
    """Return `key=value` for each relative path of a run's config.toml with overrides, made absolute.

    A path is relative to the directory that a start of the run, by default the newest, recorded in run.json. If that
    directory no longer exists, or if an older version wrote run.json, the paths stay as they are.
    """
    directory = _start_directory(config_file.parent, start)
    if directory is None:
        return []
    values = leaf_keys(load_config(config_file, overrides))
    absolute: dict[str, object] = {key: _absolute(str(values[key]), directory) for key in DIRECTORIES if values[key]}
    for key in FILES:
        files = values[key]
        assert isinstance(files, tuple)
        absolute[key] = tuple(_absolute(file, directory) for file in files)
    for key in FUNCTIONS:
        absolute[key] = _absolute_function(str(values[key]), directory)
    trackers = values[TRACKERS]
    assert isinstance(trackers, tuple)
    absolute[TRACKERS] = tuple(_absolute_function(name, directory) for name in trackers)
    classes = values[CLASSES]
    assert isinstance(classes, dict)
    absolute[CLASSES] = {name: _absolute_source(source, directory) for name, source in classes.items()}
    kwargs = values["reward.kwargs"]
    assert isinstance(kwargs, dict)
    if PROMPT_FILE in kwargs:
        absolute["reward.kwargs"] = {**kwargs, PROMPT_FILE: _absolute(str(kwargs[PROMPT_FILE]), directory)}
    return [f"{key}={toml_value(value)}" for key, value in absolute.items() if value != values[key]]


def _start_directory(run: Path, start: int) -> Path | None:
    """Return the working directory of a start that is in run.json; None if it is not recorded or is gone."""
    try:
        file = run / "run.json"
        if not file.is_file():  # a pipe would be waited for
            return None
        directory = Path(json.loads(file.read_text(encoding="utf-8"))["starts"][start]["directory"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return directory if directory.is_dir() else None


def _absolute_function(name: str, directory: Path) -> str:
    """Return 'path.py:function' with an absolute path, any other name as it is."""
    source, colon, function = name.rpartition(":")
    return f"{_absolute(source, directory)}{colon}{function}" if source.endswith(".py") else name


def _absolute_source(source: str, directory: Path) -> str:
    """Return a source of an environment with absolute paths of files; a command stays as it is."""
    if scheme_of(source) != "harbor":
        return source if scheme_of(source) else _absolute_function(source, directory)
    tasks, mark, options = source.removeprefix("harbor:").partition("?")
    options = re.sub(r"(?<=sandbox=)[^&]*", lambda sandbox: _absolute_function(sandbox[0], directory), options)
    return f"harbor:{_absolute(tasks, directory)}{mark}{options}"


def _absolute(path: str, directory: Path) -> str:
    if ON_HUB.match(path):
        return path
    return os.path.normpath(directory / os.path.expanduser(path))
