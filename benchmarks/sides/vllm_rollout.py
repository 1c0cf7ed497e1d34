"""vLLM on CPU, with its engine in this process.

A request has prompts and the length of each response, the reply the seconds.
"""

import time

import torch
import vllm
from support.counting import require_lengths
from support.serve import Channel
from vllm import LLM, SamplingParams


def main() -> None:
    channel = Channel()
    llm = build(channel.options["path"], channel.options["dtype"])
    channel.ready(torch.get_num_threads(), vllm=vllm.__version__, torch=torch.__version__)
    for request in channel.requests():
        channel.reply(seconds=measure(llm, **request))


def build(path: str, dtype: str) -> LLM:
    """Build the engine in this process."""
    return LLM(
        path,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=256,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,  # a generator on a CPU cannot be rewound after a prompt in parts
        max_num_batched_tokens=4096,
        seed=0,
    )


def measure(
    llm: LLM, prompts: list[list[int]], new_tokens: list[int], number: int, for_training: bool = False
) -> float:
    """Return the seconds to sample exactly `new_tokens` tokens for each prompt; each round has other samples.

    `for_training`: with the log-prob of each token, and a seed for each response that `number`, the round, determines.
    """
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    more: list[dict[str, int]] = [{} for _ in prompts]
    if for_training:
        more = [{"logprobs": 0, "seed": number * len(prompts) + i} for i in range(len(prompts))]
    sampling = [
        SamplingParams(max_tokens=count, ignore_eos=True, temperature=1.0, detokenize=False, **extra)
        for count, extra in zip(new_tokens, more, strict=True)
    ]
    start = time.perf_counter()
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    if for_training:
        log_probs = [
            [entry[token].logprob for token, entry in zip(part.token_ids, part.logprobs, strict=True)]
            for part in (output.outputs[0] for output in outputs)
        ]
        require_lengths([len(of_response) for of_response in log_probs], new_tokens)
    seconds = time.perf_counter() - start
    require_lengths([len(output.outputs[0].token_ids) for output in outputs], new_tokens)
    return seconds


if __name__ == "__main__":
    main()
