import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybridflow.models.kernels.paged_attention import append_to_pages, paged_attention
from hybridflow.models.kernels.triton_support import runs_triton

ROOT = Path(__file__).parents[3]
TRITON = ROOT / ".triton"


def test_a_row_attends_to_its_own_tokens_in_order():
    keys, values = (torch.full((4, 2, 1, 1), torch.nan, dtype=torch.float64) for _ in range(2))
    token = torch.ones(3, 1, 1, dtype=torch.float64)
    append_to_pages(
        0 * token, token * torch.tensor([[[3.0]], [[6.0]], [[12.0]]]), keys, values, torch.tensor([6, 7, 2])
    )
    tables = torch.tensor([[3, 1], [3, 0], [1, 0]], dtype=torch.int32)
    out = paged_attention(token, keys, values, tables, torch.tensor([3, 1, 1]), scaling=1.0)
    assert out.flatten().tolist() == [7.0, 3.0, 12.0]  # the mean of 3, 6 and 12; 3; 12


def test_heads_share_their_key_value_head():
    keys, values = torch.zeros(1, 4, 2, 1), torch.tensor([1.0, 2.0]).expand(4, 2)[None, :, :, None].contiguous()
    out = paged_attention(
        torch.ones(1, 6, 1), keys, values, torch.tensor([[0]], dtype=torch.int32), torch.tensor([3]), 1.0
    )
    assert out.flatten().tolist() == [1.0] * 3 + [2.0] * 3


def test_triton_kernels_do_not_run_on_a_cpu():
    with torch.no_grad():
        assert not runs_triton(torch.zeros(2, 64, dtype=torch.bfloat16))


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: Triton is not in this environment")
@pytest.mark.parametrize("mode", ["interpret", "compile"])
def test_triton_kernels_equal_pytorch_and_compile_for_an_h100(mode, tmp_path):
    if not (TRITON / "triton").exists():
        pytest.skip("Triton is not installed in .triton; run `make .triton`, or `make test-all`.")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), str(TRITON)])
    environment = os.environ | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}
    environment |= {"TRITON_INTERPRET": "1"} if mode == "interpret" else {}
    command = [sys.executable, Path(__file__).with_name("triton_program.py"), mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
