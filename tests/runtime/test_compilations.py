import importlib.util
import shutil

import pytest
import torch

from hybridflow.runtime import can_compile_for_gpu, take_compilations


def test_graphs_compiled_since_the_last_call_are_counted():
    torch._dynamo.reset()
    take_compilations()
    double = torch.compile(lambda x: 2 * x, backend="eager", dynamic=True)
    for size in (4, 5, 6):
        double(torch.ones(size))
    assert [take_compilations(), take_compilations()] == [1, 0]
    double(torch.ones(2, 2))  # another number of axes
    assert take_compilations() == 1


@pytest.mark.parametrize(
    ("triton", "compilers", "answer"), [(True, {"gcc"}, True), (True, set(), False), (False, {"gcc"}, False)]
)
def test_a_gpu_needs_triton_and_a_c_compiler(monkeypatch, triton, compilers, answer):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if triton else None)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in compilers else None)
    assert can_compile_for_gpu() is answer
