"""hybridflow's embedded engine: a request has prompts and the length of each response, the reply the seconds."""

import time

import torch
from support.counting import require_lengths
from support.serve import Channel

import hybridflow
from hybridflow.models.loading import DTYPES, load_causal_lm
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate
from hybridflow.runtime.allocator import bound_shape_caches, keep_freed_memory
from hybridflow.runtime.threads import set_num_threads


def main() -> None:
    channel = Channel()
    keep_freed_memory()  # as a run does
    bound_shape_caches()
    threads = set_num_threads(channel.options["threads"])
    dtype = DTYPES[channel.options["dtype"]]
    engine = EmbeddedRollout(load_causal_lm(channel.options["path"], dtype))
    channel.ready(threads, hybridflow=hybridflow.__version__, torch=torch.__version__)
    for request in channel.requests():
        channel.reply(seconds=measure(engine, **request))


def measure(engine: EmbeddedRollout, prompts: list[list[int]], new_tokens: list[int], number: int) -> float:
    """Return the seconds to sample exactly `new_tokens` tokens for each prompt; `number` changes the samples."""
    requests = [
        Request(i, prompt, SamplingParams(max_new_tokens=count), noise_key=(0, number, i))
        for i, (prompt, count) in enumerate(zip(prompts, new_tokens, strict=True))
    ]
    start = time.perf_counter()
    completions = generate(engine, requests)
    seconds = time.perf_counter() - start
    require_lengths([len(completion.token_ids) for completion in completions], new_tokens)
    return seconds


if __name__ == "__main__":
    main()
