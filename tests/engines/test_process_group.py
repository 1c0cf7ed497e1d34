"""Engines in process groups that hybridflow did not make."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch._C._distributed_c10d import HashStore

from fixtures import layout_program as layouts
from hybridflow.engines import join_process_group
from hybridflow.engines.process_group import num_ranks, require_backends, require_one_rank_per_gpu
from hybridflow.errors import LostWorkerError, WorkerError

PROGRAM = Path(__file__).parent / "torchrun_program.py"
TOLERANCE = 1e-10


@pytest.fixture
def group_of_one():
    """Start a default group of one rank with given backends, and destroy it after the test."""

    def start(backends="gloo"):
        dist.init_process_group(backends, store=HashStore(), rank=0, world_size=1)

    yield start
    dist.destroy_process_group()


def test_an_engine_in_a_group_of_one_rank_is_alone(group_of_one, build_engine, tiny_model):
    group_of_one()
    engine = build_engine(tiny_model())
    assert engine.ranks.is_alone
    assert num_ranks() == 1


def test_joining_a_group_that_is_there_changes_nothing(group_of_one):
    group_of_one()
    world = dist.group.WORLD
    join_process_group(0, 1)
    assert dist.group.WORLD is world


def test_joining_beside_a_different_group_is_an_error(group_of_one):
    group_of_one()
    with pytest.raises(WorkerError, match=r"is rank 0 of 1 in a torch\.distributed group, but rank 1 of 2 in its work"):
        join_process_group(1, 2)


def test_a_rank_without_a_store_is_an_error_that_names_the_fix(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(
        WorkerError, match=r"rank 1 of 2 does not know .*MASTER_ADDR.*; start the processes with torch"
    ) as e:
        join_process_group(1, 2)
    assert not isinstance(e.value, LostWorkerError)  # running it again would not help


def test_a_group_without_a_backend_for_cpu_tensors_is_an_error(group_of_one):
    group_of_one("cuda:gloo")
    with pytest.raises(WorkerError, match=r"no backend for cpu tensors \(backends: cuda:gloo\).*init_process_group"):
        require_backends(torch.device("cpu"))


def test_two_ranks_on_one_gpu_are_an_error_that_names_them(group_of_one):
    group_of_one()
    require_one_rank_per_gpu(["node-1 GPU-8f1c", "node-1 GPU-77aa", "node-2 GPU-8f1c"])
    with pytest.raises(WorkerError, match=r"ranks 0 and 2 have the same GPU \(node-1 GPU-8f1c\).*one process per GPU"):
        require_one_rank_per_gpu(["node-1 GPU-8f1c", "node-1 GPU-77aa", "node-1 GPU-8f1c"])


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: two processes of torchrun")
def test_two_processes_of_torchrun_train_as_one_process(rollout_rows, tiny_model, tmp_path):
    layouts.rows_for_losses(rollout_rows).save_to_disk(tmp_path / "rows")
    model = str(tiny_model("qwen2"))

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", PROGRAM]
    path = os.pathsep.join([str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    arguments = [model, tmp_path / "rows", tmp_path]
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["built_before_is_alone"]

    numbers, weights = layouts.train(model=model, rows=str(tmp_path / "rows"))
    found = SimpleNamespace(**result, weights=load_file(tmp_path / "weights.safetensors"))
    assert max(layouts.largest_errors(found, SimpleNamespace(**numbers, weights=weights)).values()) <= TOLERANCE
