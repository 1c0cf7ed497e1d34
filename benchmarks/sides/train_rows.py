"""The training rows of both sides of `benchmarks/train_engine.py`, and the ranks of a side."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.serve import Channel, peak_resident_bytes

PROMPT_LEN = 32
Step = Callable[[], float]
"""One optimizer step on this rank's rows, which returns the loss."""


def rows_of_rank(count: int, vocabulary: int, longest: int, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Build every `ranks`-th row of prompts of one length with long-tailed responses: (rows, tokens), right-padded."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(count, generator=generator).mul(0.8).add(4.0).exp().clamp(8, longest - PROMPT_LEN).long()
    tokens = torch.randint(1, vocabulary, (count, longest), generator=generator)
    advantages = torch.randn(count, generator=generator)
    mask = torch.arange(longest - PROMPT_LEN) < lengths[:, None]
    own = slice(rank, None, ranks)
    attention_mask = torch.cat([torch.ones(count, PROMPT_LEN, dtype=torch.bool), mask], 1)
    return {
        "input_ids": (tokens * attention_mask)[own],
        "attention_mask": attention_mask[own],
        "response_mask": mask[own],
        "advantages": advantages[own],
        "num_response_tokens": mask.sum(),
        "num_tokens": attention_mask.sum(),
    }


def run(build: Callable[[dict[str, Any], int, int], Step], **versions: str) -> None:
    """Run a side: this process is rank 0 and starts the others; `build(options, rank, ranks)` returns a rank's step."""
    if sys.argv[1] == "rank":
        options = json.loads(sys.argv[3])
        step = _join(build, options, int(sys.argv[2]))
        while _broadcast(None):
            step()
            _gather_peaks()
        return
    channel = Channel()
    options = channel.options
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        options["port"] = sock.getsockname()[1]
    others = [
        subprocess.Popen([sys.executable, *sys.orig_argv[1:3], "rank", str(rank), json.dumps(options)])
        for rank in range(1, options["ranks"])
    ]
    step = _join(build, options, 0)
    channel.ready(options["threads"], **versions)
    for _ in channel.requests():
        _broadcast(True)
        start = time.perf_counter()
        loss = step()
        peaks = _gather_peaks()  # returns when every rank has finished the step
        channel.reply(seconds=time.perf_counter() - start, loss=loss, peaks=peaks)
    _broadcast(False)
    for other in others:
        other.wait()


def _join(build: Callable[[dict[str, Any], int, int], Step], options: dict[str, Any], rank: int) -> Step:
    """Prepare this process as one rank and build its step."""
    torch.set_num_threads(max(1, options["threads"] // options["ranks"]))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(options["ranks"])}
    if options["ranks"] > 1:
        address = f"tcp://127.0.0.1:{options['port']}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=options["ranks"])
    return build(options, rank, options["ranks"])


def _broadcast(flag: bool | None) -> bool:
    """Return the flag of rank 0: whether another step follows."""
    if not dist.is_initialized():
        return bool(flag)
    flags = [flag]
    dist.broadcast_object_list(flags)
    return bool(flags[0])


def _gather_peaks() -> list[int]:
    """Return the peak memory of every rank in bytes."""
    peak = peak_resident_bytes()
    if not dist.is_initialized():
        return [peak]
    peaks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, peak)
    return peaks
