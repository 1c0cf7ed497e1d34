"""`model.compile = "auto"`: compiled on a GPU with Triton, for models and layouts that support it."""

import pytest
import torch

from hybridflow.config import MemoryConfig, ModelConfig
from hybridflow.engines import TorchEngine


@pytest.fixture
def compiles(tiny_model, monkeypatch):
    """Return a function that says whether an engine on a device compiles its layers."""

    def build(device, compile, family="llama", *, has_triton=True, tensor=1):
        monkeypatch.setattr("hybridflow.engines.torch_engine.can_compile_for_gpu", lambda: has_triton)
        path = str(tiny_model(family, **{"sliding_window": None} if family == "mistral" else {}))
        engine = TorchEngine(path, "policy", model=ModelConfig(path=path), memory=MemoryConfig())
        engine.device, engine.ranks.tensor = torch.device(device), tensor
        return engine._compiles(compile)

    return build


@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        (("cuda", "auto"), {}, True),
        (("cpu", "auto"), {}, False),
        (("cuda", "auto"), {"has_triton": False}, False),
        (("cuda", "auto", "mistral"), {}, False),
        (("cuda", "auto"), {"tensor": 2}, True),
        (("cuda", False), {}, False),
        (("cpu", True), {}, True),
    ],
)
def test_auto_compiles_where_it_is_supported_and_faster(compiles, arguments, options, expected):
    assert compiles(*arguments, **options) is expected
