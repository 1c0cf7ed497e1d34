"""`generate` of transformers: one call of one length; every response has the longest, and the surplus is dropped.

A request has prompts of equal length and the length of each response, the reply the seconds.
"""

import time
from typing import Any

import torch
import transformers
from support.counting import require_lengths
from support.serve import Channel
from transformers import AutoModelForCausalLM


def main() -> None:
    channel = Channel()
    torch.set_num_threads(channel.options["threads"])
    dtype = getattr(torch, channel.options["dtype"])
    model = AutoModelForCausalLM.from_pretrained(channel.options["path"], dtype=dtype).eval()
    channel.ready(torch.get_num_threads(), transformers=transformers.__version__, torch=torch.__version__)
    for request in channel.requests():
        channel.reply(seconds=measure(model, **request))


def measure(model: Any, prompts: list[list[int]], new_tokens: list[int], number: int) -> float:
    """Return the seconds to sample at least `new_tokens` tokens for each prompt; `number` changes the samples."""
    torch.manual_seed(number)
    input_ids = torch.tensor(prompts)
    longest = max(new_tokens)
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=longest,
            min_new_tokens=longest,
            pad_token_id=0,
        )
    seconds = time.perf_counter() - start
    responses = output[:, input_ids.shape[1] :]
    require_lengths([len(row[:count]) for row, count in zip(responses, new_tokens, strict=True)], new_tokens)
    return seconds


if __name__ == "__main__":
    main()
