"""Workers use only the `TrainEngine` Protocol of an engine."""

import inspect
import re
from pathlib import Path
from types import FunctionType

import pytest
import torch

import hybridflow
from hybridflow.engines import TorchEngine, TrainEngine
from hybridflow.protocol import DataProto
from hybridflow.workers import (
    ActorRolloutWorker,
    ActorWorker,
    CriticWorker,
    OfflinePolicyWorker,
    PreferenceModelWorker,
    ReferenceWorker,
    model_worker,
)

SOURCE = Path(hybridflow.__file__).parent
NAMES = {
    *(name for name, value in vars(TrainEngine).items() if isinstance(value, (FunctionType, property))),
    *inspect.get_annotations(TrainEngine),
} - {"__init__", "__subclasshook__"}


class OnlyTheProtocol:
    """A TorchEngine that exposes only the names of the Protocol."""

    def __init__(self, *args, **kwargs):
        object.__setattr__(self, "_engine", TorchEngine(*args, **kwargs))

    def __getattribute__(self, name):
        if name not in NAMES:
            raise AssertionError(f"TrainEngine has no '{name}'")
        return getattr(object.__getattribute__(self, "_engine"), name)

    def __setattr__(self, name, value):
        if name not in NAMES:
            raise AssertionError(f"TrainEngine has no '{name}'")
        setattr(object.__getattribute__(self, "_engine"), name, value)


@pytest.fixture(autouse=True)
def hidden(monkeypatch):
    monkeypatch.setattr(model_worker, "TorchEngine", OnlyTheProtocol)


@pytest.mark.parametrize(
    ("worker", "computes", "updates"),
    [
        (ActorWorker, ["compute_log_probs"], ["update_actor"]),
        (ActorRolloutWorker, ["compute_log_probs"], ["update_actor"]),
        (CriticWorker, ["compute_values"], ["update_critic"]),
        (ReferenceWorker, ["compute_ref_log_probs"], []),
        (OfflinePolicyWorker, ["compute_log_probs"], ["update_sft", "update_dpo"]),
        (PreferenceModelWorker, ["compute_scores"], ["update_reward_model"]),
    ],
)
def test_workers_use_only_the_engine_protocol(group, learnable, with_mini_batches, tmp_path, worker, computes, updates):
    workers = group(worker, "rollout.group_size=2", "model.dtype=float64")
    rows = learnable(more=("old_log_probs", "values", "returns"))
    rows = rows.union(DataProto.from_dict({"loss_slopes": torch.ones(4)}))
    assert workers.find_token_budget(2, 2)[0] >= 4
    workers.set_token_budget(512)
    for method in computes:
        getattr(workers, method)(rows)
    for method in updates:
        getattr(workers, method)(with_mini_batches(rows, [0, 1], [2, 3]))
    workers.save(str(tmp_path))
    workers.load(str(tmp_path))


def test_a_policy_with_adapters_uses_only_the_engine_protocol(group, learnable):
    actor = group(ActorRolloutWorker, "lora.rank=2", "rollout.group_size=2")
    actor.compute_ref_log_probs(learnable())
    prompts = {
        "prompts": torch.tensor([[5, 6]]),
        "prompt_mask": torch.ones(1, 2).bool(),
        "group_ids": torch.tensor([0]),
    }
    actor.generate_sequences(DataProto.from_dict(prompts, meta_info={"noise_key": [0, 0, 0]}))


def test_only_one_line_of_the_workers_names_the_torch_engine():
    naming = {
        str(file.relative_to(SOURCE)): len(re.findall(r"\bTorchEngine\(", file.read_text(encoding="utf-8")))
        for package in ("workers", "trainers", "cli", "rollout", "weight_sync")
        for file in sorted((SOURCE / package).rglob("*.py"))
        if "TorchEngine" in file.read_text(encoding="utf-8")
    }
    assert naming == {"workers/model_worker.py": 1}
