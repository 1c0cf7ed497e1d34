"""A weight sync into our vLLM backend on CPU.

The reply has the seconds of vLLM's reload, of the probe, of one copy of the same bytes, and of our part: gathering
and both fingerprints.
"""

import time

import torch
import vllm
from support.serve import Channel
from support.weight_workers import PeakMemory, random_weights

import hybridflow
from hybridflow.rollout.vllm import VLLMRollout
from hybridflow.rollout.weight_sync.probe import probe_sequences
from hybridflow.runtime.allocator import keep_freed_memory
from hybridflow.runtime.threads import set_num_threads
from sides.weight_sync_rounds import copy_once, our_part


def main() -> None:
    channel = Channel()
    keep_freed_memory()
    threads = set_num_threads(channel.options["threads"])
    path = channel.options["path"]
    engine = VLLMRollout(path, max_model_len=512, kv_cache_bytes=2**30, enforce_eager=True)
    weights = random_weights(path)
    copies = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    vocabulary = next(iter(weights.values())).shape[0]  # the input embedding comes first
    sequences, peak = probe_sequences(vocabulary, 512), PeakMemory()
    channel.ready(threads, hybridflow=hybridflow.__version__, vllm=vllm.__version__, torch=torch.__version__)
    for request in channel.requests():
        copy = copy_once(weights, copies)
        ours = our_part(weights)
        peak.start()
        start = time.perf_counter()
        engine.start_loading(shapes)
        engine.load(weights.items())
        engine.finish_loading(request["number"])
        reload = time.perf_counter() - start
        extra = peak.extra()
        engine.log_probs(sequences)
        probe = time.perf_counter() - start - reload
        channel.reply(seconds=reload, copy=copy, ours=ours, probe=probe, extra=extra)


if __name__ == "__main__":
    main()
