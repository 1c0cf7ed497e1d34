import pytest
import torch

from hybridflow.runtime.threads import use_full_float32

pytestmark = pytest.mark.gpu


def test_a_float32_product_keeps_all_bits_of_its_factors(gpu):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        use_full_float32()
        position = torch.full((64, 64), 4097.0, device=gpu)  # 13 bits; TF32 has 11
        assert torch.equal(position @ torch.eye(64, device=gpu), position)
    finally:
        torch.set_float32_matmul_precision(before)
