"""The compute dtype of `model.dtype = "auto"`: chosen for the workers' devices at the first start, kept by the run."""

from pathlib import Path
from typing import get_args

from hybridflow.checkpoint import CheckpointStore
from hybridflow.config import Config, DTypeName
from hybridflow.observability import get_logger
from hybridflow.observability.run_files import read_starts
from hybridflow.runtime import gpu_has_bfloat16
from hybridflow.trainers.groups import build_backend, closing_on_error

logger = get_logger(__name__)


def settle_dtype(config: Config, *, resumes: bool = True) -> Config:
    """Return the configuration with the dtype that model.dtype = "auto" stands for.

    A run that continues from a checkpoint keeps the recorded dtype (unless not `resumes`), also on other devices. Else
    it is bfloat16 if the workers have GPUs that compute in it, otherwise float32. Raises CheckpointError if `run.json`
    is damaged, ConfigError if the configured Ray cluster does not answer.
    """
    if config.model.dtype != "auto":
        return config
    if resumes and (recorded := _recorded_dtype(config)):
        return config.with_dtype(recorded)
    has_bfloat16 = _gpus_have_bfloat16(config)
    if has_bfloat16 is False:
        logger.warning(
            "model.dtype='auto' is float32 here: the GPUs do not compute in bfloat16 (compute capability 8.0 or later "
            "does); float32 is slower and takes twice the memory."
        )
    return config.with_dtype("bfloat16" if has_bfloat16 else "float32")


def _recorded_dtype(config: Config) -> DTypeName | None:
    """Return the dtype of the last start of the run in trainer.run_dir; None if there is no checkpoint to continue."""
    directory = Path(config.trainer.run_dir)
    if not directory.is_dir() or not CheckpointStore(directory / "checkpoints").list():
        return None
    starts = read_starts(directory)
    last = starts[-1] if starts and isinstance(starts[-1], dict) else {}
    recorded = dict(last.get("config") or {}).get("model.dtype")
    return recorded if recorded in get_args(DTypeName) else None


def _gpus_have_bfloat16(config: Config) -> bool | None:
    """Return whether the GPUs of the workers compute in bfloat16; None if the workers have none."""
    if config.controller.backend == "local":
        return gpu_has_bfloat16()
    from hybridflow.controller.ray import RayBackend

    with closing_on_error(build_backend(config)) as backend:
        assert isinstance(backend, RayBackend)
        answer = backend.gpus_have_bfloat16()
        backend.close()
    return answer
