"""The measured models: random Llamas, written once for all sides, and a tokenizer for the small one."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

MODELS: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 83,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "100M": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "135M": {  # the sizes of SmolLM2-135M
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "500M": {
        "vocab_size": 32000,
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_hidden_layers": 18,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
}
MAX_POSITIONS = 512


def write_model(directory: Path, name: str) -> int:
    """Write one of MODELS with random float32 weights and return its number of parameters. It has no stop token."""
    disable_progress_bar()
    torch.manual_seed(0)
    model = LlamaForCausalLM(_config_of(name))
    model.save_pretrained(directory)
    return model.num_parameters()


def write_config(directory: Path, name: str) -> None:
    """Write the configuration of one of MODELS, without weights."""
    config = _config_of(name)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)


def _config_of(name: str) -> LlamaConfig:
    return LlamaConfig(
        **MODELS[name],
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a tokenizer in which the word of a token is its id as a decimal number; 0 is the padding token.

    A tokenizer must have an EOS token; its id here is beyond the model's vocabulary, so that it is never sampled.
    """
    words = {"<pad>": 0, **{str(token): token for token in range(1, vocab_size)}, "<eos>": vocab_size}
    tokenizer = Tokenizer(WordLevel(words))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(directory)
