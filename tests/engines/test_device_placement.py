"""The whole life of an engine on a simulated device: every tensor is where it should be, and the numbers are the CPU's.

The device raises as a GPU does if an operation gets a tensor of the host; see `fixtures.simulated_device`.
"""

import sys

import pytest
import torch
from torch.utils import _foreach_utils

from fixtures.simulated_device import META, MixedDevicesError, SimulatedDevice
from hybridflow.checkpoint import StateCopy, describe_state, load_state, read_state_into, save_state
from hybridflow.config import LoRAConfig, MemoryConfig, ModelConfig, OptimizerConfig
from hybridflow.engines import TorchEngine, torch_engine
from hybridflow.protocol import DataProto
from hybridflow.rollout import EmbeddedRollout, Request, SamplingParams, generate, load_weights
from hybridflow.weight_sync import fill_buckets, plan_buckets, spec_of

optimizer = sys.modules["torch.optim.optimizer"]  # `torch.optim` hides it


@pytest.fixture
def device(monkeypatch):
    """Simulate the device of this process for the test."""
    monkeypatch.setattr(torch_engine, "own_device", lambda: META if simulated.is_on else torch.device("cpu"))
    monkeypatch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: ["cpu", "meta"])
    monkeypatch.setattr(_foreach_utils, "_get_foreach_kernels_supported_devices", lambda: ["cpu", "meta"])
    simulated = SimulatedDevice()
    with simulated:
        yield simulated


@pytest.fixture
def rows(rollout_rows):
    return rollout_rows([3, 3, 5, 2], [4, 6, 1, 3])


def loss(outputs, part):
    return -sum(values.sum() for values in outputs.values()) / 40, {}


def build(path, head="policy", dtype="float64", *, learns=True, rank=0, **options):
    memory = {"max_tokens_per_micro_batch": 16, **options.pop("memory", {})}
    return TorchEngine(
        str(path),
        head,
        model=ModelConfig(path=str(path), dtype=dtype, **options.pop("model", {})),
        memory=MemoryConfig(**memory),
        optimizer=OptimizerConfig(lr=1e-3) if learns else None,
        lora=LoRAConfig(rank=rank),
        **options,
    )


def tensors_of(engine):
    """Return every tensor of an engine by name: weights, buffers, masters, optimizer state."""
    found = {**dict(engine.model.named_parameters()), **dict(engine.model.named_buffers())}
    found |= {f"master {name}": parameter for name, parameter in engine.parameters.items()}
    if engine.optimizer_config:
        for number, moments in enumerate(engine.optimizer.state.values()):
            found |= {f"{key} {number}": value for key, value in moments.items()}
    return found


def require_on_device(engine):
    assert {name: str(tensor.device) for name, tensor in tensors_of(engine).items() if tensor.device != META} == {}


LIVES = {
    "a policy": {},
    "padded rows": {"memory": {"packing": False}},
    "prompts computed for each row": {"memory": {"share_prompts": False}},
    "recomputed activations": {"model": {"gradient_checkpointing": True}},
    "adapters": {"rank": 2},
    "bfloat16": {"dtype": "bfloat16"},
    "a critic": {"head": "value"},
    "a reference": {"learns": False},
    "offload": {"offload": "idle"},
    "offload in bfloat16": {"offload": "idle", "dtype": "bfloat16"},
}


def live(engine, rows, directory):
    """Run every method of an engine, save and restore it, and return its numbers."""
    is_policy, learns = engine.head == "policy", engine.optimizer_config is not None
    more = {"with_entropy": True, "with_sum_squared_probs": True, "top_k": 2} if is_policy else {}
    numbers = list(engine.forward(rows, **more).values())
    if learns:
        numbers += [torch.tensor(engine.update(rows, loss, with_entropy=is_policy).grad_norm) for _ in range(2)]
    directory.mkdir()
    save_state(StateCopy()(engine.state_dict()), directory / "actor")
    if engine.is_sharded or not learns:
        read_state_into(engine.state_dict(), directory / "actor")
    engine.load_shards(describe_state(directory / "actor"), lambda state: read_state_into(state, directory / "actor"))
    engine.load_state_dict(load_state(directory / "actor"))
    if learns:
        numbers.append(torch.tensor(engine.update(rows, loss).grad_norm))
    numbers += engine.forward(rows).values()
    return [values.double() for values in numbers]


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("family", ["qwen2"])
def test_an_engine_lives_on_its_device(tiny_model, rows, life, family, device, tmp_path):
    options = LIVES[life]
    engine = build(tiny_model(family), **options)
    require_on_device(engine)
    found = live(engine, rows, tmp_path / "device")
    require_on_device(engine)
    with device.off():
        expected = live(build(tiny_model(family), **options), rows, tmp_path / "host")
    tolerance = {"rtol": 0.02, "atol": 0.05} if "bfloat16" in life else {"rtol": 1e-5, "atol": 1e-6}
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)
