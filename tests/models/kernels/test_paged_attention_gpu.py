"""The Triton kernels on a CUDA device: results equal those of PyTorch in float64 up to the rounding of the dtype."""

import pytest
import torch

from hybridflow.models.kernels.elementwise import rms_norm, rotary, silu_mul
from hybridflow.models.kernels.paged_attention import LARGEST_HEAD_BYTES, append_to_pages, paged_attention
from hybridflow.models.kernels.triton_support import generation_kernels, runs_triton, runs_triton_elementwise
from hybridflow.rollout.sampling import RowRules, SamplingKinds, draw_rows, sample_rows, uniform_after

pytestmark = pytest.mark.gpu

PAGE_SIZE = 32
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def normal(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(14, 2, 64), (8, 8, 128), (32, 8, 80), (5, 1, 256)])
@torch.no_grad()
def test_attention_equals_float64(gpu, dtype, heads, kv_heads, dim):
    counts = torch.tensor([1, 32, 33, 255, 256, 257, 1000, 2048], device=gpu)
    tables = torch.arange(8 * 64, device=gpu).flip(0).view(8, 64).int()
    keys, values = (normal(8 * 64, PAGE_SIZE, kv_heads, dim, dtype=dtype, device=gpu) for _ in range(2))
    query, key, value = (normal(8, n, dim, dtype=dtype, device=gpu) for n in (heads, kv_heads, kv_heads))
    last = counts - 1
    slots = tables.gather(1, last[:, None] // PAGE_SIZE).squeeze(1) * PAGE_SIZE + last % PAGE_SIZE
    assert runs_triton(query) == (gpu.type == "cuda")
    append_to_pages(key, value, keys, values, slots)
    assert torch.equal(keys.flatten(0, 1)[slots], key)
    assert torch.equal(values.flatten(0, 1)[slots], value)
    out = paged_attention(query, keys, values, tables, counts, dim**-0.5)
    exact = paged_attention(query.double(), keys.double(), values.double(), tables, counts, dim**-0.5)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    alone = paged_attention(query[5:6], keys, values, tables[5:6], counts[5:6], dim**-0.5)
    torch.testing.assert_close(alone[0], out[5], rtol=tolerance, atol=tolerance)
    if gpu.type == "cuda" and dim * query.element_size() <= LARGEST_HEAD_BYTES:  # cuBLAS chooses by the number of rows
        assert torch.equal(alone[0], out[5])


@pytest.mark.parametrize("dtype", TOLERANCES)
@torch.no_grad()
def test_elementwise_kernels_of_generation_equal_float64(gpu, dtype):
    x, weight = normal(70, 896, dtype=dtype, device=gpu), normal(896, dtype=dtype, device=gpu)
    heads, angles = x.view(70, 14, 64)[:, 3:9], normal(70, 32, dtype=torch.float32, device=gpu)
    gates, up = normal(70, 4864, dtype=dtype, device=gpu), normal(4864, 70, dtype=dtype, device=gpu).T

    def compute(kind: torch.dtype) -> list[torch.Tensor]:
        angle_kind = torch.float64 if kind == torch.float64 else torch.float32
        return [
            rms_norm(x.to(kind), weight.to(kind), 1e-6),
            rotary(heads.to(kind), angles.to(angle_kind).cos(), angles.to(angle_kind).sin()),
            silu_mul(gates.to(kind), up.to(kind)),
        ]

    assert not runs_triton_elementwise(x)  # in training
    with generation_kernels():
        assert runs_triton_elementwise(x) == (gpu.type == "cuda")
        found = compute(dtype)
    for ours, exact in zip(found, compute(torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@torch.no_grad()
def test_draws_equal_those_of_pytorch(gpu):
    rows, vocabulary = 64, 5000
    logits = (3 * normal(rows, vocabulary, dtype=torch.float32, device=gpu)).to(torch.bfloat16)
    states, positions = torch.arange(rows, device=gpu) * 2**57, torch.arange(rows, device=gpu)
    rules = RowRules(
        torch.tensor([1.0, 0.0, 0.7, 1.3], device=gpu).double().repeat(16),
        torch.tensor([0, 0, 50, 0], device=gpu).repeat(16),
        torch.tensor([1.0, 1.0, 1.0, 0.9], device=gpu).double().repeat(16),
    )
    kinds = SamplingKinds(greedy=True, restricted=True)
    tokens, log_probs = draw_rows(logits, states, positions, rules, kinds)
    exact, exact_log_probs = sample_rows(logits.double(), uniform_after(states, positions), rules, kinds)
    assert int((tokens != exact).sum()) <= 1  # a draw may be within rounding of the boundary between two tokens
    torch.testing.assert_close(
        log_probs[tokens == exact].double(), exact_log_probs[tokens == exact], rtol=1e-4, atol=1e-4
    )
