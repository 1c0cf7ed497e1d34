"""Tiny runs with vLLM: colocated with training, one engine shared by ranks, and engines in a separate pool."""

import contextlib
import math
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridflow.observability import read_jsonl

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

VLLM = ("rollout.backend=vllm", "rollout.enforce_eager=true", "rollout.kv_cache_bytes=67108864")
ON_RAY = ("controller.backend=ray", "controller.cpus_per_worker=0.5", "data.val_files=[]", "trainer.total_steps=2")
OWN_POOL = ("placement.pools={learn=[1],generate=[2]}", "placement.roles.rollout=generate")
KILL = "2: kill rollout/0 in generate"
"""The fault of the layout `disk`, whose results are those of `broadcast`: a whole run less than with one of its own."""
LAYOUTS = {
    "shared": ("controller.num_workers=2", "parallel.tensor=2", "rollout.tensor=2"),
    "replicas": ("controller.num_workers=2",),
    "object_store": (*OWN_POOL, "rollout.weight_sync=object_store", "rollout.tensor=2"),
    "broadcast": (*OWN_POOL, "rollout.weight_sync=broadcast", "rollout.sync_bucket_bytes=20000"),
    "disk": (*OWN_POOL, "rollout.weight_sync=disk", "rollout.sync_bucket_bytes=20000", f'faults.plan=["{KILL}"]'),
    "ipc": (*OWN_POOL, "rollout.weight_sync=ipc", "rollout.sync_bucket_bytes=20000"),
}
IN_FLIGHT = (
    *("placement.pools={learn=[1],generate=[1]}", "placement.roles.rollout=generate", "trainer.total_steps=6"),
    *("trainer.lag=1", "rollout.on_new_weights=retract", "algorithm.rollout_weights=token"),
    *("data.max_response_length=200", "memory.max_tokens_per_micro_batch=4096"),  # generation outlasts an update
)


@pytest.fixture(scope="module")
def vllm_task(tiny, tmp_path_factory):
    """Return the tiny task with a head size that vLLM supports on a CPU."""
    task = tiny.write_task(tmp_path_factory.mktemp("vllm_task"))
    tiny.write_model(task / "model", seed=0, width=64, layers=2, heads=2)
    return task


@pytest.fixture(scope="module")
def local_runs(tiny, vllm_task, run_in_turn, tmp_path_factory):
    """Return GRPO runs on one process: uninterrupted (`whole`), resumed, `one`, and with LoRA."""
    directory = tmp_path_factory.mktemp("vllm_runs")
    recipe = f"{vllm_task}/rl.toml"
    grpo = ["train", recipe, *VLLM, *tiny.GRPO, "trainer.total_steps=4"]
    run_in_turn(
        [*grpo, f"trainer.run_dir={directory}/whole"],
        [*grpo, f"trainer.run_dir={directory}/resumed", "--stop-after", "2"],
        [*grpo, f"trainer.run_dir={directory}/resumed"],
        [*("train", recipe), *VLLM, "data.val_files=[]", "trainer.total_steps=2", f"trainer.run_dir={directory}/one"],
        [*("train", recipe), *VLLM, "lora.rank=4", "trainer.total_steps=2", f"trainer.run_dir={directory}/lora"],
    )
    return SimpleNamespace(**{path.name: path for path in directory.iterdir()})


@pytest.fixture(scope="module")
def runs(vllm_task, run_in_turn, local_runs):
    """Return `local_runs`, and on Ray LAYOUTS and `in_flight`; no set-up may come near the time limit of a test."""
    directory = local_runs.whole.parent
    on_ray = ["train", f"{vllm_task}/rl.toml", *VLLM, *ON_RAY]
    layouts = (
        [*on_ray, *layout, f"trainer.run_dir={directory}/{name}"]
        for name, layout in {**LAYOUTS, "in_flight": IN_FLIGHT}.items()
    )
    run_in_turn(*layouts, shares_cluster=True, forks_workers=False)  # vLLM sets up its process at import
    return SimpleNamespace(**{path.name: path for path in directory.iterdir()})


