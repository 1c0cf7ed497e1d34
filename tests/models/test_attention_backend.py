import dataclasses
import logging
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig

from hybridflow.models.attention_backend import AttentionCase, attention_for, has_triton

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CPU, H100 = AttentionCase(FP32, 64, 64, True, has_kernel=True), AttentionCase(BF16, 128, 128, True, False, (9, 0), True)
RTX = dataclasses.replace(H100, capability=(8, 9))
PAGE = (Path(__file__).parents[2] / "docs" / "gpu-attention.md").read_text("utf-8")

CASES = {  # case: (changes, implementation for packed rows, for shared prompts)
    "CPU": (CPU, {}, "cpu_kernel", "cpu_kernel"),
    "CPU, wide values": (CPU, {"value_dim": 128}, "sdpa", "sdpa"),
    "CPU, float64": (CPU, {"dtype": FP64, "has_kernel": False}, "sdpa", "sdpa"),
    "CPU, bfloat16, no compiler": (CPU, {"dtype": BF16, "has_kernel": False}, "sdpa", "sdpa"),
    "H100": (H100, {}, "varlen", "flex"),
    "H100, float32": (H100, {"dtype": FP32}, "sdpa", "sdpa"),
    "H100, float64": (H100, {"dtype": FP64}, "sdpa", "sdpa"),
    "H100, no Triton": (H100, {"has_triton": False}, "varlen", "sdpa"),
    "H100, dim 8": (H100, {"head_dim": 8, "value_dim": 8}, "varlen", "sdpa"),
    "H100, dim 80": (H100, {"head_dim": 80, "value_dim": 80}, "varlen", "flex"),
    "H100, dim 100": (H100, {"head_dim": 100, "value_dim": 100}, "sdpa", "flex"),
    "H100, dim 224": (H100, {"head_dim": 224, "value_dim": 224}, "varlen", "flex"),
    "H100, dim 256": (H100, {"head_dim": 256, "value_dim": 256}, "varlen", "flex"),
    "H100, dim 264": (H100, {"head_dim": 264, "value_dim": 264}, "sdpa", "sdpa"),
    "H100, wide values": (H100, {"head_dim": 64}, "sdpa", "flex"),
    "H100, values too wide": (H100, {"value_dim": 512}, "sdpa", "sdpa"),
    "RTX 4090": (RTX, {}, "varlen", "flex"),
    "RTX 4090, dim 224": (RTX, {"head_dim": 224, "value_dim": 224}, "sdpa", "flex"),
    "RTX 4090, dim 224, no gradient": (
        RTX,
        {"head_dim": 224, "value_dim": 224, "has_gradient": False},
        *("varlen", "flex"),
    ),
    "RTX 4090, dim 256": (RTX, {"head_dim": 256, "value_dim": 256}, "varlen", "flex"),
    "B200": (H100, {"capability": (10, 0)}, "varlen", "flex"),
    "T4, float16": (H100, {"capability": (7, 5), "dtype": FP16}, "sdpa", "sdpa"),
    "newer than PyTorch's flash attention": (H100, {"capability": (13, 0)}, "sdpa", "flex"),
}
CASES = {name: (dataclasses.replace(base, **changes), *chosen) for name, (base, changes, *chosen) in CASES.items()}


@pytest.mark.parametrize(("case", "packed", "shared"), CASES.values(), ids=CASES)
def test_implementation_is_chosen_by_the_table(case, packed, shared):
    assert attention_for(case, shares_prompts=False) == packed
    assert attention_for(case, shares_prompts=True) == shared


def test_table_of_the_documentation_equals_the_choice():
    rows = re.findall(r"^\| (.+?) \| (.+?) \| `(\w+)` \| `(\w+)` \|$", PAGE, re.MULTILINE)
    table = {(device, call): (packed, shared) for device, call, packed, shared in rows}
    gpu = dataclasses.replace(H100, capability=(8, 0))
    odd = dataclasses.replace(gpu, head_dim=100, value_dim=100)
    wide = dataclasses.replace(gpu, head_dim=512, value_dim=512)
    cases = {
        ("CPU with a C compiler", "float32, bfloat16"): [CPU, dataclasses.replace(CPU, dtype=BF16)],
        ("CPU", "float64; no C compiler"): [CASES["CPU, float64"][0], CASES["CPU, bfloat16, no compiler"][0]],
        ("GPU of capability 8.0 or newer", "bfloat16, float16"): [gpu, H100, dataclasses.replace(gpu, dtype=FP16)],
        ("the same", "head dimension above 16, not a multiple of 8"): [odd],
        ("the same", "head dimension above 256"): [wide],
        ("the same, without Triton or a C compiler", "bfloat16, float16"): [CASES["H100, no Triton"][0]],
        ("GPU", "float32, float64"): [CASES["H100, float32"][0], CASES["H100, float64"][0]],
        ("older GPU", "float16, float32"): [CASES["T4, float16"][0]],
    }
    chosen = {
        row: {tuple(attention_for(case, shares_prompts=shares) for shares in (False, True)) for case in members}
        for row, members in cases.items()
    }
    assert {row: {implementations} for row, implementations in table.items()} == chosen


def test_case_is_read_from_tensors(monkeypatch):
    query, value = torch.zeros(2, 6, 3, 8), torch.zeros(2, 2, 3, 4, dtype=FP64, requires_grad=True)
    monkeypatch.setattr("hybridflow.models.attention_backend.serves", lambda x: x is query)
    assert AttentionCase.of(query, value, value) == AttentionCase(FP32, 8, 4, True, has_kernel=True)
    with torch.no_grad():
        assert AttentionCase.of(query, value, value) == AttentionCase(FP32, 8, 4, False, has_kernel=True)


def test_case_of_a_model_has_its_head_dimension():
    config = LlamaConfig(hidden_size=64, num_attention_heads=4)
    assert AttentionCase.of_model(config, FP64, torch.device("cpu")) == AttentionCase(FP64, 16, 16, True)
    config.head_dim = 32
    assert AttentionCase.of_model(config, FP64, torch.device("cpu")) == AttentionCase(FP64, 32, 32, True)


def test_case_of_a_model_on_a_gpu_has_its_capability(monkeypatch):
    monkeypatch.setattr("hybridflow.models.attention_backend.capability_of", lambda device: (9, device.index))
    monkeypatch.setattr("hybridflow.models.attention_backend.has_triton", lambda: True)
    config = LlamaConfig(hidden_size=512, num_attention_heads=4)
    with FakeTensorMode():
        case = AttentionCase.of_model(config, BF16, torch.device("cuda", 0))
    assert case == AttentionCase(BF16, 128, 128, True, capability=(9, 0), has_triton=True)


@pytest.mark.parametrize(
    ("triton", "compiler", "missing"),
    [(True, "/usr/bin/gcc", ""), (True, None, "a C compiler"), (False, "gcc", "Triton")],
)
def test_missing_triton_or_compiler_is_one_warning(monkeypatch, caplog, triton, compiler, missing):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("hybridflow.models.attention_backend.find_spec", lambda name: triton or None)
    monkeypatch.setattr("hybridflow.models.attention_backend.shutil.which", lambda name: compiler)
    with caplog.at_level(logging.WARNING, logger="hybridflow"):
        has_triton.cache_clear()
        assert [has_triton(), has_triton()] == [not missing] * 2
    has_triton.cache_clear()
    assert [record.getMessage().partition(" is not installed")[0] for record in caplog.records] == [missing] * bool(
        missing
    )
