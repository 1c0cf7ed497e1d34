import pytest
import torch

from hybridflow.runtime import use_full_float32


@pytest.fixture(autouse=True)
def restored():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def allow_by_old_setting():
    torch.set_float32_matmul_precision("medium")


def allow_by_new_setting():
    torch.backends.cuda.matmul.fp32_precision = "tf32"


@pytest.mark.parametrize("allow_tf32", [allow_by_old_setting, allow_by_new_setting])
def test_tf32_is_off_though_it_was_allowed(allow_tf32):
    allow_tf32()
    use_full_float32()
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.matmul.fp32_precision in ("ieee", "none")
    assert torch.backends.cuda.matmul.allow_tf32 is False
