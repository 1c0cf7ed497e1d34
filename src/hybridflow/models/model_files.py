"""Checks of the files of a model directory before any library reads them: what a file says is not yet trusted."""

import json
from collections.abc import Collection
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from hybridflow.errors import ModelError
from hybridflow.models.config_values import problems
from hybridflow.models.quantized_weights import quantized_form
from hybridflow.runtime.plain_files import require_model_files

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

FLOATS = ("F64", "F32", "F16", "BF16")
"""Stored dtypes that are weights; others are those of a quantized model."""

MASK_DIMS = 4
"""Dimensions of a causal mask, which old files have beside the weights, such as those of GPT-2 and Pythia."""

LOADING_ERRORS = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RuntimeError),
    *(SafetensorError, StrictDataclassError),
)
"""Errors that transformers and safetensors raise for directories that they cannot read."""


def require_sound_config(path: str | Path) -> None:
    """Raise ModelError if the values of config.json cannot be those of a model that this version of ours trains.

    A file that is not JSON is left to the library, which reports it; one that is not a regular file never reaches it.
    """
    try:
        require_model_files(path)
    except OSError as error:
        raise ModelError(f"the model in '{path}' cannot be read: {error}.") from error
    quantized_form(path)
    try:
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return
    problem = next(problems(config), None)
    if problem:
        raise ModelError(f"'{path}': config.json: {problem}; copy the file from the model's original directory.")


def weight_files(path: str | Path) -> list[Path]:
    """Return the files of a directory's weights.

    Raises ValueError for an index that does not list file names, and for a name that is a folder, pipe or device.
    """
    directory = Path(path)
    files = [directory / name for name in _listed(directory)] if (directory / INDEX).is_file() else [directory / SINGLE]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file.name} is not a regular file" if file.exists() else f"no file named {file.name}")
    return files


def _listed(directory: Path) -> list[str]:
    document = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    listed = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{INDEX} has no weight_map, a table from a weight to its file")
    for name in listed.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{INDEX} lists {name!r}, which is not a file of the directory")
    return sorted(set(listed.values()))


def require_sound_weights(path: str | Path, *, is_tied: bool, quantized: Collection[str] = ()) -> None:
    """Raise ModelError for weights that would load as those of another model, and ValueError as `weight_files`.

    Those are integers, which would be cast to float, unless they are `quantized`; a weight in two files, of which one
    would be ignored; and with `is_tied` a head that differs from the embedding, which would replace it.
    """
    file_of: dict[str, Path] = {}
    for file in weight_files(path):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                if name in file_of:
                    raise ModelError(
                        f"'{path}': {name} is in {file_of[name].name} and in {file.name}; the files are of different "
                        "models, copy them again."
                    )
                file_of[name] = file
                found = stored.get_slice(name)
                if name in quantized:
                    continue
                if (dtype := found.get_dtype()) not in FLOATS and len(found.get_shape()) != MASK_DIMS:
                    raise ModelError(
                        f"'{path}': {name} in {file.name} is stored as {dtype}, not as one of {', '.join(FLOATS)}: the "
                        "model is quantized or damaged, or lacks scales; use the original weights."
                    )
    ends = [[name for name in file_of if name.endswith(end)] for end in ("embed_tokens.weight", "lm_head.weight")]
    if is_tied and all(len(names) == 1 for names in ends):
        embedding, head = (_read(file_of[name], name) for (name,) in ends)
        if not torch.equal(embedding, head):
            raise ModelError(
                f"'{path}': lm_head.weight differs from the embedding, but config.json has tie_word_embeddings=true, "
                "by which the head is the embedding; set it to false, or copy both files again."
            )


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as stored:
        return stored.get_tensor(name)


def require_finite(path: str | Path, name: str, weight: torch.Tensor) -> None:
    """Raise ModelError if a loaded weight has a NaN or an infinity."""
    if weight.numel() and not torch.isfinite(torch.stack(weight.detach().aminmax())).all():
        raise ModelError(
            f"'{path}': {name} has NaN or infinity as {weight.dtype}; the file is damaged or holds numbers beyond that "
            "type, copy it again or set model.dtype."
        )
