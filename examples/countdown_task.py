"""The task of the demo: countdown with three numbers, for a model small enough to train on a laptop.

A problem has three numbers and a target; the answer uses each number once, with + and -. A response is a list of
trials, each a running sum and whether it is the target, and an answer:

    prompt    12 5 3 => 10 :
    response  12 + 5 = 17 - 3 = 14 no 12 + 3 = 15 - 5 = 10 yes <answer> 12 + 3 - 5 </answer>

This file creates everything that the demo needs: problems, a tokenizer with one token per number, a model with random
weights, and demonstrations that give up early.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from hybridflow.data import prompt_row, write_prompt_file, write_sft_file

LARGEST = 15
GIVES_UP = 0.6
"""Probability that a demonstration stops after a wrong first trial and answers with it."""
OVERLOOKS = 0.1
"""Probability that a demonstration continues after a right trial."""
SIGNS = [(1, 1, 1), (1, 1, -1), (1, -1, 1), (1, -1, -1), (-1, 1, 1)]
"""The signs of three descending numbers whose sum can be a positive target."""


@dataclass(frozen=True)
class Problem:
    """Descending numbers, and the target of their signed sum."""

    numbers: tuple[int, ...]
    target: int

    @property
    def prompt(self) -> str:
        return " ".join(map(str, self.numbers)) + f" => {self.target} :"


def draw_problems(
    count: int, multisets: Sequence[tuple[int, ...]], rng: random.Random, *, distinct: bool = False
) -> list[Problem]:
    """Draw problems with a positive target, evenly over the signs of the numbers."""
    problems: list[Problem] = []
    seen: set[Problem] = set()
    for _ in range(100 * count):
        numbers = sorted(rng.choice(multisets), reverse=True)
        problem = Problem(tuple(numbers), signed_sum(numbers, rng.choice(SIGNS)))
        if problem.target > 0 and not (distinct and problem in seen):
            problems.append(problem)
            seen.add(problem)
        if len(problems) == count:
            return problems
    raise ValueError(f"count={count} is invalid: {len(multisets)} multisets have fewer problems; use a smaller count.")


def split_multisets(rng: random.Random, test_share: float = 0.3) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Split all multisets of three numbers into (training, test)."""
    multisets = list(itertools.combinations_with_replacement(range(1, LARGEST + 1), 3))
    rng.shuffle(multisets)
    num_test = round(test_share * len(multisets))
    return multisets[num_test:], multisets[:num_test]


def signed_sum(numbers: Sequence[int], signs: Sequence[int]) -> int:
    return sum(number * sign for number, sign in zip(numbers, signs, strict=True))


def expression(numbers: Sequence[int], signs: Sequence[int]) -> list[str]:
    """Return the sum as words, positive terms first: (17, 5, 3), (-1, 1, 1) is 5 + 3 - 17."""
    plus = [str(number) for number, sign in zip(numbers, signs, strict=True) if sign > 0]
    minus = [str(number) for number, sign in zip(numbers, signs, strict=True) if sign < 0]
    return " + ".join(plus).split() + [word for number in minus for word in ("-", number)]


def trial(words: Sequence[str]) -> list[str]:
    """Write the sum with its partial sums: 17 - 3 - 5 becomes 17 - 3 = 14 - 5 = 9."""
    total, written = int(words[0]), [words[0]]
    for sign, number in zip(words[1::2], words[2::2], strict=True):
        total += int(number) if sign == "+" else -int(number)
        written += [sign, number, "=", str(total)]
    return written


def demonstration(problem: Problem, rng: random.Random) -> str:
    """Write trials in random order until one is right; most demonstrations give up after a wrong first one."""
    words: list[str] = []
    for signs in rng.sample(SIGNS, len(SIGNS)):
        first = not words
        answer = expression(problem.numbers, signs)
        hit = signed_sum(problem.numbers, signs) == problem.target
        words += [*trial(answer), "yes" if hit else "no"]
        if rng.random() < (1 - OVERLOOKS if hit else GIVES_UP if first else 0.0):
            break
    return " ".join([*words, "<answer>", *answer, "</answer>"])


def write_data(directory: Path, *, num_examples: int, num_train: int, num_test: int, seed: int) -> None:
    """Write demonstrations (`sft.parquet`) and problems (`train.parquet`, `test.parquet`).

    No multiset of numbers in the test file is in another file.
    """
    rng = random.Random(seed)
    training, held_out = split_multisets(rng)
    examples = [(p.prompt, demonstration(p, rng)) for p in draw_problems(num_examples, training, rng)]
    write_sft_file(directory / "sft.parquet", examples)
    for split, count, multisets in (("train", num_train, training), ("test", num_test, held_out)):
        rows = [
            prompt_row(
                data_source="countdown",
                prompt=problem.prompt,
                ground_truth={"target": problem.target, "numbers": list(problem.numbers)},
                split=split,
                index=index,
            )
            for index, problem in enumerate(draw_problems(count, multisets, rng, distinct=split == "test"))
        ]
        write_prompt_file(directory / f"{split}.parquet", rows)


def write_model(directory: Path, *, seed: int, width: int = 256, layers: int = 3, heads: int = 8) -> int:
    """Write a word-level tokenizer and a Llama model with random weights; return its number of parameters."""
    disable_progress_bar()
    specials = ["<pad>", "<eos>", "<unk>"]
    numbers = [str(number) for number in range(-2 * LARGEST, 3 * LARGEST + 1)]
    words = [*specials, "+", "-", "=", "yes", "no", "=>", ":", "<answer>", "</answer>", *numbers]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(directory)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=256,
            initializer_range=0.06,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=words.index("<eos>"),
            pad_token_id=words.index("<pad>"),
        )
    )
    model.save_pretrained(directory)
    return model.num_parameters()
