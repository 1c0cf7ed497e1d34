"""Checks of the model directories that a configuration names, before anything slow starts."""

from pathlib import Path

from hybridflow.errors import ModelConfigError


def require_model_directory(key: str, path: str) -> None:
    """Raise ModelConfigError unless `path`, the value of `key`, is a directory with a config.json."""
    if not (Path(path) / "config.json").is_file():
        raise ModelConfigError(
            f"{key}='{path}' is not a model directory: config.json not found; give a local Hugging Face directory (a "
            f"relative path starts at '{Path.cwd()}'), or a model on the hub, as in Qwen/Qwen2.5-0.5B-Instruct."
        )
