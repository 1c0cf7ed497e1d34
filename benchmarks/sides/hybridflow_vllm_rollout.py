"""hybridflow's vLLM backend and vLLM called directly, both in this process on CPU, in turn.

The reply has the seconds of each.
"""

import torch
import vllm
from support.serve import Channel

import hybridflow
from hybridflow.models.loading import DTYPES, load_causal_lm
from hybridflow.rollout import load_weights
from hybridflow.rollout.vllm import VLLMRollout
from hybridflow.runtime.allocator import bound_shape_caches, keep_freed_memory
from hybridflow.runtime.threads import set_num_threads
from sides import hybridflow_rollout, vllm_rollout


def main() -> None:
    channel = Channel()
    keep_freed_memory()  # as a run does
    bound_shape_caches()
    threads = set_num_threads(channel.options["threads"])
    path, dtype = channel.options["path"], channel.options["dtype"]
    ours = VLLMRollout(path, dtype=dtype, max_running_sequences=256, max_model_len=512, kv_cache_bytes=2 * 2**30)
    load_weights(ours, load_causal_lm(path, DTYPES[dtype]).named_parameters(), version=0)
    direct = vllm_rollout.build(path, dtype)
    channel.ready(threads, hybridflow=hybridflow.__version__, vllm=vllm.__version__, torch=torch.__version__)
    for request in channel.requests():
        measures = {
            "seconds": lambda request=request: hybridflow_rollout.measure(ours, **request),
            "direct": lambda request=request: vllm_rollout.measure(direct, **request, for_training=True),
        }
        names = list(measures) if request["number"] % 2 else list(measures)[::-1]
        channel.reply(**{name: measures[name]() for name in names})


if __name__ == "__main__":
    main()
