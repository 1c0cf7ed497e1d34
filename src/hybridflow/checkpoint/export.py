"""Trained weights as a Hugging Face model directory."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from hybridflow.checkpoint.disk_space import describe_bytes
from hybridflow.checkpoint.partial_directory import partial_directory, remove_leftovers
from hybridflow.checkpoint.store import Checkpoint, open_checkpoint
from hybridflow.errors import CheckpointError, ModelError

EXPORT_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

_COPIED = (
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.tiktoken", "chat_template*"),
)


def export_model(
    source: str | Path | Checkpoint | Mapping[str, Tensor],
    model_dir: str | Path,
    out_dir: str | Path,
    *,
    dtype: str | None = None,
) -> None:
    """Write `out_dir` so that `AutoModelForCausalLM.from_pretrained(out_dir)` gives the trained model.

    `source` is a checkpoint or its directory, whose component `actor` holds the weights under "model", or the weights
    by parameter name, tied ones once. Configuration, generation configuration and tokenizer come from `model_dir`, the
    directory that training started from; no code of it is executed. `dtype` is a name of EXPORT_DTYPES, or None for
    the dtype the weights have. `out_dir` appears whole or not at all; it may not exist, or be empty.

    Raises CheckpointError if `out_dir` is taken or cannot be written, or the weights do not fit; ModelError if
    `model_dir` is no model directory.
    """
    model_dir, out_dir = Path(model_dir), Path(out_dir)
    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise CheckpointError(f"dtype={dtype!r} is unknown; use {', '.join(EXPORT_DTYPES)}.")
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise CheckpointError(f"'{out_dir}' exists and is not an empty directory; give a new one, or remove it first.")
    model = _model_without_weights(model_dir)
    _set_weights(model, _weights_of(source), EXPORT_DTYPES.get(dtype or ""))
    try:
        remove_leftovers(out_dir.parent, re.compile(re.escape(out_dir.name)))
        with partial_directory(out_dir) as partial:
            model.save_pretrained(partial)
            _copy_tokenizer(model_dir, partial)
    except (OSError, SafetensorError) as error:
        needed = describe_bytes(sum(weight.numel() * weight.element_size() for weight in model.parameters()))
        raise CheckpointError(f"'{out_dir}' was not written ({needed} of weights): {error}") from error


def _weights_of(source: str | Path | Checkpoint | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if isinstance(source, Mapping):
        return source
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    return checkpoint.load("actor", "model")


def _model_without_weights(model_dir: Path) -> Any:
    # Here, so that whoever saves checkpoints does not wait for it.
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if not (model_dir / "config.json").is_file():
        raise ModelError(
            f"'{model_dir}' is no model directory: config.json is missing. Give the one that training started from."
        )
    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"'{model_dir}' cannot be built as a causal language model: {error}") from error
    model.tie_weights()
    return model


def _set_weights(model: Any, weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    expected = dict(model.named_parameters())
    missing = sorted(expected.keys() - weights.keys())
    unknown = sorted(weights.keys() - model.state_dict().keys())
    wrong = sorted(name for name in expected.keys() & weights.keys() if expected[name].shape != weights[name].shape)
    if missing or unknown or wrong:
        shapes = [f"{name} {tuple(weights[name].shape)} instead of {tuple(expected[name].shape)}" for name in wrong]
        parts = {"missing": missing, "unknown": unknown, "of another shape": shapes}
        listed = "; ".join(f"{len(names)} {what} ({', '.join(names[:3])})" for what, names in parts.items() if names)
        raise CheckpointError(
            f"the weights do not fit the {type(model).__name__} of the model directory: {listed}. "
            "Give the directory that training started from."
        )
    own = {name: weights[name] if dtype is None else weights[name].to(dtype) for name in expected}
    model.load_state_dict(own, strict=False, assign=True)
    model.tie_weights()
    model.config.dtype = next(iter(own.values())).dtype


def _copy_tokenizer(model_dir: Path, out_dir: Path) -> None:
    for pattern in _COPIED:
        for path in model_dir.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, out_dir / path.name)
            elif path.is_dir():
                shutil.copytree(path, out_dir / path.name)
