"""The tasks of the demo of episodes: products with a calculator, and a maze, for a model small enough for a laptop.

    user       37 x 482                            user       nearer north east
    assistant  <tool_call>multiply 37 482          assistant  east
    tool       17834                               user       around south west
    assistant  it is 17834                         assistant  south

This file makes everything that the demo needs: a tokenizer with a chat template, a model with random weights,
conversations that mostly answer at once, and problems.
"""

import json
import random
from pathlib import Path
from typing import Any

import torch
from maze import MOVES, draw_maze, open_places, view
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from hybridflow.data import prompt_row, write_prompt_file

CALLS = 0.3
"""Share of the later conversations with a calculator that call it; in the others the model answers at once."""

LOOKS = 0.3
"""Share of the moves in a maze of a player who looks around."""

PIECES = (
    *('{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}", " x ", "tools: ", "multiply", "it is "),
    *("system\n", "user\n", "assistant\n", "tool\n", "nearer", "around", *MOVES, "say a direction"),
)
"""Texts that are one token each; other tokens are single characters, and three digits of a number at a time."""

NUMBERS = tuple(dict.fromkeys([*map(str, range(1000)), *(f"{number:03}" for number in range(100))]))

TEMPLATE = """\
{%- if tools %}<|im_start|>system
tools: {% for tool in tools %}{{ tool.function.name }}{% endfor %}<|im_end|>{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ '{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

Row = dict[str, Any]


def right_answer(a: int, b: int) -> str:
    return f"it is {a * b}"


def calls_calculator(a: int, b: int) -> list[Row]:
    """Return the turns of a model that calls the calculator, and repeats the result."""
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "multiply", "content": str(a * b)},
        {"role": "assistant", "content": right_answer(a, b)},
    ]


def draw_factors(drawn: random.Random) -> tuple[int, int]:
    return drawn.randrange(12, 100), drawn.randrange(102, 1000)


def product_conversation(drawn: random.Random, tools: list[Row], calls: float) -> Row:
    """Return a conversation that calls the calculator with probability `calls`, if it may; others answer at once."""
    a, b = draw_factors(drawn)
    may_call = drawn.random() < max(calls, 0.7)
    at_once = [{"role": "assistant", "content": right_answer(a, b)}]
    said = calls_calculator(a, b) if may_call and drawn.random() < calls else at_once
    return {"messages": [{"role": "user", "content": f"{a} x {b}"}, *said], "tools": tools if may_call else []}


def maze_conversation(drawn: random.Random, turns: int = 6) -> Row:
    """Return the walk of a player who looks around only now and then."""
    walls, here, goal = draw_maze(drawn.randrange(10**6))
    messages: list[Row] = []
    for _ in range(turns):
        _, *seen = view(walls, here, goal).split()
        name = drawn.choice(seen if drawn.random() < LOOKS else list(MOVES))
        messages.append({"role": "user", "content": view(walls, here, goal)})
        messages.append({"role": "assistant", "content": name})
        there = (here[0] + MOVES[name][0], here[1] + MOVES[name][1])
        here = there if there in open_places(walls, here) else here
        if here == goal:
            break
    return {"messages": messages, "tools": []}


def write_data(directory: Path, tools: list[Row], *, num_examples: int, num_train: int, num_test: int) -> None:
    """Write conversations (`sft.jsonl`) and problems: `products`, `products_test`, `mazes`, `mazes_test` (.parquet).

    The first two thirds of the conversations all call the calculator: the model learns to copy numbers. Then most
    answer at once, and some walk through mazes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    drawn = random.Random(0)
    held_out = set()
    while len(held_out) < num_test:
        held_out.add(draw_factors(drawn))
    with (directory / "sft.jsonl").open("w") as file:
        for number in range(num_examples):
            if number < num_examples * 2 / 3:
                row = product_conversation(drawn, tools, calls=1.0)
            elif drawn.random() < 0.5:
                row = product_conversation(drawn, tools, calls=CALLS)
            else:
                row = maze_conversation(drawn)
            file.write(json.dumps(row) + "\n")
    train = []
    while len(train) < num_train:
        factors = draw_factors(drawn)
        if factors not in held_out:
            train.append(factors)
    for name, factors in (("products", train), ("products_test", sorted(held_out))):
        rows = [
            prompt_row(
                data_source="product", prompt=f"{a} x {b}", ground_truth=right_answer(a, b), split=name, index=index
            )
            for index, (a, b) in enumerate(factors)
        ]
        write_prompt_file(directory / f"{name}.parquet", rows)
    for name, first, count in (("mazes", 10**6, num_train), ("mazes_test", 2 * 10**6, num_test)):
        rows = [
            prompt_row(data_source="maze", prompt=f"maze {seed}", ground_truth=str(seed), split=name, index=index)
            for index, seed in enumerate(range(first, first + count))
        ]
        write_prompt_file(directory / f"{name}.parquet", rows)


def write_model(directory: Path, *, seed: int = 0, width: int = 128, layers: int = 3, heads: int = 4) -> int:
    """Write the tokenizer and a Llama model with random weights; return its number of parameters."""
    disable_progress_bar()
    specials = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>"]
    characters = ["\n", *map(chr, range(32, 127))]
    words = list(dict.fromkeys([*specials, *PIECES, *NUMBERS, *characters]))
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    pieces = "|".join(_escaped(piece) for piece in sorted(PIECES, key=len, reverse=True))
    digits = "[0-9]{1,3}(?=([0-9]{3})*(?![0-9]))"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"(?m){pieces}|{digits}|.|\\n"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in ("<tool_call>", "</tool_call>")]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<unk>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=words.index("<|im_end|>"),
        pad_token_id=words.index("<pad>"),
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    return model.num_parameters()


def _escaped(text: str) -> str:
    """Return a text for a regular expression of the library, with all but letters escaped."""
    shown = {"\n": "\\n"}
    return "".join(letter if letter.isalnum() else shown.get(letter, f"\\{letter}") for letter in text)
