"""Two ranks on one GPU train, reshard, save and load as on CPUs; in a rehearsal, on a simulated device.

NCCL refuses two ranks on one GPU; tensors go through the host instead (`fixtures.staged_collectives`).
"""

from importlib.util import find_spec

import pytest
import torch

from fixtures.layout_program import largest_errors, rows_for_losses

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-8
"""Relative, in float64. Planted bugs of tests/engines/test_layouts.py change more than ten times as much."""

LAYOUTS = {
    "data": {},
    "replicas": {"replicas": 2, "max_tokens": 10},
    "data, once per update, recomputed": {"once_per_update": True, "checkpointing": True, "max_tokens": 10},
    "data, adapters, offloaded to the host": {"offload": "host", "lora": 3},
    "data, parts, offloaded while idle": {"offload": "idle", "parts": 3},
    "sequence, offloaded to the host": {"sequence": 2, "offload": "host"},
    "sequence, critic": {"sequence": 2, "head": "value", "packing": False},
    "tensor, offloaded while idle": {"tensor": 2, "offload": "idle", "max_logits": 200},
    "tensor, offloaded to the host": {"tensor": 2, "offload": "host"},
    "tensor, compiled": {"tensor": 2, "compile": True},
    "experts": {"family": "qwen2_moe", "max_tokens": 10},
    "experts, expert parallel": {"family": "qwen2_moe", "expert": 2, "checkpointing": True},
}
if not find_spec("peft"):  # without which an adapter is an error, and ends the ranks before later layouts
    LAYOUTS = {name: options for name, options in LAYOUTS.items() if "lora" not in options}
BIT = {"plant": "bit"}
RESHARDED = {"shards": {}, "to one rank": {"engine_ranks": 0}, "host": {"offload": "host"}, "changed bit": BIT}
SYNCED = ("float32", "bfloat16")


def kind(options):
    return {key: options[key] for key in ("head", "lora", "family") if key in options}


@pytest.fixture(scope="module")
def results(run_jobs_on_gpu, rollout_rows, tiny_model, tmp_path_factory):
    """Do all jobs in one pair of processes, and the references in one process."""
    out = tmp_path_factory.mktemp("two_ranks")
    rows_for_losses(rollout_rows).save_to_disk(out / "rows")
    model = tiny_model("qwen2", num_key_value_heads=4, intermediate_size=52, vocab_size=41)
    common = {"model": model, "rows": out / "rows", "steps": 2}

    def job(name, options):
        family = {"model": tiny_model(options["family"])} if "family" in options else {}
        return {"name": name, **common, **{key: option for key, option in options.items() if key != "family"}, **family}

    jobs = [(2, job(name, options)) for name, options in LAYOUTS.items()]
    kinds = {str(kind(options)): kind(options) for options in LAYOUTS.values()}
    for name, options in RESHARDED.items():
        jobs += [(2, {"name": f"reshard {name}", "do": "reshard", "model": model, "dtype": "float32", **options})]
    jobs += [(2, {"name": name, "do": "sync", "model": model, "dtype": name}) for name in SYNCED]
    saved = out / "checkpoint"
    saved.mkdir()
    for name, action in {"saved": {"save": saved, "in_background": True}, "loaded": {"load": saved}}.items():
        jobs += [(2, {"name": name, "do": "resume", "offload": "idle", **common, **action})]
    jobs += [(1, job(name, options | {"packing": False})) for name, options in kinds.items()]
    return run_jobs_on_gpu(out, jobs)


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_on_one_gpu_train_as_one_process(results, name):
    errors = largest_errors(results[name], results[str(kind(LAYOUTS[name]))])
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("name", RESHARDED)
def test_slices_on_one_gpu_equal_the_parts_of_whole_weights(results, name):
    for rank, result in enumerate(results[f"reshard {name}"].ranks):
        is_changed = RESHARDED[name] is BIT
        assert ("checksums do not add up" in result["error"]) == is_changed, result["error"]
        assert bool(result["wrong"]) == (is_changed and rank == 1), result["wrong"]
        assert result["exchanges"] > 0


@pytest.mark.parametrize("dtype", SYNCED)
def test_broadcast_between_two_ranks_on_one_gpu_sends_every_weight(results, dtype):
    for result in results[dtype].ranks:
        assert result["wrong"] == []
        assert result["num_buckets"] > 3


def test_two_ranks_on_one_gpu_resume_with_the_same_bits(results):
    saved, loaded = results["saved"].weights, results["loaded"].weights
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
