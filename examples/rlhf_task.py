"""A task that is learned from preferences only: write the digits of the prompt in ascending order.

No training data marks an answer as right. Demonstrations write the digits in any order; a preference pair has a
better response in ascending order and a worse one with a mistake.
"""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUM_DIGITS = 4
END = ":"


def is_ascending(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """Return 1.0 if the response is the digits of the prompt in ascending order, else 0.0. Training never uses it."""
    return float(solution_str.split() == str(ground_truth).split())


def draw_prompt(rng: random.Random) -> list[str]:
    """Draw different digits in random order."""
    return rng.sample("0123456789", NUM_DIGITS)


def worse_response(digits: list[str], rng: random.Random) -> list[str]:
    """Return the digits in another order, or with a wrong digit: a reward model must learn both mistakes."""
    worse = list(digits)
    if rng.random() < 0.5:
        worse[rng.randrange(NUM_DIGITS)] = rng.choice(sorted(set("0123456789") - set(digits)))
    if worse != digits and rng.random() < 0.8:
        return sorted(worse)
    while worse == sorted(digits):
        rng.shuffle(worse)
    return worse


def prompt_text(digits: list[str]) -> str:
    """Return the prompt of some digits."""
    return " ".join([*digits, END])


def write_data(directory: Path, *, num_demonstrations: int, num_pairs: int, num_prompts: int, num_test: int) -> None:
    """Write `sft`, `pairs`, `test_pairs`, `prompts` and `test` (.parquet) to a directory."""
    from hybridflow.data import prompt_row, write_preference_file, write_prompt_file, write_sft_file

    rng = random.Random(0)
    demonstrations = []
    for _ in range(num_demonstrations):
        digits = draw_prompt(rng)
        demonstrations.append((prompt_text(digits), " ".join(rng.sample(digits, NUM_DIGITS))))
    write_sft_file(directory / "sft.parquet", demonstrations)
    for name, count in (("pairs", num_pairs), ("test_pairs", num_test)):
        pairs = []
        for _ in range(count):
            digits = draw_prompt(rng)
            pairs.append((prompt_text(digits), " ".join(sorted(digits)), " ".join(worse_response(digits, rng))))
        write_preference_file(directory / f"{name}.parquet", pairs)
    for name, count in (("prompts", num_prompts), ("test", num_test)):
        rows = []
        for index in range(count):
            digits = draw_prompt(rng)
            truth = " ".join(sorted(digits))
            rows.append(
                prompt_row(
                    data_source="ascending", prompt=prompt_text(digits), ground_truth=truth, split=name, index=index
                )
            )
        write_prompt_file(directory / f"{name}.parquet", rows)


def write_model(directory: Path, *, width: int = 64, layers: int = 2, heads: int = 4) -> int:
    """Write a digit tokenizer and a Llama model with random weights; return its number of parameters."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    words = ["<pad>", "<eos>", "<unk>", END, *"0123456789"]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(directory)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=64,
            initializer_range=0.06,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    model.save_pretrained(directory)
    return model.num_parameters()
