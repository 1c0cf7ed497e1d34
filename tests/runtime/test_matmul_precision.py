import pytest
import torch

from hybridflow.runtime import use_full_float32


@pytest.mark.parametrize("setting", ["old", "new"])
def test_tf32_is_off_though_it_was_allowed(setting):
    before = torch.get_float32_matmul_precision()
    try:
        if setting == "old":
            torch.set_float32_matmul_precision("medium")
        else:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        use_full_float32()
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cuda.matmul.fp32_precision in ("ieee", "none")
        assert torch.backends.cuda.matmul.allow_tf32 is False
    finally:
        torch.set_float32_matmul_precision(before)
