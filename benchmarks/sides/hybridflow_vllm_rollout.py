"""hybridflow's vLLM backend on CPU, the engine in this process; requests as those of `hybridflow_rollout`."""

import torch
import vllm
from support.serve import Channel

import hybridflow
from hybridflow.models import DTYPES, load_causal_lm
from hybridflow.rollout import load_weights
from hybridflow.rollout.vllm import VLLMRollout
from hybridflow.runtime import bound_shape_caches, keep_freed_memory, set_num_threads
from sides.hybridflow_rollout import measure


def main() -> None:
    channel = Channel()
    keep_freed_memory()  # as a run does
    bound_shape_caches()
    threads = set_num_threads(channel.options["threads"])
    path, dtype = channel.options["path"], channel.options["dtype"]
    engine = VLLMRollout(path, dtype=dtype, max_running_sequences=256, max_model_len=512, kv_cache_bytes=2 * 2**30)
    load_weights(engine, load_causal_lm(path, DTYPES[dtype]).named_parameters(), version=0)
    channel.ready(threads, hybridflow=hybridflow.__version__, vllm=vllm.__version__, torch=torch.__version__)
    for request in channel.requests():
        channel.reply(seconds=measure(engine, request["prompts"], request["new_tokens"], request["number"]))


if __name__ == "__main__":
    main()