def test_resumed_vllm_run_is_bit_identical_to_uninterrupted_run(tiny, local_runs):
    whole, resumed = (tiny.results_of(run, 4) for run in (local_runs.whole, local_runs.resumed))
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if whole[name] != resumed[name]] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_do_not_depend_on_the_layout_or_the_weight_transport(runs, layout, tiny):
    run = getattr(runs, layout)
    assert tiny.texts_of(run) == tiny.texts_of(runs.one)
    for one, other in zip(*(read_jsonl(path / "metrics.jsonl") for path in (runs.one, run)), strict=True):
        for name in ("actor/loss", "actor/grad_norm", "actor/entropy"):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7), name
        assert other["critic/score/mean"] == one["critic/score/mean"]
    assert not (run / "weight_sync").exists()


def test_a_run_that_loses_a_vllm_engine_has_the_results_of_an_undisturbed_one(tiny, runs):
    assert [row["fault"] for row in read_jsonl(runs.disk / "faults" / "fired.jsonl")] == [KILL]
    (row,) = read_jsonl(runs.disk / "recoveries.jsonl")
    assert (row["step"], row["from_step"], row["action"], row["restarted"]) == (2, 1, "restart", ["rollout"])
    disturbed, undisturbed = tiny.results_of(runs.disk, 2), tiny.results_of(runs.broadcast, 2)
    assert disturbed.keys() == undisturbed.keys()
    for results in (disturbed, undisturbed):  # another transport, and new engines get the weights again
        results["metrics"] = [{n: v for n, v in row.items() if "weight_sync/" not in n} for row in results["metrics"]]
    assert [name for name in disturbed if disturbed[name] != undisturbed[name]] == []


@pytest.mark.parametrize("name", ["whole", "one", "lora", *LAYOUTS])
def test_every_step_reports_the_log_prob_mismatch(runs, name):
    rows = read_jsonl(getattr(runs, name) / "metrics.jsonl")
    for row in (row for row in rows if row["step"]):
        assert 0 <= row["rollout/log_prob_mismatch"] <= row["rollout/log_prob_mismatch_max"] < 1e-4
        assert row["rollout/log_prob_mismatch_share"] == 0.0
        assert abs(row["rollout/log_prob_kl"]) < 1e-6
    synced = [row for row in rows if "weight_sync/bytes" in row]
    assert synced
    assert all(row["weight_sync/probe_diff_mean"] < 1e-5 for row in synced)


