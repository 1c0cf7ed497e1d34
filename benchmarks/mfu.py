"""MFU of a training step on a GPU: a Qwen2 of 1.5B parameters, random weights, 4,096 tokens per sequence, bfloat16.

With and without each offload. Each setting runs in its own process; the first step is a warm-up. The peak is that of a
large matrix product, measured in the same process. A smoke run, or a machine without a GPU, has a tiny model.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from support.arguments import parser_of, positive
from support.errors import BenchmarkError
from support.program import run
from support.report import Row, print_rows, print_table

from hybridflow.config import MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.engines import TorchEngine
from hybridflow.models import decoder_shape, mfu, training_flops
from hybridflow.protocol import DataProto
from hybridflow.runtime import own_device

CONFIG = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
SMALL = CONFIG | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
SMALL["num_attention_heads"] = 4
LENGTH, PROMPT_LEN = 4096, 256
SETTINGS: dict[str, dict[str, Any]] = {
    "resident": {},
    "recomputed": {"gradient_checkpointing": True},
    "idle_offload": {"offload": "idle", "gradient_checkpointing": True},
    "host_offload": {"offload": "host", "gradient_checkpointing": True},
    "compiled": {"compile": True, "gradient_checkpointing": True},
}
TINY = {"settings": ("recomputed",), "sequences": 1, "length": 32, "repeats": 1}


def main() -> None:
    args = arguments()
    if args.setting:
        print(json.dumps(measure(Path(args.path), args)))
        return
    rows, lines = [], []
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), CONFIG if own_device().type == "cuda" and not args.smoke else SMALL)
        for name in args.settings:
            command = [sys.executable, *sys.argv, "--setting", name, "--path", directory]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                lines.append((name, "failed", "-", "-"))
                continue
            result = json.loads(done.stdout.splitlines()[-1])
            lines.append((name, f"{result['tokens_per_s']:,.0f}", f"{result['mfu']:.1%}", f"{result['peak_gib']:.1f}"))
            rows += [
                Row(f"mfu_{name}", "1", result["mfu"]),
                Row(f"peak_memory_{name}", "GiB", result["peak_gib"]),
            ]
    if not rows:
        raise BenchmarkError("every setting failed; the errors are above.")
    title = f"a step of {args.sequences} sequences of {args.length:,} tokens on {own_device()}"
    print_table(title, ("", "tokens/s", "MFU", "peak GiB"), lines)
    print_rows("mfu", rows, smoke=args.smoke)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, smoke=TINY)
    parser.add_argument("--sequences", type=positive, default=8, metavar="N", help="sequences of a step (default: 8)")
    parser.add_argument(
        "--length", type=positive, default=LENGTH, metavar="N", help=f"tokens of each sequence (default: {LENGTH})"
    )
    parser.set_defaults(settings=tuple(SETTINGS))
    parser.add_argument("--setting", choices=tuple(SETTINGS), help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    return parser.parse_args()


def write_model(directory: Path, sizes: dict[str, Any]) -> None:
    """Write a Qwen2 with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**sizes)).save_pretrained(directory)


def measure(path: Path, args: argparse.Namespace) -> dict[str, float]:
    """Return tokens per second, MFU and peak memory of one setting."""
    if args.threads:
        torch.set_num_threads(args.threads)
    setting = dict(SETTINGS[args.setting])
    offload = setting.pop("offload", None)
    engine = TorchEngine(
        str(path),
        "policy",
        model=ModelConfig(path=str(path), dtype="bfloat16", **setting),
        memory=MemoryConfig(max_tokens_per_micro_batch=args.length, share_prompts=False),
        optimizer=OptimizerConfig(lr=1e-6),
        offload=offload,
    )
    response_len = args.length - min(PROMPT_LEN, args.length // 2)
    shape = decoder_shape(path)
    assert shape is not None, "a Qwen2 has a known shape"
    rows = DataProto.from_dict(
        {
            "input_ids": torch.randint(0, shape.vocab_size, (args.sequences, args.length)),
            "attention_mask": torch.ones(args.sequences, args.length, dtype=torch.int64),
            "response_mask": torch.ones(args.sequences, response_len, dtype=torch.bool),
        }
    )
    seconds = []
    for _ in range(args.repeats + 1):
        _wait(engine.device)
        start = time.perf_counter()
        engine.update(rows, lambda outputs, part: (-outputs["log_probs"].mean() / args.sequences, {}))
        _wait(engine.device)
        seconds.append(time.perf_counter() - start)
    step = median(seconds[1:])
    flops = training_flops(shape, [args.length] * args.sequences)
    on_cuda = engine.device.type == "cuda"
    return {
        "tokens_per_s": args.sequences * args.length / step,
        "mfu": mfu(flops, step, peak_flops(engine.device)),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_cuda else 0.0,
    }


def peak_flops(device: torch.device, size: int = 8192, repeats: int = 10) -> float:
    """Return the best FLOP/s of a bfloat16 matrix product on the device."""
    size = size if device.type == "cuda" else 1024
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    seconds = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        x @ x
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    run(main)
