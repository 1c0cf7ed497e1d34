"""Runs whose workers really have too little memory (RLIMIT_DATA): they go on with fewer tokens at a time, to the end.

A reward function in the process of a worker limits its memory to what it has, and some more, before the rows are
learned. A new process does the same, so that the run has to manage with the limit.
"""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from ray._private.utils import get_system_memory, get_used_memory
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.runtime.observe import read_jsonl

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.ray,
    pytest.mark.own_run("recovered: with little memory"),
    pytest.mark.skipif(sys.platform != "linux", reason="a limit of memory"),
]

MIB = 2**20
TOKENS, LONGEST, STEPS = 6400, 28, 2
"""A batch has about as many tokens."""

REWARD = """
import resource

def score(solution_str, **sample):
    limit, most = resource.getrlimit(resource.RLIMIT_DATA)
    if limit == most:
        with open("/proc/self/status") as file:
            (used,) = (int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (used + {more}, most))
    return len(solution_str) % 11 / 10
"""

ON_RAY = ("controller.backend=ray", "controller.cpus_per_worker=0.5", "reward.processes=0", "recovery.backoff_s=0.01")
PLACES = {
    "training": ("algorithm.kl_in_loss=false",),
    "scoring": (
        *("algorithm.kl_in_loss=true", "algorithm.advantage=gae", "placement.pools={main=[1],second=[1]}"),
        *("placement.roles={reference='second',critic='second',reward='second'}",),
    ),
    "generation": (
        *("algorithm.kl_in_loss=false", "model.path={directory}/wide", "memory.max_tokens_per_micro_batch=800"),
        *("placement.pools={main=[1],second=[1]}", "placement.roles={rollout='second',reward='second'}"),
        *("reward.function={directory}/tight.py:score", "controller.compiled_kernels=false"),
    ),
}


@pytest.fixture(scope="module")
def runs(task, tmp_path_factory, run_in_turn):
    """Return the runs of PLACES, and what they logged as `log`."""
    directory = tmp_path_factory.mktemp("memory")
    for name, size in (("model", 4096), ("wide", 32768)):  # so that memory is that of activations
        config = AutoConfig.from_pretrained(task / "model")
        config.intermediate_size = size
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory / name)
        for file in (task / "model").glob("token*"):
            (directory / name / file.name).write_bytes(file.read_bytes())
    (directory / "reward.py").write_text(REWARD.replace("{more}", str(130 * MIB)))
    at_start = "import os\nif 'RANK' in os.environ:\n    score('')\n"  # in a worker, before it generates
    (directory / "tight.py").write_text(REWARD.replace("{more}", str(150 * MIB)) + at_start)
    common = ["train", f"{task}/rl.toml", *ON_RAY, f"model.path={directory}/model", "data.val_files=[]"]
    common += [f"trainer.total_steps={STEPS}", "rollout.group_size=32", f"memory.max_tokens_per_micro_batch={TOKENS}"]
    common += [f"reward.function={directory}/reward.py:score"]
    log = run_in_turn(
        *(
            [*common, *(change.replace("{directory}", str(directory)) for change in changes), f"trainer.run_dir={run}"]
            for run, changes in ((directory / place, changes) for place, changes in PLACES.items())
        ),
        shares_cluster=True,
    )
    return SimpleNamespace(log=log, **{place: directory / place for place in PLACES})


@pytest.mark.parametrize("place", PLACES)
def test_a_run_without_memory_goes_on_to_its_end_with_fewer_tokens(runs, place):
    run = getattr(runs, place)
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == list(range(1, STEPS + 1))
    if place == "generation":  # with fewer sequences at a time, within the step
        assert not (run / "recoveries.jsonl").exists()
        assert "generation ran out of memory with " in runs.log
        return
    step = {"training": "an update", "scoring": "a forward pass"}[place]
    recoveries = read_jsonl(run / "recoveries.jsonl")
    assert {row["action"] for row in recoveries} == {"smaller"}
    assert any(f"out of memory in {step}, nothing was applied" in row["errors"][0] for row in recoveries)
    budgets = json.loads((run / "token_budgets.json").read_text())["budgets"]
    assert all(LONGEST <= budget < TOKENS for budget in budgets.values())
    assert "tokens per micro-batch from now on: " in runs.log


GREEDY = """
import os, time

def score(solution_str, **sample):
    if not os.path.exists("{flag}"):
        open("{flag}", "w").close()
        blocks = [b"x" * (128 * 2**20) for _ in range({num_blocks})]
        time.sleep(100)
    return len(solution_str) % 11 / 10
"""


def test_a_worker_that_ray_kills_to_free_memory_is_replaced(task, tmp_path, start):
    """Its node has had too little memory, so the run goes on with fewer tokens at a time."""
    threshold = (get_used_memory() + 5 * 2**30) / get_system_memory()  # other tests may use some of it
    if threshold > 0.8:
        pytest.skip("needs 10 GiB of free memory")
    (tmp_path / "reward.py").write_text(GREEDY.format(flag=tmp_path / "flag", num_blocks=80))
    command = ["train", f"{task}/rl.toml", *ON_RAY, f"trainer.run_dir={tmp_path}/run", "data.val_files=[]"]
    command += ["trainer.total_steps=2", f"reward.function={tmp_path}/reward.py:score"]
    monitor = {"RAY_memory_usage_threshold": str(threshold), "RAY_memory_monitor_refresh_ms": "100"}
    process = start(*command, **monitor)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    (recovery,) = read_jsonl(tmp_path / "run" / "recoveries.jsonl")
    assert (recovery["action"], recovery["faults"]) == ("smaller", ["memory"])
    assert recovery["errors"][0].startswith("WorkerMemoryError: worker actor_rollout")
    assert "killed due to the node running low on memory" in recovery["errors"][0]
