import pytest
import torch

from hybridflow.algorithms import log_probs_and_entropy_from_logits
from hybridflow.models.kernels.fused_log_probs import fused_log_probs

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore")  # warnings of torch.compile
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_log_probs_on_a_gpu_equal_those_in_float64(gpu, dtype):
    tokens, entries = (512, 151936) if gpu.type == "cuda" else (8, 512)
    generator = torch.Generator(gpu).manual_seed(0)
    logits = (4 * torch.randn(tokens, entries, generator=generator, device=gpu)).to(dtype)
    labels = torch.randint(entries, (tokens,), generator=generator, device=gpu)
    results = []
    for fused, x in ((gpu.type == "cuda", logits), (False, logits.double())):
        leaf = x.clone().requires_grad_()
        if fused:
            log_probs, entropies = fused_log_probs(leaf, labels, temperature=0.9, with_entropy=True)
        else:
            log_probs, entropies = log_probs_and_entropy_from_logits(leaf, labels, temperature=0.9)
        (log_probs.sum() + 0.1 * entropies.sum()).backward()
        results.append([log_probs.detach().double(), entropies.detach().double(), leaf.grad.double()])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=2**-7 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)


def test_fused_log_probs_need_no_float32_copy_of_the_logits(gpu):
    if gpu.type != "cuda":
        pytest.skip("measures the memory of a GPU")
    logits = torch.zeros(2048, 151936, dtype=torch.bfloat16, device=gpu, requires_grad=True)
    labels = torch.zeros(2048, dtype=torch.int64, device=gpu)
    fused_log_probs(logits, labels)[0].sum().backward()  # compiles
    logits.grad = None
    torch.cuda.reset_peak_memory_stats(gpu)
    before = torch.cuda.memory_allocated(gpu)
    fused_log_probs(logits, labels)[0].sum().backward()
    size = logits.numel() * logits.element_size()
    assert torch.cuda.max_memory_allocated(gpu) - before < 1.2 * size  # the gradient alone
