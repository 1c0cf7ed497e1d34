"""Adapters beside vLLM's base weights: what a sync sends, what sequences are computed with, and what is refused."""

import copy
from types import SimpleNamespace

import pytest
import torch

from fixtures.rollouts import require_as_computed, serve, stock_model
from hybridflow.config import LoRAConfig, load_config
from hybridflow.engines import TorchEngine
from hybridflow.errors import RolloutConfigError
from hybridflow.rollout import Request, SamplingParams
from hybridflow.rollout.weight_sync.in_process import InProcess, hand_over
from hybridflow.rollout.weight_sync.receiver import WeightReceiver
from hybridflow.rollout.weight_sync.sender import WeightSender

pytestmark = pytest.mark.vllm

LORA = LoRAConfig(rank=3, alpha=12.0, targets=("q_proj", "v_proj", "o_proj", "down_proj"))
LONG = {"max_position_embeddings": 512}


def build(path, lora=LORA, **options):
    from fixtures.vllm_engines import lend_engine

    return lend_engine(path, weights=False, adapters=lora, **options)


@pytest.fixture
def synced(tiny_model):
    """Return an engine, `sync`, which updates the trainer and syncs, and the model with the weights of each version."""
    path, engine = tiny_model("qwen2", **LONG), build(tiny_model("qwen2", **LONG))
    config = load_config(None, [f"model.path={path}", "rollout.sync_bucket_bytes=3000"])
    trainer, merging = (
        TorchEngine(str(path), "policy", model=config.model, memory=config.memory, lora=LORA, merge_adapters=merges)
        for merges in (False, True)
    )
    merging.model = trainer.model
    sender, receiver = WeightSender(trainer, config, InProcess), WeightReceiver(engine, "float32", InProcess())
    models = {}

    def sync():
        trainer.num_updates += 1
        adapters = {name: weight for name, weight in trainer.model.named_parameters() if ".lora_" in name}
        with torch.no_grad():
            for weight in adapters.values():
                weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(trainer.num_updates))
        model = models[trainer.num_updates] = stock_model(path)
        model.load_state_dict({name: weight.to(model.dtype) for name, weight in merging.weights()}, strict=False)
        before = copy.deepcopy(adapters)
        num_bytes = hand_over(sender, receiver)
        assert num_bytes == sum(weight.nbytes for weight in adapters.values())
        assert all(torch.equal(weight, before[name]) for name, weight in adapters.items())
        engine.retract()  # before the probe, in whose steps running sequences advance
        return receiver.check(sender.compute_probe())

    torch.manual_seed(0)
    return SimpleNamespace(engine=engine, sync=sync, model_of=models.__getitem__)


def test_sequences_are_computed_with_the_adapters_of_their_versions(synced):
    wanted = [Request(i, [5 + i] * 150, SamplingParams(8), 2, (0, i), keep=True) for i in range(3)]
    mixed = []
    for _ in range(2):  # the second time blocks of the prompts are in the prefix cache
        metrics = synced.sync()
        assert metrics["weight_sync/probe_diff_max"] < 1e-4
        for request in wanted:
            synced.engine.submit(request)
        for _ in range(3):
            synced.engine.step()
        synced.sync()
        done = serve(synced.engine)
        for completion in done:
            request = wanted[completion.request_id]
            require_as_computed(synced.model_of, request, completion, noise=False, tolerance=1e-4)
        mixed += [set(completion.versions) for completion in done]
    assert mixed == [{1, 2}] * 6 + [{3, 4}] * 6


def test_adapters_that_vllm_does_not_serve_are_refused_at_the_start(tiny_model):
    from hybridflow.rollout.vllm.adapters import _require_served

    for lora, message in (
        (
            LoRAConfig(rank=513),
            r"with lora\.rank=513: vLLM has ranks up to 512; use a smaller one, or set roll",
        ),
        (LoRAConfig(rank=2, targets=("lm_head",)), r"with lora\.targets of lm_head: .* or set rollout\.merge_adapters"),
    ):
        with pytest.raises(RolloutConfigError, match=rf"rollout\.merge_adapters=false is not supported {message}"):
            build(tiny_model("qwen2"), lora)
    layer = "model.layers.0.mlp.nowhere"
    with pytest.raises(RolloutConfigError, match=rf"lora\.targets of {layer}: vLLM has no such layer in a Qwen2For"):
        build(tiny_model("qwen2"))._engine._on_model(
            lambda model, config: _require_served(model, [f"{layer}.lora_A.default.weight"], False)
        )
