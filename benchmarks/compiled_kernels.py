"""The compiled CPU kernels against PyTorch's, and prompts shared in training against repeated prompts.

  product    a linear layer on packed weights, against oneDNN's on weights in its own layout (which PyTorch's compiled
             graphs call), for few rows
  attention  causal attention of packed sequences and its backward pass, against PyTorch's, by length
  prompts    one update on groups of 8 responses, with the prompt computed once per group, against once per response

All in one process, sides in turn, medians; a few minutes on two idle cores.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from support.arguments import parser_of
from support.models import MODELS, write_model
from support.program import run
from support.report import Row, print_rows, print_table

from hybridflow.config import MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.engines import TorchEngine
from hybridflow.models.attention import run_attention
from hybridflow.models.attention_form import AttentionForm
from hybridflow.models.kernels.attention import causal_attention
from hybridflow.models.kernels.decoder import PackedLinear
from hybridflow.protocol import DataProto
from hybridflow.runtime.allocator import keep_freed_memory
from hybridflow.runtime.threads import count_physical_cores, set_num_threads

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ROWS = (1, 4, 26, 64, 256)
PRODUCTS = ((256, 768), (256, 1536), (768, 256), (768, 4608))
"""Inputs and outputs of linear layers of the measured models."""
LENGTHS = (38, 128, 256, 384, 512, 768, 1024)
ATTENTION_TOKENS, HEADS, HEAD_DIM = 9728, 4, 64
GROUPS = ((32, 6, 32), (16, 64, 64), (6, 200, 100), (2, 300, 300), (1, 1000, 200))
"""Prompts, tokens of a prompt, tokens of a response."""
GROUP_SIZE = 8
SIZES: dict[str, Any] = {"rows": ROWS, "products": PRODUCTS, "lengths": LENGTHS, "tokens": ATTENTION_TOKENS}
SIZES |= {"groups": GROUPS}
TINY: dict[str, Any] = {"rows": (2,), "products": PRODUCTS[:1], "lengths": (16,), "tokens": 64, "groups": ((1, 4, 4),)}
"""SIZES of a smoke run."""
MIN_SECONDS = 0.02
"""A measurement repeats shorter calls until they take about this long."""


def main() -> None:
    parser = parser_of(__doc__, smoke={"repeats": 1, **TINY})
    parser.set_defaults(**SIZES)
    args = parser.parse_args()
    keep_freed_memory()
    threads = set_num_threads(args.threads or count_physical_cores())
    print(f"threads: {threads}; torch {torch.__version__}", flush=True)
    rows = []
    for name, dtype in DTYPES.items():
        rows += measure_products(name, dtype, args)
        rows += measure_attention(name, dtype, args)
        rows += measure_prompts(name, args)
    print_rows("compiled_kernels", rows, smoke=args.smoke)


@torch.no_grad()
def measure_products(name: str, dtype: torch.dtype, args: argparse.Namespace) -> list[Row]:
    """Return the microseconds of linear layers."""
    mkldnn: Any = torch.ops.mkldnn
    rows = []
    for num_rows in args.rows:
        for inputs, outputs in args.products:
            x, weight = torch.randn(num_rows, inputs, dtype=dtype), torch.randn(outputs, inputs, dtype=dtype)
            ours, packed = PackedLinear([weight], [None]), mkldnn._reorder_linear_weight(weight, None)
            theirs = partial(mkldnn._linear_pointwise, x, packed, None, "none", [], "")
            seconds = in_turn([partial(ours, x), theirs], args.repeats)
            rows.append(row_of(f"product_{name}_{num_rows}x{inputs}x{outputs}", "us", 1e6, seconds))
    show(f"a linear layer in {name}: rows x in x out", "microseconds", "packed", "oneDNN", rows)
    return rows


def measure_attention(name: str, dtype: torch.dtype, args: argparse.Namespace) -> list[Row]:
    """Return the milliseconds of a forward and backward pass over about `args.tokens` tokens."""
    rows = []
    for length in args.lengths:
        count = args.tokens // length
        shape = (count * length, HEADS, HEAD_DIM)
        inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
        gradient = torch.randn(shape, dtype=dtype)
        sides = [
            partial(attend, inputs, gradient, causal_attention, [[length]] * count, HEAD_DIM**-0.5),
            partial(attend, inputs, gradient, run_attention, count, length, AttentionForm(HEAD_DIM**-0.5)),
        ]
        rows.append(row_of(f"attention_{name}_{count}x{length}", "ms", 1e3, in_turn(sides, args.repeats)))
    show(f"attention in {name}: sequences x tokens", "milliseconds", "compiled", "PyTorch", rows)
    return rows


def attend(inputs: Sequence[torch.Tensor], gradient: torch.Tensor, function: Callable[..., Any], *more: Any) -> None:
    """Run the forward and the backward pass of an attention function."""
    torch.autograd.grad(function(*inputs, *more), inputs, gradient)


def measure_prompts(name: str, args: argparse.Namespace) -> list[Row]:
    """Return the seconds of updates of the small model."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory))
        write_model(Path(directory), "small")
        for prompts, prompt_len, response_len in args.groups:
            batch = groups_of(prompts, prompt_len, response_len)
            engines = [
                TorchEngine(
                    path,
                    "policy",
                    model=ModelConfig(path=path, dtype=name),
                    memory=MemoryConfig(max_tokens_per_micro_batch=32768, share_prompts=share_prompts),
                    optimizer=OptimizerConfig(lr=1e-6),
                )
                for share_prompts in (True, False)
            ]
            seconds = in_turn([partial(engine.update, batch, mean_log_prob) for engine in engines], args.repeats)
            rows.append(row_of(f"prompts_{name}_{prompts}x({prompt_len}+8x{response_len})", "s", 1.0, seconds))
    show(f"an update in {name}: prompts x (prompt + responses)", "seconds", "shared", "repeated", rows)
    return rows


