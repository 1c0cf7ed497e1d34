"""vLLM on a GPU: the memory that a sleeping engine frees while the policy learns."""

import pytest
import torch

from hybridflow.models import load_causal_lm
from hybridflow.rollout import Request, SamplingParams, generate, load_weights

pytestmark = pytest.mark.gpu

KV_CACHE_BYTES = 2**30


def test_sleep_frees_gpu_memory_and_wake_restores_generation(tiny_model):
    pytest.importorskip("vllm")
    from hybridflow.rollout.vllm import VLLMRollout

    path = tiny_model("qwen2")
    engine = VLLMRollout(path, dtype="bfloat16", enforce_eager=True, kv_cache_bytes=KV_CACHE_BYTES)
    weights = {name: tensor.cuda() for name, tensor in load_causal_lm(path, torch.bfloat16).named_parameters()}
    load_weights(engine, weights.items(), version=0)
    wanted = [Request(i, [5 + i, 6, 7], SamplingParams(8), 2, (0, i)) for i in range(4)]
    expected = generate(engine, wanted)
    awake = torch.cuda.mem_get_info()[0]
    engine.sleep()
    assert engine.version is None
    assert torch.cuda.mem_get_info()[0] - awake > 0.9 * KV_CACHE_BYTES
    engine.wake("weights")
    with_weights = torch.cuda.mem_get_info()[0]
    assert with_weights - awake > 0.8 * KV_CACHE_BYTES  # memory of keys and values is allocated after the weight sync
    load_weights(engine, weights.items(), version=0)
    engine.wake("kv_cache")
    assert generate(engine, wanted) == expected
