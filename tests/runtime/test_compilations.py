import importlib.util
import shutil

import pytest

from hybridflow.runtime import can_compile_for_gpu


@pytest.mark.parametrize(
    ("triton", "compilers", "answer"), [(True, {"gcc"}, True), (True, set(), False), (False, {"gcc"}, False)]
)
def test_a_gpu_needs_triton_and_a_c_compiler(monkeypatch, triton, compilers, answer):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if triton else None)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in compilers else None)
    assert can_compile_for_gpu() is answer
