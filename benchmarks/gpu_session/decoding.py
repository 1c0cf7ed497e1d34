"""Generation by the embedded engine: its fixed cost and its steady step, the shapes it visits, and its attention.

The bound of a step is the time in which the device reads all weights, and all keys and values, at the bandwidth of a
copy.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from gpu_session.models import heads_of, model_directory, sizes_of
from gpu_session.record import Teller
from gpu_session.timing import best_seconds, copy_bandwidth, is_gpu, seconds_of
from hybridflow.models.fused_forward import FusedForward
from hybridflow.models.kernels.paged_attention import addresses_of, paged_attention
from hybridflow.models.loading import load_causal_lm
from hybridflow.models.model_sizes import ModelSizes
from hybridflow.models.paged_kv_cache import PAGE_SIZE, pages_of
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate
from hybridflow.rollout.step_graphs import GraphPool, StepGraphs
from hybridflow.runtime.device import own_device


def _sampled_by_pytorch() -> Any:
    return patch("hybridflow.rollout.sampling.runs_triton", lambda x: False)


VARIANTS: dict[str, Callable[[], Any]] = {
    "graphs": nullcontext,
    "no_graphs": lambda: patch.object(FusedForward, "is_capturable", False),
    "no_Triton": lambda: patch("hybridflow.models.kernels.triton_support.has_triton", lambda: False),
    "PyTorch_sampling": _sampled_by_pytorch,
    "exact": nullcontext,
    "top_p": nullcontext,
    "top_p_by_PyTorch": _sampled_by_pytorch,
}
"""What is replaced while a variant is measured."""


def steady(teller: Teller, root: str, model: str, sizes: dict[str, Any], tiny: bool) -> None:
    """Measure prompts, pages and captures apart from the step: two generations that differ in their length only."""
    loaded, held, bandwidth = build(root, model, tiny)
    engine = EmbeddedRollout(loaded, paged=True)
    for rows, context in sizes["rows_and_contexts"]:
        run = generation_of(engine, held.shape.vocab_size, rows, context)
        name, few, many = f"{rows} rows at {context:,} tokens", *sizes["steps"]
        with counted_graphs() as first_graphs:  # and compiles kernels
            run(few)
        first_s = seconds_of(partial(run, 1))
        with counted_graphs() as graphs:
            short_s = seconds_of(partial(run, few))
        for _ in range(sizes["repeats"] - 1):
            short_s = min(short_s, seconds_of(partial(run, few)))
        long_s = best_seconds(partial(run, many), sizes["repeats"], warm_ups=0)
        step_s = (long_s - short_s) / (many - few)
        bound_s = step_bytes(held, rows * (context + (few + many) / 2)) / bandwidth
        compared = {"model": model, "limit": 1e3 * bound_s, "against": "bound of bandwidth"}
        teller.figure(f"steady step, {name}", 1e3 * step_s, "ms", **compared)
        compared = {"model": model, "limit": rows / bound_s, "against": "bound of bandwidth"}
        teller.figure(f"steady generation, {name}", rows / step_s, "tokens/s", **compared)
        teller.figure(f"fixed cost of a generation, {name}", short_s - few * step_s, "s", model=model)
        teller.figure(f"of it prompts, pages and one step, {name}", first_s, "s", model=model)
        teller.figure(f"of it captures, {name}", graphs["seconds"], "s", model=model)
        teller.figure(f"captures in the first generation, {name}", first_graphs["seconds"], "s", model=model)


def variants(teller: Teller, root: str, model: str, sizes: dict[str, Any], tiny: bool, variants: Sequence[str]) -> None:
    """Measure the steady step with and without what makes it fast, with exact log-probs, and with top-p."""
    loaded, held, bandwidth = build(root, model, tiny)
    few, many = sizes["steps"]
    rows, context = sizes["rows_and_contexts"][0]
    bound_s = step_bytes(held, rows * (context + (few + many) / 2)) / bandwidth
    compared = {"model": model, "limit": 1e3 * bound_s, "against": "bound of bandwidth"}
    for variant in variants:
        sampling = {"top_p": 0.95} if variant.startswith("top_p") else {}
        with VARIANTS[variant]():
            is_exact = variant == "exact"  # which has no pages on a CPU
            engine = EmbeddedRollout(loaded, paged=None if is_exact else True, exact=is_exact)  # with its own graphs
            run = generation_of(engine, held.shape.vocab_size, rows, context, **sampling)
            run(few)  # compiles kernels
            times = (best_seconds(partial(run, count), sizes["repeats"], warm_ups=0) for count in (few, many))
            short_s, long_s = times
        step_s = (long_s - short_s) / (many - few)
        teller.figure(f"step with {variant}, {rows} rows at {context:,} tokens", 1e3 * step_s, "ms", **compared)


def lengths(teller: Teller, root: str, model: str, sizes: dict[str, Any], tiny: bool) -> None:
    """Measure two generations of log-normal lengths, and count the shapes of their steps and the captures.

    The lengths are limits of the requests: random weights have no stop token.
    """
    loaded, held, bandwidth = build(root, model, tiny)
    engine = EmbeddedRollout(loaded, paged=True)
    rows, prompt, longest = sizes["rows"], sizes["prompt_len"], sizes["longest"]
    drawn = np.random.RandomState(0).lognormal(math.log(sizes["median"]), 0.9, rows)
    counts = np.clip(drawn.round().astype(int), 1, longest)
    prompts = random_prompts(held.shape.vocab_size, rows, prompt)

    def run(limits: np.ndarray) -> None:
        pairs = enumerate(zip(prompts, limits.tolist(), strict=True))
        generate(engine, [Request(i, ids, SamplingParams(limit), 1, (0, i)) for i, (ids, limit) in pairs])

    run(np.minimum(counts, 16))  # compiles kernels
    tokens = int(counts.sum())
    keys_and_values = step_bytes(held, 1) - step_bytes(held, 0)
    read = step_bytes(held, 0) * counts.max() + keys_and_values * (counts * (prompt + counts / 2)).sum()
    name = f"{rows} rows of {prompt} + {longest:,} tokens, log-normal"
    compared = {"model": model, "limit": tokens / (read / bandwidth), "against": "bound of bandwidth"}
    teller.note("lengths", mean=float(counts.mean()), longest=int(counts.max()))
    for which in ("first", "second"):
        with counted_graphs() as graphs:
            seconds = seconds_of(lambda: run(counts))
        teller.figure(f"{which} generation, {name}", tokens / seconds, "tokens/s", **compared)
        teller.figure(f"captures in the {which}, {name}", graphs["captures"], "1", model=model)
        teller.figure(f"seconds of captures in the {which}, {name}", graphs["seconds"], "s", model=model)
    teller.figure(f"shapes of steps, {name}", graphs["shapes"], "1", model=model)


def attention(teller: Teller, models: Sequence[str], sizes: dict[str, Any]) -> None:
    """Measure the bytes per second of decoding attention alone: keys and values of a layer, read once."""
    device, bandwidth = own_device(), copy_bandwidth()
    dtype = torch.bfloat16 if is_gpu() else torch.float32
    for model in models:
        query_heads, kv_heads, dim = heads_of(model)
        for rows in sizes["rows"]:
            for length in sizes["lengths"]:
                pages = pages_of(length)
                keys, values = (
                    torch.randn(rows * pages, PAGE_SIZE, kv_heads, dim, dtype=dtype, device=device) for _ in range(2)
                )
                tables = torch.randperm(rows * pages, device=device).to(torch.int32).view(rows, pages)
                counts = torch.full((rows,), length, device=device)
                query = torch.randn(rows, query_heads, dim, dtype=dtype, device=device)
                inputs = (query, keys, values, tables, counts, dim**-0.5, addresses_of(keys, values))
                with torch.no_grad():
                    seconds = best_seconds(partial(paged_attention, *inputs), 3, calls=sizes["calls"])
                num_bytes = 2 * rows * length * kv_heads * dim * query.element_size()
                compared = {"model": model, "limit": bandwidth / 1e9, "against": "copy"}
                teller.figure(
                    f"attention, {rows} rows of {length:,} tokens", num_bytes / seconds / 1e9, "GB/s", **compared
                )


def peer(teller: Teller, root: str, model: str, sizes: dict[str, Any], tiny: bool) -> None:
    """Measure whole generations against `generate` of transformers, whose sequences have equal lengths."""
    rows, prompt, new = sizes["rows"], sizes["prompt_len"], sizes["new_tokens"]
    loaded, held, bandwidth = build(root, model, tiny)
    engine = EmbeddedRollout(loaded, paged=True)
    ours = rows * new / best_seconds(partial(generation_of(engine, held.shape.vocab_size, rows, prompt), new), 2)
    bound = rows * bandwidth / step_bytes(held, rows * (prompt + new / 2))
    compared: dict[str, Any] = {"model": model, "limit": bound, "against": "bound; `generate` of transformers"}
    what = f"generation, {rows} rows of {prompt} + {new} tokens"
    teller.figure(what, ours, "tokens/s", **compared)
    if tiny:
        return
    del engine, loaded
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(model_directory(root, model, tiny=tiny), dtype=torch.bfloat16)
    theirs = theirs.to(own_device()).eval()
    ids = torch.tensor(random_prompts(held.shape.vocab_size, rows, prompt), device=own_device())
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    with torch.inference_mode():
        mask = torch.ones_like(ids)
        seconds = best_seconds(lambda: theirs.generate(ids, attention_mask=mask, **options), 1)
    teller.figure(what, ours, "tokens/s", **compared, peer=rows * new / seconds)


# ------------------------------------------------------------------------------------ helpers


def build(root: str, model: str, tiny: bool) -> tuple[Any, ModelSizes, float]:
    """Return a model on the device, its sizes, and the bandwidth of a copy."""
    bandwidth, path = copy_bandwidth(), model_directory(root, model, tiny=tiny)
    loaded = load_causal_lm(path, torch.bfloat16)
    torch.nn.Module.to(loaded, own_device())
    return loaded, sizes_of(path), bandwidth


def generation_of(
    engine: EmbeddedRollout, vocabulary: int, rows: int, context: int, **sampling: Any
) -> Callable[[int], object]:
    """Return a function that generates this many tokens in each of `rows` rows, after prompts of `context` tokens."""
    prompts = random_prompts(vocabulary, rows, context)

    def run(new_tokens: int) -> object:
        params = SamplingParams(new_tokens, **sampling)
        return generate(engine, [Request(i, ids, params, 1, (0, i)) for i, ids in enumerate(prompts)])

    return run


def random_prompts(vocabulary: int, rows: int, length: int) -> list[list[int]]:
    """Return prompts that share nothing: rows that do would read the same pages, which stay in the GPU's cache."""
    return torch.randint(1, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0)).tolist()


def step_bytes(held: ModelSizes, tokens: float) -> float:
    """Return the bytes that a step reads: the weights (an embedding only as the head), and the cache."""
    weights = held.parameters - (held.embedding if held.head else 0)
    return 2 * weights + 2 * 2 * held.shape.num_layers * held.kv_size * tokens


@contextmanager
def counted_graphs() -> Iterator[dict[str, float]]:
    """Count the shapes of steps, and the CUDA graphs that are captured with the seconds that this takes."""
    counts: dict[str, float] = {"shapes": 0, "captures": 0, "seconds": 0.0}
    shapes: set[Any] = set()
    run, capture = StepGraphs.run, GraphPool.capture

    def counted_run(self: StepGraphs, shape: Any, *rest: Any) -> None:
        shapes.add(shape)
        run(self, shape, *rest)

    def counted_capture(self: GraphPool, step: Any) -> Any:
        start = time.perf_counter()
        graph = capture(self, step)
        counts["captures"] += 1
        counts["seconds"] += time.perf_counter() - start
        return graph

    with patch.object(StepGraphs, "run", counted_run), patch.object(GraphPool, "capture", counted_capture):
        yield counts
    counts["shapes"] = len(shapes)
