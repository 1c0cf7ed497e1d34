"""Two ranks on one GPU train, reshard, save and load as on CPUs; in a rehearsal, on a simulated device.

NCCL refuses two ranks on one GPU; tensors go through the host instead (`fixtures.staged_collectives`).
"""

import pytest
import torch

from fixtures.layout_program import largest_errors, rows_for_losses

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-8
"""Relative, in float64. Planted bugs of tests/engines/test_layouts.py change more than ten times as much."""

LAYOUTS = {
    "data": {},
    "data, once per update, recomputed": {"once_per_update": True, "checkpointing": True, "max_tokens": 10},
    "data, adapters, offloaded to the host": {"offload": "host", "lora": 3},
    "data, parts, offloaded while idle": {"offload": "idle", "parts": 3},
    "sequence, offloaded to the host": {"sequence": 2, "offload": "host"},
    "sequence, critic": {"sequence": 2, "head": "value", "packing": False},
    "tensor, offloaded while idle": {"tensor": 2, "offload": "idle", "max_logits": 200},
    "tensor, offloaded to the host": {"tensor": 2, "offload": "host"},
}
RESHARDED = {"shards": {}, "tensor": {"tensor": 2}, "bfloat16": {"dtype": "bfloat16"}, "host": {"offload": "host"}}
PLANTED = ("bit", "gap")


def kind(options):
    return {key: options[key] for key in ("head", "lora") if key in options}


@pytest.fixture(scope="module")
def results(run_jobs_on_gpu, rollout_rows, tiny_model, tmp_path_factory):
    """Do all jobs in one pair of processes, and the references in one process."""
    out = tmp_path_factory.mktemp("two_ranks")
    rows_for_losses(rollout_rows).save_to_disk(out / "rows")
    common = {"model": tiny_model("qwen2"), "rows": out / "rows", "steps": 2}
    jobs = [(2, {"name": name, **common, **options}) for name, options in LAYOUTS.items()]
    kinds = {str(kind(options)): kind(options) for options in LAYOUTS.values()}
    jobs += [(1, {"name": name, **common, **options, "packing": False}) for name, options in kinds.items()]
    return run_jobs_on_gpu(out, jobs)


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_on_one_gpu_train_as_one_process(results, name):
    errors = largest_errors(results[name], results[str(kind(LAYOUTS[name]))])
    assert max(errors.values()) <= TOLERANCE, errors
