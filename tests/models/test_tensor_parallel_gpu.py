"""Compiled layers of a tensor parallel rank on a GPU, in a group of one: the collectives are traced, and NCCL's."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from hybridflow.engines.process_group import join_alone
from hybridflow.models.attention import PackedPlan
from hybridflow.models.forward_of import forward_of
from hybridflow.models.fused_forward import FusedForward
from hybridflow.models.loading import load_causal_lm
from hybridflow.models.tensor_parallel import TensorRanks

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # warnings of torch.compile

LENGTHS = [5, 9, 2]


@pytest.fixture
def tensor():
    is_in_group = dist.is_initialized()
    join_alone()
    yield TensorRanks(dist.distributed_c10d._get_default_group())
    if not is_in_group:
        dist.destroy_process_group()


def test_compiled_layers_of_a_tensor_parallel_rank_equal_plain_ones(tiny_model, tensor, gpu, monkeypatch):
    """Without graph breaks; a rehearsal traces the layers and does not build kernels."""
    model = load_causal_lm(tiny_model("qwen3", num_hidden_layers=1), torch.float32)
    torch.nn.Module.to(model, gpu)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(gpu)
    tokens, parameters = torch.arange(sum(LENGTHS), device=gpu)[None], dict(model.named_parameters())
    compiled = FusedForward(model, tensor=tensor)
    backend = "inductor" if gpu.type == "cuda" else "aot_eager"
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    compiled.compile()
    results = []
    for forward in (forward_of(model), compiled):
        logits = forward(tokens, position_ids=positions, attention_plan=PackedPlan.from_lengths(LENGTHS))
        results.append([logits, *torch.autograd.grad(logits.square().sum(), list(parameters.values()))])
    for name, expected, found in zip(["logits", *parameters], *results, strict=True):
        assert float((found - expected).norm() / expected.norm()) < 1e-4, name
