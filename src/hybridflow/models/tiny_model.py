"""A random Llama model of some thousand weights with a tokenizer of given tokens, made on the spot."""

from collections.abc import Sequence
from pathlib import Path

WORDS = tuple("abcdefgh")


def write_model(
    directory: Path, tokens: Sequence[str] = WORDS, *, by_characters: bool = False, width: int = 32, layers: int = 1
) -> None:
    """Write the model and its tokenizer, which splits texts at spaces, or `by_characters`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    vocabulary = ("<unk>", "<eos>", *tokens)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=len(vocabulary),
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    numbers = {token: i for i, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=vocabulary[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if by_characters:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
    unknown, end = vocabulary[:2]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown, eos_token=end, pad_token=end)
    fast.save_pretrained(directory)