def test_vllm_goes_on_with_new_weights_in_a_whole_run_with_a_lag(runs):
    rows = [row for row in read_jsonl(runs.in_flight / "metrics.jsonl") if row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[0]["staleness/max"] == 0
    assert all(row["staleness/age_0"] + row["staleness/age_1"] == pytest.approx(1) for row in rows)
    assert any(0 < row["staleness/mean"] < 1 for row in rows), "no batch with tokens of several versions"
    assert rows[0]["rollout/log_prob_mismatch_max"] < 1e-4
    assert all(row.get("weight_sync/probe_diff_max", 0) < 1e-4 for row in rows)
    events = [(row["event"], row["number"]) for row in read_jsonl(runs.in_flight / "schedule.jsonl")]
    assert sorted(events) == [(event, number) for event in ("begin", "load") for number in range(6)]


def test_ranks_that_share_an_engine_receive_only_their_slices(runs):
    for name, most in {"shared": 0.25, "replicas": 0.6}.items():
        synced = [row for row in read_jsonl(getattr(runs, name) / "metrics.jsonl") if "weight_sync/bytes" in row]
        assert synced
        for row in synced:
            assert row["weight_sync/bytes_received"] < most * row["weight_sync/bytes"]
    synced = [row for row in read_jsonl(runs.replicas / "metrics.jsonl") if "weight_sync/bytes" in row]
    assert all(row["weight_sync/bytes_received"] > 0.4 * row["weight_sync/bytes"] for row in synced)


def test_vllm_wakes_weights_before_kv_cache_and_sleeps_after_generation(vllm_task, monkeypatch):
    import torch

    from hybridflow.config import load_config
    from hybridflow.protocol import DataProto
    from hybridflow.rollout.vllm import VLLMRollout
    from hybridflow.workers import ActorRolloutWorker

    calls = []
    for name in ("wake", "start_loading", "finish_loading", "log_probs", "submit", "sleep"):
        original = getattr(VLLMRollout, name)

        def recorded(self, *args, name=name, original=original, **kwargs):
            call = f"wake {args[0]}" if name == "wake" else name
            if calls[-1:] != [call]:
                calls.append(call)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(VLLMRollout, name, recorded)
    worker = ActorRolloutWorker(load_config(f"{vllm_task}/rl.toml", [*VLLM]))
    prompts = DataProto.from_dict(
        {"prompts": torch.tensor([[5, 6]]), "prompt_mask": torch.ones(1, 2), "group_ids": torch.zeros(1).long()},
        meta_info={"noise_key": [0, 0, 0]},
    )
    assert calls == ["sleep"]  # the memory is free for training
    synced = ["wake weights", "start_loading", "finish_loading", "wake kv_cache", "log_probs"]
    worker.sync_weights()
    assert calls[1:] == synced
    worker.generate_sequences(prompts)
    assert calls[6:] == ["submit", "sleep"]
    worker.generate_validation_sequences(prompts)  # without a sync: on a CPU the weights survive sleep
    assert calls[8:] == ["wake weights", "wake kv_cache", "submit", "sleep"]
    del calls[:]
    worker.rollout.version = None  # as after sleeping on a GPU
    worker.generate_sequences(prompts)
    assert calls == [*synced, "submit", "sleep"]


def test_evaluate_and_generate_work_with_vllm(vllm_task, hybridflow):
    done = hybridflow("evaluate", f"{vllm_task}/rl.toml", *VLLM)
    assert done.status == 0
    assert "score" in done.out
    done = hybridflow("generate", f"{vllm_task}/rl.toml", *VLLM, "--prompt", "1 2 3 => 6 :")
    assert done.status == 0
    assert "response" in done.out


def process_with_vllm(driver):
    """Return the worker process among the descendants of a driver that has loaded vLLM."""
    parents, candidates = {}, []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has exited
            parents[int(directory.name)] = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
            if "/vllm/_C" in (directory / "maps").read_text():
                candidates.append(int(directory.name))

    def is_descendant(pid):
        return pid == driver or (pid in parents and is_descendant(parents[pid]))

    (pid,) = (pid for pid in candidates if is_descendant(pid))
    return pid


@pytest.mark.xdist_group("vllm deaths")  # beside the runs of the other tests
@pytest.mark.parametrize(
    ("signal_number", "problem"),
    [(signal.SIGKILL, "died before"), (signal.SIGSTOP, "longer than its deadline of 40 s")],
)
def test_dead_or_hanging_engine_ends_the_run(vllm_task, start, tmp_path, signal_number, problem):
    run = ["train", f"{vllm_task}/rl.toml", *VLLM, "controller.backend=ray", "controller.cpus_per_worker=0.5"]
    run += ["data.val_files=[]", "trainer.epochs=200", "placement.pools={learn=[1],generate=[1]}"]
    run += ["placement.roles.rollout=generate", "controller.call_timeout_s=40", f"trainer.run_dir={tmp_path}/run"]
    run += ["recovery.max_restarts=0", "controller.heartbeat_timeout_s=none"]
    process = start(*run)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and len(metrics.read_bytes().splitlines()) >= 2):
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pid = process_with_vllm(process.pid)
    os.kill(pid, signal_number)
    try:
        _, errors = process.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert process.returncode == 75
    assert re.search(problem, errors), errors[-3000:]
    assert "rollout" in errors
