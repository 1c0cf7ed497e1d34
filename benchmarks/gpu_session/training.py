"""Updates of the training engine: tokens per second, MFU and memory; and the rate of attention by each backend."""

import os
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from gpu_session.models import heads_of, model_directory, shape_of, sizes_of
from gpu_session.record import Teller
from gpu_session.timing import GIB, NOMINAL_FLOPS, best_seconds, is_gpu, peak_gib, product_flops, seconds_of
from hybridflow.config import LoRAConfig, MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.engines import TorchEngine
from hybridflow.models.attention import PackedPlan
from hybridflow.models.attention_form import AttentionForm
from hybridflow.models.forward import max_logits_on
from hybridflow.models.memory import MemoryLayout, training_memory
from hybridflow.models.model_sizes import mfu, training_flops
from hybridflow.models.shared_prompts import SharedPromptPlan
from hybridflow.models.varlen import KERNEL_VARIABLE, KERNELS, packed_kernel
from hybridflow.protocol import DataProto
from hybridflow.runtime.device import own_device

GOALS = {"0.5B": 0.5, "1.5B": 0.62}
"""MFU of the setting `compiled`, as a share of the measured product, that this project aims at."""

BACKENDS = ("flash", *KERNELS, "flex", "sdpa")
"""Of training attention; on a CPU, all but the last are the compiled kernel."""

LARGEST_DISTANCE = 0.02
"""Of results of two backends, relative to the norm (bfloat16 rounds by 0.004); the rate of others is not written."""

SETTINGS: dict[str, dict[str, Any]] = {
    "compiled": {"compile": True},
    "eager": {"compile": False},
    "exact": {"compile": False, "exact": True},
    "recomputed": {"compile": True, "gradient_checkpointing": True},
    "idle_offload": {"compile": True, "offload": "idle"},
    "host_offload": {"compile": True, "gradient_checkpointing": True, "offload": "host"},
    "cudnn": {"compile": True, "kernel": "cudnn"},
    "FA3": {"compile": True, "kernel": "FA3"},
    "lora": {"compile": True, "gradient_checkpointing": True, "lora_rank": 32},
}


