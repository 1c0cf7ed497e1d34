"""The weight sync inside one process on a GPU: no weight goes through the host."""

import json

import pytest
import torch

from hybridflow.config import load_config
from hybridflow.engines import TorchEngine
from hybridflow.rollout.weight_sync.in_process import InProcess, hand_over
from hybridflow.rollout.weight_sync.receiver import WeightReceiver
from hybridflow.rollout.weight_sync.sender import WeightSender

pytestmark = pytest.mark.gpu


def test_sync_into_vllm_copies_no_weight_to_the_host(tiny_model, gpu, tmp_path):
    pytest.importorskip("vllm")
    from hybridflow.rollout.vllm import VLLMRollout

    path = tiny_model("qwen2", hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    settings = load_config(None, [f"model.path={path}", "model.dtype=bfloat16", "rollout.sync_bucket_bytes=200000"])
    trainer = TorchEngine(str(path), "policy", model=settings.model, memory=settings.memory)
    sender = WeightSender(trainer, settings, InProcess)
    rollout = VLLMRollout(path, dtype="bfloat16", enforce_eager=True, kv_cache_bytes=2**26)
    receiver = WeightReceiver(rollout, "bfloat16", InProcess())
    hand_over(sender, receiver)  # the first one also builds tables of constants
    receiver.check(sender.compute_probe())
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities[: 2 if gpu.type == "cuda" else 1]) as profile:
        num_bytes = hand_over(sender, receiver)
    receiver.check(sender.compute_probe())
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    copied = {"DtoH": 0, "HtoD": 0, "DtoD": 0}
    for event in events:
        for direction in copied:
            if event.get("name", "").startswith(f"Memcpy {direction}"):
                copied[direction] += event["args"]["bytes"]
    num_tensors = len(trainer.weight_shapes())
    assert num_bytes > 500_000
    assert copied["DtoH"] <= 2 * 8 * num_tensors  # two fingerprints of 8 bytes for each tensor
    assert copied["HtoD"] <= 64 * num_tensors
    rollout.close()
