"""Routes on a CUDA device: recorded in pages, replayed with gradients by deterministic kernels."""

import os

import pytest
import torch

from fixtures.families import write_family
from hybridflow.models.attention import PackedPlan
from hybridflow.models.loading import load_causal_lm
from hybridflow.models.routes import RecordingForward, ReplayedRoutes, Routers
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate
from hybridflow.runtime.threads import set_deterministic

pytestmark = pytest.mark.gpu

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, before the first product on the device


@pytest.fixture
def deterministic():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    set_deterministic(True)
    yield
    set_deterministic(False)
    torch.set_float32_matmul_precision(before)


def test_routes_recorded_on_a_device_are_replayed_with_the_same_bits(tmp_path, gpu, deterministic):
    model = load_causal_lm(write_family(tmp_path, "qwen3_moe", max_position_embeddings=256)).to(gpu)
    engine = EmbeddedRollout(model, paged=True, records_routes=True, max_running_sequences=4)
    prompt = [1 + (3 * i * i) % 39 for i in range(40)]
    (done,) = generate(engine, [Request(0, prompt, SamplingParams(20), noise_key=(5,))])
    tokens = torch.tensor([*prompt, *done.token_ids][:-1], device=gpu)
    arguments = {
        "position_ids": torch.arange(len(tokens), device=gpu)[None],
        "attention_plan": PackedPlan.from_lengths([len(tokens)]),
    }
    forward = RecordingForward(model)
    plain = forward(tokens[None], **arguments)
    assert done.routes is not None
    assert forward.routes is not None
    assert (done.routes.sort(-1).values == forward.routes.cpu().sort(-1).values).float().mean() > 0.99
    (expected,) = torch.autograd.grad(plain.logsumexp(-1).sum(), model.model.layers[0].mlp.gate.weight)
    with Routers.of(model).using(ReplayedRoutes(forward.routes)):
        again = model(tokens[None], use_cache=False, **arguments).logits
    (found,) = torch.autograd.grad(again.logsumexp(-1).sum(), model.model.layers[0].mlp.gate.weight)
    assert torch.equal(again, plain)
    assert torch.equal(found, expected)
