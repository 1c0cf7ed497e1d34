"""The weight sync inside one process: the rollout engine gets the trainer's own tensors, on their device."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.config import load_config
from hybridflow.engines import TorchEngine
from hybridflow.models.loading import build_with_placeholders
from hybridflow.rollout import EmbeddedRollout
from hybridflow.rollout.weight_sync.fingerprint import Fingerprints
from hybridflow.rollout.weight_sync.in_process import InProcess, hand_over
from hybridflow.rollout.weight_sync.receiver import WeightReceiver
from hybridflow.rollout.weight_sync.sender import WeightSender

ON_HOST = {"cpu", "numpy", "tolist", "pin_memory", "__array__", "to", "cuda", "type"}
"""Calls of tensors that may copy to another device, among them those that need no kernel for a tensor on a CPU."""


class Copies(TorchDispatchMode):
    """Count the bytes that each operation writes by copying, other than to tensors without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        name = func.overloadpacket.__name__
        if isinstance(result, Tensor) and not result.is_meta and ("copy" in name or name in ("clone", "cat", "stack")):
            self.num_bytes[name] += result.nbytes
        return result


class HostCalls(TorchFunctionMode):
    """Count the calls that may copy a tensor of more than 8 elements to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        large = args and isinstance(args[0], Tensor) and args[0].numel() > 8 and not args[0].is_meta
        if name in ON_HOST and large and not (name == "to" and args[1:2] == ("meta",)):
            self.found[name] += 1
        return func(*args, **kwargs or {})


def sync(path: Any, engine: Any) -> tuple[TorchEngine, Copies, HostCalls, int]:
    """Hand a trainer's weights over; require that the engine got its tensors, and return what was copied."""
    settings = load_config(None, [f"model.path={path}", "rollout.sync_bucket_bytes=20000"])
    trainer = TorchEngine(str(path), "policy", model=settings.model, memory=settings.memory)
    sender, receiver = WeightSender(trainer, settings, InProcess), WeightReceiver(engine, "float32", InProcess())
    places: dict[str, int] = {}
    load = engine.load

    def recorded(weights: Any) -> None:
        given = list(weights)
        places.update({name: tensor.data_ptr() for name, tensor in given})
        load(given)

    engine.load = recorded
    Fingerprints({"": torch.zeros(8)}).read()  # the first one of a process moves a table of constants to the device
    with Copies() as copies, HostCalls() as calls:
        num_bytes = hand_over(sender, receiver)
    del engine.load
    receiver.check(sender.compute_probe())
    assert num_bytes > 0
    assert places == {name: parameter.data_ptr() for name, parameter in trainer.model.named_parameters()}
    return trainer, copies, calls, num_bytes


def test_embedded_engine_gets_the_trainers_tensors(tiny_model):
    path = tiny_model("qwen2")
    model = build_with_placeholders(path, "policy", torch.float32, torch.device("cpu"))
    trainer, copies, _, _ = sync(path, EmbeddedRollout(model, shares_model=False))
    pointers = [[parameter.data_ptr() for parameter in each.parameters()] for each in (trainer.model, model)]
    assert pointers[0] == pointers[1]
    assert copies.num_bytes == {}


@pytest.mark.vllm
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_vllm_gets_the_trainers_tensors_and_nothing_goes_through_the_host(tiny_model, tied):
    from fixtures.vllm_engines import lend_engine

    path = tiny_model("qwen2", hidden_size=64, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied)
    trainer, copies, calls, num_bytes = sync(path, lend_engine(path, weights=False))
    # The trainer's cast to the dtype of compute, which returns the same tensor.
    assert calls.found == {"to": len(list(trainer.model.named_parameters()))}
    assert set(copies.num_bytes) == {"copy_"}
    # vLLM loads a layer's weights into new memory, then copies them into the memory that CUDA graphs know.
    assert num_bytes <= copies.num_bytes["copy_"] <= 2 * num_bytes