def groups_of(prompts: int, prompt_len: int, response_len: int) -> DataProto:
    """Build random rows, GROUP_SIZE for each prompt."""
    generator, vocabulary = torch.Generator().manual_seed(0), MODELS["small"]["vocab_size"]
    of_prompts = torch.randint(1, vocabulary, (prompts, prompt_len), generator=generator)
    responses = torch.randint(1, vocabulary, (prompts * GROUP_SIZE, response_len), generator=generator)
    ids = torch.cat([of_prompts.repeat_interleave(GROUP_SIZE, 0), responses], dim=1)
    mask = torch.ones(len(ids), response_len, dtype=torch.bool)
    return DataProto.from_dict({"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": mask})


def mean_log_prob(outputs: dict[str, torch.Tensor], part: DataProto) -> tuple[torch.Tensor, dict[str, float]]:
    """Return a loss that costs nothing compared with the model."""
    return outputs["log_probs"].mean() * len(part) / 1000, {}


def in_turn(sides: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Return the median seconds of a call of each side; a warm-up round sets the number of calls per measurement."""
    calls = []
    for side in sides:
        side()
        start = time.perf_counter()
        side()
        calls.append(max(1, round(MIN_SECONDS / (time.perf_counter() - start))))
    seconds: list[list[float]] = [[] for _ in sides]
    for number in range(repeats):
        order = list(enumerate(sides))
        for index, side in order if number % 2 else reversed(order):
            start = time.perf_counter()
            for _ in range(calls[index]):
                side()
            seconds[index].append((time.perf_counter() - start) / calls[index])
    return [median(values) for values in seconds]


def row_of(name: str, unit: str, scale: float, seconds: Sequence[float]) -> Row:
    """Build the row of (our, PyTorch's) seconds."""
    ours, theirs = seconds
    return Row(name, unit, ours * scale, theirs * scale, None, theirs / ours)


def show(title: str, unit: str, ours: str, theirs: str, rows: Sequence[Row]) -> None:
    """Print the rows of one measurement as soon as it is finished."""
    lines = [(row.name.split("_")[-1], f"{row.ours:.4g}", f"{row.peer:.4g}", f"{row.ratio:.2f}") for row in rows]
    print_table(f"{title} ({unit})", ("", ours, theirs, "ratio"), lines)


if __name__ == "__main__":
    run(main)
