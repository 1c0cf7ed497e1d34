import os
from collections.abc import Iterator

import pytest
import torch
import torch.utils.deterministic

from hybridflow.errors import ConfigError
from hybridflow.runtime.threads import count_physical_cores, set_deterministic, set_num_threads, use_full_float32


def fills_memory() -> bool:
    return torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(autouse=True)
def _restored_settings() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fill = fills_memory()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # pyright: ignore[reportAttributeAccessIssue]


def test_the_number_of_threads_is_set_and_0_means_the_physical_cores():
    assert set_num_threads(3) == 3 == torch.get_num_threads()
    assert set_num_threads(0) == count_physical_cores()
    assert 1 <= count_physical_cores() <= (os.cpu_count() or 1)
    with pytest.raises(ConfigError, match=r"controller\.threads=-1 is invalid: must be at least 0; use 0"):
        set_num_threads(-1)
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert count_physical_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_deterministic_mode_rejects_nondeterministic_kernels_until_left():
    set_deterministic(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not fills_memory()
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.ones(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]), accumulate=False)
    set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()


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
