"""Checks of the model directories that a configuration names, before anything slow starts."""

import re
from pathlib import Path

from hybridflow.errors import ModelConfigError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""A name on the Hugging Face hub, such as Qwen/Qwen2.5-0.5B-Instruct."""

LOCAL = Path("models")
"""The directory of downloaded models in the documentation and in recipes; not an owner of models on the hub."""


def require_model_directory(key: str, path: str) -> None:
    """Raise ModelConfigError unless `path`, the value of `key`, is a directory with a config.json."""
    directory = Path(path)
    if (directory / "config.json").is_file():
        return
    if HUB_ID.fullmatch(path) and not directory.parent.exists() and directory.parent != LOCAL:
        local = LOCAL / directory.name
        raise ModelConfigError(
            f"{key}='{path}' is not a directory here (a relative path starts at '{Path.cwd()}'), and hybridflow does "
            f"not download models; run `hf download {path} --local-dir {local}`, then set {key}={local}."
        )
    raise ModelConfigError(
        f"{key}='{path}' is not a model directory: config.json not found; give a local Hugging Face directory (models "
        f"are not downloaded; a relative path starts at '{Path.cwd()}')."
    )
