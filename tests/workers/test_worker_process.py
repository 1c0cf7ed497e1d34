"""What a worker process sets before a model is built, what it requires of its device, and how fast it can compute."""

import sys
from types import SimpleNamespace

import pytest
import torch

from hybridflow.controller import Worker
from hybridflow.engines import torch_engine
from hybridflow.errors import ModelConfigError
from hybridflow.runtime.matmul_peak import peak_flops
from hybridflow.workers import ActorWorker, RolloutWorker, rollout, worker_process
from hybridflow.workers.rollout import build_rollout_engine


def test_the_device_is_set_before_the_process_group_is_made(configure, monkeypatch):
    order = []
    for name in ("use_own_device", "join_process_group", "set_num_threads", "set_deterministic"):
        monkeypatch.setattr(worker_process, name, lambda *_, name=name: order.append(name))
    worker_process.prepare_worker_process(Worker(), configure())
    assert order[0] == "use_own_device"
    assert order[-1] == "join_process_group"


def test_ranks_that_share_a_process_count_its_peak_once(group):
    peaks = group(ActorWorker, num_workers=3).measure_peak("float32")
    assert peaks == [peak_flops(torch.float32), 0.0, 0.0]


def test_a_rank_without_memory_for_the_measurement_has_no_speed(group, monkeypatch):
    actors = group(ActorWorker)
    (speed,) = actors.measure_speed("float32")
    assert 0 < speed < 1e17

    def raise_out_of_memory(dtype):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(worker_process, "measure_flops_now", raise_out_of_memory)
    assert actors.measure_speed("float32") == [0.0]


@pytest.mark.parametrize(
    ("cls", "module"), [(ActorWorker, torch_engine), (RolloutWorker, rollout)], ids=["training", "generation"]
)
def test_a_rank_does_not_load_a_model_in_bfloat16_on_a_gpu_without_it(
    group, monkeypatch, gpu_without_bfloat16, cls, module
):
    monkeypatch.setattr(module, "own_device", lambda: gpu_without_bfloat16)
    with pytest.raises(ModelConfigError, match=r"model\.dtype='bfloat16' is not supported by cuda:0 \(V100"):
        group(cls, "model.dtype=bfloat16")


@pytest.mark.parametrize(("lengths", "longest"), [((30, 30), 60), ((40, 30), 64)])
def test_vllm_is_built_as_configured(configure, monkeypatch, lengths, longest):
    monkeypatch.setitem(sys.modules, "hybridflow.rollout.vllm", SimpleNamespace(VLLMRollout=lambda _, **keys: keys))
    sizes = [f"data.max_prompt_length={lengths[0]}", f"data.max_response_length={lengths[1]}"]
    for deterministic in (True, False):
        more = f"trainer.deterministic={str(deterministic).lower()}"
        recipe = configure("rollout.backend=vllm", more, *sizes)
        keys = build_rollout_engine(recipe, tokenizer=None, beside_trainer=not deterministic)
        assert (keys["seed_requests"], keys["can_sleep"]) == (deterministic, not deterministic)
        assert keys["max_model_len"] == longest  # at most the 64 positions of the model
