"""The rows that both sides of `benchmarks/train_engine.py` learn from, and how processes of a side work together."""

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
"""One optimizer step on this rank's rows; returns the loss."""


def rows_of_rank(count: int, vocabulary: int, longest: int, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Long-tailed responses after prompts of one length: (rows, columns), padded on the right; every `ranks`-th row."""
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
    """A side: this process is rank 0 and starts the others; `build(options, rank, ranks)` gives the step of each."""
    if sys.argv[1] == "rank":
        options = json.loads(sys.argv[3])
        _join(options, int(sys.argv[2]))
        step = _ready(build, options, int(sys.argv[2]))
        while _told(None):
            step()
            _report()
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
    _join(options, 0)
    step = _ready(build, options, 0)
    channel.ready(options["threads"], **versions)
    for _ in channel.requests():
        _told(True)
        start = time.perf_counter()
        loss = step()
        peaks = _report()  # when all have ended
        channel.reply(seconds=time.perf_counter() - start, loss=loss, peaks=peaks)
    _told(False)
    for other in others:
        other.wait()


def _join(options: dict[str, Any], rank: int) -> None:
    torch.set_num_threads(max(1, options["threads"] // options["ranks"]))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(options["ranks"])}
    if options["ranks"] > 1:
        address = f"tcp://127.0.0.1:{options['port']}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=options["ranks"])


def _ready(build: Callable[[dict[str, Any], int, int], Step], options: dict[str, Any], rank: int) -> Step:
    return build(options, rank, options["ranks"])


def _told(goes_on: bool | None) -> bool:
    """What rank 0 says."""
    if not dist.is_initialized():
        return bool(goes_on)
    said = [goes_on]
    dist.broadcast_object_list(said)
    return bool(said[0])


def _report() -> list[int]:
    """The peak memory of every rank."""
    peak = peak_resident_bytes()
    if not dist.is_initialized():
        return [peak]
    peaks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, peak)
    return peaks