def update(teller: Teller, root: str, model: str, setting: str, sizes: dict[str, int], tiny: bool) -> None:
    """Measure an update: tokens per second, MFU, peak memory and its estimate.

    `sizes`: sequences of a step, their length, the prompt's part of it, and the tokens of a micro-batch.
    """
    settings = dict(SETTINGS[setting])
    if kernel := settings.pop("kernel", ""):
        os.environ[KERNEL_VARIABLE] = kernel  # of this process alone
    if tiny:
        settings["compile"] = False
    offload, rank = settings.pop("offload", None), settings.pop("lora_rank", 0)
    exact = settings.pop("exact", False)
    length, prompt_len, sequences = sizes["length"], sizes["prompt_len"], sizes["sequences"]
    tokens = min(sizes["micro_batch"], sequences * length)
    path = model_directory(root, model, tiny=tiny)
    peak = product_flops()
    engine = TorchEngine(
        str(path),
        "policy",
        model=ModelConfig(path=str(path), dtype="bfloat16", **settings),
        memory=MemoryConfig(max_tokens_per_micro_batch=tokens, share_prompts=False),
        optimizer=OptimizerConfig(lr=1e-6),
        offload=offload,
        lora=LoRAConfig(rank=rank),
        exact=exact,
    )
    shape = shape_of(path)
    rows = DataProto.from_dict(
        {
            "input_ids": torch.randint(0, shape.vocab_size, (sequences, length)),
            "attention_mask": torch.ones(sequences, length, dtype=torch.int64),
            "response_mask": torch.ones(sequences, length - prompt_len, dtype=torch.bool),
        }
    )

    def step() -> None:
        engine.update(rows, lambda outputs, part: (-outputs["log_probs"].mean() / sequences, {}))

    step()  # compiles
    step()  # the first with moments
    if is_gpu():
        torch.cuda.reset_peak_memory_stats()
    seconds = median(seconds_of(step) for _ in range(sizes["repeats"]))
    flops = training_flops(shape, [length] * sequences)
    if rank:  # no gradients of the frozen weights: the products of the backward pass are half as many
        flops *= 2 / 3
    teller.figure(f"update, {setting}", sequences * length / seconds, "tokens/s", model=model)
    goal = GOALS.get(model) if setting == "compiled" else None
    compared = {"model": model, "limit": goal, "against": "goal" if goal else ""}
    teller.figure(
        f"MFU of an update, {setting}: share of a measured product", mfu(flops, seconds, peak), "1", **compared
    )
    nominal = mfu(flops, seconds, NOMINAL_FLOPS)
    teller.figure(
        f"MFU of an update, {setting}: share of {NOMINAL_FLOPS / 1e12:.0f} TFLOP/s", nominal, "1", model=model
    )
    if (used := peak_gib()) is not None:
        layout = MemoryLayout(
            gradient_checkpointing=bool(settings.get("gradient_checkpointing")),
            offload=offload or "none",
            kernels="compiled" if settings["compile"] else "eager",
            lora_rank=rank,
            max_logits=max_logits_on(own_device()),
        )
        estimate = training_memory(sizes_of(path), layout, tokens, tokens // length * (length - prompt_len))
        compared = {"model": model, "limit": estimate.total / GIB, "against": "estimate"}
        teller.figure(f"peak memory of an update, {setting}", used, "GiB", **compared)


def attention(teller: Teller, models: list[str], lengths: dict[str, list[int]], calls: int = 3) -> None:
    """Measure attention of packed sequences by each backend, forward and backward, and its distance from the first.

    FLOPs are those of the pairs of a causal mask; a backward pass has 2.5 times those of a forward pass, with the
    scores that it computes again.
    """
    device, peak = own_device(), product_flops()
    dtype = torch.bfloat16 if is_gpu() else torch.float32
    for model in models:
        query_heads, kv_heads, dim = heads_of(model)
        for name, packed in lengths.items():
            tokens, first = sum(packed), None
            layer = [
                torch.randn(1, tokens, heads, dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
                for heads in (query_heads, kv_heads, kv_heads)
            ]
            grad = torch.randn(1, tokens, query_heads, dim, device=device, dtype=dtype)
            flops = 4 * query_heads * dim * sum(n * (n + 1) / 2 for n in packed)
            for backend in BACKENDS:
                if backend == "sdpa" and len(set(packed)) > 1:
                    continue  # a call for each length
                try:
                    attend = _backend(backend, packed, dim)
                    out = attend(*layer)
                    results = [out.detach(), *torch.autograd.grad(out, layer, grad, retain_graph=True)]
                    forward_s = best_seconds(partial(attend, *layer), 3, calls=calls)
                    backward = partial(torch.autograd.grad, out, layer, grad, retain_graph=True)
                    backward_s = best_seconds(backward, 3, calls=calls)
                except Exception as error:  # the next one may run: a package is missing, or a kernel lacks the shape
                    teller.note(f"{backend} on {name} of {model}", error=f"{type(error).__name__}: {error}"[:300])
                    continue
                finally:
                    _choose("")
                first = first or results
                apart = max(float((x - y).norm() / y.norm()) for x, y in zip(results, first, strict=True))
                is_right = apart < LARGEST_DISTANCE
                teller.note(f"{backend} on {name} of {model}", distance_from_first=apart, is_right=is_right)
                if not is_right:
                    continue
                compared = {"model": model, "limit": peak / 1e12, "against": "measured product"}
                for which, rate in (("forward", flops / forward_s), ("backward", 2.5 * flops / backward_s)):
                    teller.figure(f"training attention, {name}, {backend}, {which}", rate / 1e12, "TFLOP/s", **compared)


def _backend(name: str, lengths: list[int], dim: int) -> Callable[..., torch.Tensor]:
    """Return the attention of packed sequences by a backend; raises where it is missing."""
    if name == "flex":
        plan: Any = SharedPromptPlan(tuple((length,) for length in lengths))
    else:
        plan = PackedPlan.from_lengths(lengths)
        _choose(name if name in KERNELS else "")
    form = AttentionForm(dim**-0.5)
    if name == "sdpa":
        return lambda *layer: plan._attend_by_runs(*(x.squeeze(0).transpose(0, 1) for x in layer), form, compiled=False)
    return lambda q, k, v: plan.attend(0, q, k, v, form)


def _choose(name: str) -> None:
    """Let packed rows be computed by a kernel of KERNELS, or by the default."""
    if current_flash_attention_impl():
        restore_flash_attention_impl()
    os.environ[KERNEL_VARIABLE] = name
    packed_kernel.cache_clear()
    packed_kernel()


def log_normal_lengths(tokens: int, median: int, longest: int) -> list[int]:
    """Return lengths of sequences that fill a micro-batch of this many tokens."""
    drawn = np.random.RandomState(0).lognormal(np.log(median), 0.9, tokens).round().clip(1, longest).astype(int)
    count = int((drawn.cumsum() <= tokens).sum())
    return drawn[: max(1, count)].tolist()
