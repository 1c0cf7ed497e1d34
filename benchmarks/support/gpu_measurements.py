"""Measurements of one process on its device; each takes the directory of a model and returns figures by name."""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hybridflow.config import MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.engines import TorchEngine
from hybridflow.models.forward import max_logits_on
from hybridflow.models.loading import load_causal_lm
from hybridflow.models.memory import MemoryLayout, generation_memory, training_memory
from hybridflow.models.model_sizes import decoder_shape, mfu, model_sizes, training_flops
from hybridflow.protocol import DataProto
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate
from hybridflow.runtime.device import own_device

GIB = 2**30
Figures = dict[str, float | None]


def update(path: Path, sizes: dict[str, int], repeats: int, setting: dict[str, Any]) -> Figures:
    """Measure an update: tokens per second, MFU, peak memory and its estimate.

    `sizes`: sequences of a step, their length, the prompt's part of it, and the tokens of a micro-batch.
    """
    settings = dict(setting)
    offload = settings.pop("offload", None)
    length, prompt_len, sequences = sizes["length"], sizes["prompt_len"], sizes["sequences"]
    tokens = min(sizes["micro_batch"], sequences * length)
    engine = TorchEngine(
        str(path),
        "policy",
        model=ModelConfig(path=str(path), dtype="bfloat16", **settings),
        memory=MemoryConfig(max_tokens_per_micro_batch=tokens, share_prompts=False),
        optimizer=OptimizerConfig(lr=1e-6),
        offload=offload,
    )
    shape = decoder_shape(path)
    assert shape is not None, "a Qwen2 has a known shape"
    rows = DataProto.from_dict(
        {
            "input_ids": torch.randint(0, shape.vocab_size, (sequences, length)),
            "attention_mask": torch.ones(sequences, length, dtype=torch.int64),
            "response_mask": torch.ones(sequences, length - prompt_len, dtype=torch.bool),
        }
    )

    def step() -> None:
        engine.update(rows, lambda outputs, part: (-outputs["log_probs"].mean() / sequences, {}))

    seconds = _median_seconds(step, repeats, warm_ups=2)  # a compilation, then the first step with moments
    layout = MemoryLayout(
        gradient_checkpointing=bool(settings.get("gradient_checkpointing")),
        offload=offload or "none",
        kernels="compiled" if settings.get("compile") else "eager",
        max_logits=max_logits_on(own_device()),
    )
    sizes_of_model = model_sizes(path)
    assert sizes_of_model is not None, "Qwen2 has a fused pass"
    estimate = training_memory(sizes_of_model, layout, tokens, tokens // length * (length - prompt_len))
    flops = training_flops(shape, [length] * sequences)
    return {
        "tokens_per_s": sequences * length / seconds,
        "mfu": mfu(flops, seconds, product_flops()),
        "peak_gib": _peak_gib(),
        "estimate_gib": estimate.total / GIB,
    }


def generation(path: Path, sizes: dict[str, int], repeats: int, system: str) -> Figures:
    """Measure new tokens per second of the embedded engine or of `transformers`, and the bound of memory bandwidth."""
    run = {"hybridflow": _embedded, "transformers": _transformers}[system](path, sizes)
    seconds = _median_seconds(run, repeats, warm_ups=1)
    model = model_sizes(path)
    assert model is not None, "Qwen2 has a fused pass"
    count, new_tokens = sizes["sequences"], sizes["new_tokens"]
    mean_context = count * (sizes["prompt_len"] + new_tokens / 2)
    cache = generation_memory(model, MemoryLayout(), int(mean_context), count).keys_and_values
    bytes_per_step = 2 * model.parameters + cache  # each step reads the weights, and all keys and values
    return {
        "tokens_per_s": count * new_tokens / seconds,
        "bound": count * copy_bandwidth() / bytes_per_step,
        "peak_gib": _peak_gib(),
    }


def product_flops(size: int = 8192, repeats: int = 20) -> float:
    """Return the best FLOP/s of a bfloat16 product of random matrices; a GPU multiplies constants faster."""
    device = own_device()
    size = size if device.type == "cuda" else 1024
    x, y = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / min(_seconds(lambda: x @ y) for _ in range(repeats))


def copy_bandwidth(repeats: int = 10) -> float:
    """Return the best bytes per second of a copy on the device, read and written bytes together."""
    device = own_device()
    source = torch.ones(2**30 if device.type == "cuda" else 2**24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / min(_seconds(lambda: target.copy_(source)) for _ in range(repeats))


def _embedded(path: Path, sizes: dict[str, int]) -> Callable[[], object]:
    model = load_causal_lm(path, torch.bfloat16)
    torch.nn.Module.to(model, own_device())
    engine = EmbeddedRollout(model)
    prompts = _prompts(path, sizes)
    sampling = SamplingParams(sizes["new_tokens"])
    requests = [Request(i, ids, sampling, 1, (0, i)) for i, ids in enumerate(prompts)]
    return lambda: generate(engine, requests)


def _transformers(path: Path, sizes: dict[str, int]) -> Callable[[], object]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model = model.to(own_device()).eval()
    ids = torch.tensor(_prompts(path, sizes), device=own_device())
    length = {"max_new_tokens": sizes["new_tokens"], "min_new_tokens": sizes["new_tokens"]}

    @torch.inference_mode()
    def run() -> None:
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, pad_token_id=0, **length)

    return run


def _prompts(path: Path, sizes: dict[str, int]) -> list[list[int]]:
    shape = decoder_shape(path)
    assert shape is not None, "a Qwen2 has a known shape"
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, shape.vocab_size, (sizes["sequences"], sizes["prompt_len"]), generator=generator).tolist()


def _median_seconds(call: Callable[[], object], repeats: int, *, warm_ups: int) -> float:
    for _ in range(warm_ups):
        call()
    if own_device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return median(_seconds(call) for _ in range(repeats))


def _seconds(call: Callable[[], object]) -> float:
    _wait()
    start = time.perf_counter()
    call()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if own_device().type == "cuda":
        torch.cuda.synchronize()


def _peak_gib() -> float | None:
    """Return the peak of the device's memory; None on a CPU, where it is not measured."""
    return torch.cuda.max_memory_allocated() / GIB if own_device().type == "cuda" else None
