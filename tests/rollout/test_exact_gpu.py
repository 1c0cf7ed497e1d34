"""Exact log-probs on a CUDA device: those of training are those of sampling in pages, bit for bit."""

import pytest
import torch

from fixtures.exact_log_probs import num_exact_tokens
from hybridflow.models.kernels import exact
from hybridflow.models.kernels.elementwise import rms_norm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(12))
def test_log_probs_of_training_are_those_of_sampling_on_a_gpu(gpu, tiny_model, restores_the_process, seed):
    lengths = {"lengths": (9, 40, 90), "prompt_lengths": (1, 33, 257, 400)}
    assert num_exact_tokens(tiny_model, seed, **lengths) > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_operation_on_few_rows_has_the_bits_of_many(gpu, dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, residual, logits = (
        torch.randn(shape, generator=generator).to(gpu, dtype)
        for shape in ((1000, 896), (1152, 896), (1152,), (1000, 1152), (1000, 5001))
    )
    labels = torch.arange(1000, device=gpu)

    def results(rows: slice) -> list[torch.Tensor]:
        norm = rms_norm if gpu.type == "cpu" else lambda *arguments: exact.recomputed(rms_norm, *arguments)
        return [
            exact.exact_linear(x[rows], weight, bias, residual[rows]),
            norm(x[rows], weight[0], 1e-6),
            exact.exact_log_probs(logits[rows], labels[rows], temperature=0.7)[0],
        ]

    whole = results(slice(None))
    for rows in (slice(0, 1), slice(7, 8), slice(3, 67), slice(500, 1000)):
        for few, many in zip(results(rows), whole, strict=True):
            assert torch.equal(few, many[rows])
    wanted = x.double() @ weight.double().T + bias.double() + residual.double()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(whole[0].double(), wanted, rtol=tolerance, atol=100 * tolerance)
