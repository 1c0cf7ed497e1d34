"""Models of the sizes that people train on one GPU, those of Qwen2.5, with random weights, written on the spot."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from hybridflow.models.model_sizes import DecoderShape, ModelSizes, decoder_shape, model_sizes
from hybridflow.runtime.device import own_device

_QWEN2 = {"vocab_size": 151936, "max_position_embeddings": 8192, "tie_word_embeddings": True, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "0.5B": _QWEN2
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": _QWEN2
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7B": _QWEN2
    | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
}
TINY = _QWEN2 | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4}


def write_sized_model(directory: Path, name: str, *, tiny: bool, family: str = "Qwen2") -> None:
    """Write a model with random bfloat16 weights and no stop token; `tiny` writes TINY in its place.

    `family`: Qwen2, or Llama, whose directories may have a tokenizer of `write_tokenizer`.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **(TINY if tiny else MODELS[name]), eos_token_id=None, bos_token_id=None, pad_token_id=None
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(own_device()):  # a GPU draws 1.5B random numbers in a second
            model = getattr(transformers, f"{family}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(directory)


def model_directory(root: str, name: str, *, tiny: bool) -> Path:
    """Return the directory of a model, which the first process that needs it writes."""
    path = Path(root) / name
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=root) as unfinished:
            write_sized_model(Path(unfinished) / name, name, tiny=tiny)
            os.rename(Path(unfinished) / name, path)
    return path


def shape_of(path: Path) -> DecoderShape:
    """Return the sizes of a model of this file."""
    shape = decoder_shape(path)
    assert shape is not None, "a Qwen2 has a known shape"
    return shape


def sizes_of(path: Path) -> ModelSizes:
    """Return the sizes and the numbers of parameters of a model of this file."""
    sizes = model_sizes(path)
    assert sizes is not None, "Qwen2 has a fused pass"
    return sizes


def heads_of(name: str) -> tuple[int, int, int]:
    """Return the numbers of query heads and of key-value heads, and their dimension."""
    config = MODELS[name]
    heads = config["num_attention_heads"]
    return heads, config["num_key_value_heads"], config["hidden_size"] // heads
