"""Models of the sizes that people train on one GPU, those of Qwen2.5, with random weights, written on the spot."""

from pathlib import Path
from typing import Any

import torch

from hybridflow.runtime.device import own_device

_QWEN2 = {"vocab_size": 151936, "max_position_embeddings": 8192, "tie_word_embeddings": True, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "0.5B": _QWEN2
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": _QWEN2
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
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
    with torch.device(own_device()):  # a GPU draws 1.5B random numbers in a second
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.to(torch.bfloat16).save_pretrained(directory)
