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
from support.faults import fired_faults

from fixtures.planted_faults import faults
from hybridflow.errors import RolloutError
from hybridflow.runtime.observe import read_jsonl

pytestmark = pytest.mark.vllm
exhaustive = pytest.mark.exhaustive

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
    "disk": (*OWN_POOL, "rollout.weight_sync=disk", "rollout.sync_bucket_bytes=20000", faults(KILL)),
    "ipc": (*OWN_POOL, "rollout.weight_sync=ipc", "rollout.sync_bucket_bytes=20000"),
    "adapters": (*OWN_POOL, "rollout.tensor=2", "lora.rank=4", "rollout.merge_adapters=false"),
}
FP8 = (
    *("model.dtype=bfloat16", "rollout.quantization=fp8", "algorithm.rollout_weights=token"),
    *("lora.rank=4", "rollout.merge_adapters=false"),
)
IN_FLIGHT = (
    *("placement.pools={learn=[1],generate=[1]}", "placement.roles.rollout=generate", "trainer.total_steps=6"),
    *("trainer.lag=1", "rollout.on_new_weights=retract", "algorithm.rollout_weights=token"),
    *("data.max_response_length=200", "memory.max_tokens_per_micro_batch=4096"),  # generation outlasts an update
)


@pytest.fixture(scope="session")
def recipe(vllm_run) -> Path:
    """Return the recipe of the canonical run, whose model has heads that vLLM supports on a CPU."""
    return vllm_run.parent / "vllm_task" / "rl.toml"


@pytest.fixture(scope="module")
def resumed_run(recipe, tiny, run_in_turn, tmp_path_factory) -> Path:
    """Return the canonical run again, stopped after step 2 and continued."""
    run = tmp_path_factory.mktemp("vllm_runs") / "resumed"
    settings = (*tiny.GRPO, *VLLM, "trainer.save_every=1", "trainer.keep_checkpoints=9", "trainer.total_steps=4")
    command = ["train", recipe, *settings, f"trainer.run_dir={run}"]
    run_in_turn([*command, "--stop-after", "2"], command)
    return run


@pytest.fixture(scope="module")
def runs(recipe, run_in_turn, tmp_path_factory):
    """Return runs in one process (`one`, `lora`, `fp8`), and on Ray LAYOUTS and `in_flight`."""
    directory = tmp_path_factory.mktemp("vllm_runs")
    of_two_steps = ["train", recipe, *VLLM, "data.val_files=[]", "trainer.total_steps=2"]
    run_in_turn(
        [*of_two_steps, f"trainer.run_dir={directory}/one"],
        [*of_two_steps, "lora.rank=4", f"trainer.run_dir={directory}/lora"],
        [*of_two_steps, *FP8, f"trainer.run_dir={directory}/fp8"],
    )
    on_ray = ["train", recipe, *VLLM, *ON_RAY]
    layouts = (
        [*on_ray, *layout, f"trainer.run_dir={directory}/{name}"]
        for name, layout in {**LAYOUTS, "in_flight": IN_FLIGHT}.items()
    )
    run_in_turn(*layouts, shares_cluster=True, forks_workers=False)  # vLLM sets up its process at import
    return SimpleNamespace(**{path.name: path for path in directory.iterdir()})


def require_small_mismatch(run: Path) -> None:
    """Require log-probs of vLLM near those of training in every step, and syncs that were checked."""
    rows = read_jsonl(run / "metrics.jsonl")
    for row in (row for row in rows if row["step"]):
        assert 0 <= row["rollout/log_prob_mismatch"] <= row["rollout/log_prob_mismatch_max"] < 1e-4
        assert row["rollout/log_prob_mismatch_share"] == 0.0
        assert abs(row["rollout/log_prob_kl"]) < 1e-6
    synced = [row for row in rows if "weight_sync/bytes" in row]
    assert synced
    assert all(row["weight_sync/probe_diff_mean"] < 1e-5 for row in synced)


def test_every_step_reports_the_log_prob_mismatch(vllm_run):
    require_small_mismatch(vllm_run)


def test_resumed_vllm_run_is_bit_identical_to_uninterrupted_run(tiny, vllm_run, resumed_run):
    whole, resumed = (tiny.results_of(run, 4) for run in (vllm_run, resumed_run))
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if whole[name] != resumed[name]] == []


@exhaustive
@pytest.mark.parametrize("layout", ["lora", *LAYOUTS])
def test_samples_do_not_depend_on_the_layout_or_the_weight_transport(runs, layout, tiny):
    run = getattr(runs, layout)
    require_small_mismatch(run)
    if layout in ("lora", "adapters"):
        return
    assert tiny.texts_of(run) == tiny.texts_of(runs.one)
    for one, other in zip(*(read_jsonl(path / "metrics.jsonl") for path in (runs.one, run)), strict=True):
        for name in ("actor/loss", "actor/grad_norm", "actor/entropy"):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7), name
        assert other["critic/score/mean"] == one["critic/score/mean"]
    assert not (run / "weight_sync").exists()
    if layout in ("shared", "replicas"):  # ranks that share an engine receive only their slices
        least, most = {"shared": (0, 0.25), "replicas": (0.4, 0.6)}[layout]
        synced = [row for row in read_jsonl(run / "metrics.jsonl") if "weight_sync/bytes" in row]
        shares = [row["weight_sync/bytes_received"] / row["weight_sync/bytes"] for row in synced]
        assert all(least <= share < most for share in shares)


@exhaustive
def test_a_run_with_fp8_weights_corrects_for_their_log_probs(runs):
    rows = [row for row in read_jsonl(runs.fp8 / "metrics.jsonl") if row["step"]]
    assert all(1e-3 < row["rollout/log_prob_mismatch"] < 1 for row in rows)
    assert all(row["rollout_correction/weight_max"] > row["rollout_correction/weight_min"] for row in rows)


@exhaustive
def test_a_run_that_loses_a_vllm_engine_has_the_results_of_an_undisturbed_one(tiny, runs):
    assert [row["fault"] for row in fired_faults(runs.disk)] == [KILL]
    (row,) = read_jsonl(runs.disk / "recoveries.jsonl")
    assert (row["step"], row["from_step"], row["action"], row["restarted"]) == (2, 1, "restart", ["rollout"])
    disturbed, undisturbed = tiny.results_of(runs.disk, 2), tiny.results_of(runs.broadcast, 2)
    assert disturbed.keys() == undisturbed.keys()
    for results in (disturbed, undisturbed):  # another transport, and new engines get the weights again
        results["metrics"] = [{n: v for n, v in row.items() if "weight_sync/" not in n} for row in results["metrics"]]
    assert [name for name in disturbed if disturbed[name] != undisturbed[name]] == []


@exhaustive
def test_vllm_goes_on_with_new_weights_in_a_whole_run_with_a_lag(runs):
    rows = [row for row in read_jsonl(runs.in_flight / "metrics.jsonl") if row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        if row.get("mfu/gen", 0.0) is None:  # generation took no time, so that it would be above 1
            del row["mfu/gen"]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[0]["staleness/max"] == 0
    assert all(row["staleness/age_0"] + row["staleness/age_1"] == pytest.approx(1) for row in rows)
    assert any(0 < row["staleness/mean"] < 1 for row in rows), "no batch with tokens of several versions"
    assert rows[0]["rollout/log_prob_mismatch_max"] < 1e-4
    assert all(row.get("weight_sync/probe_diff_max", 0) < 1e-4 for row in rows)
    events = [(row["event"], row["number"]) for row in read_jsonl(runs.in_flight / "schedule.jsonl")]
    assert sorted(events) == [(event, number) for event in ("begin", "load") for number in range(6)]


def test_vllm_wakes_weights_before_kv_cache_and_sleeps_after_generation(recipe, monkeypatch):
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
    worker = ActorRolloutWorker(load_config(recipe, [*VLLM]))
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
    worker.close()
    with pytest.raises(RolloutError, match="this vLLM engine was closed"):
        worker.rollout.wake("weights")


@pytest.mark.parametrize("command", ["evaluate", "generate"])
def test_evaluate_and_generate_work_with_vllm(recipe, hybridflow, command):
    done = hybridflow(command, recipe, *VLLM, *(["--prompt", "1 2 3 => 6 :"] if command == "generate" else []))
    assert done.status == 0
    assert {"evaluate": "score", "generate": "response"}[command] in done.out


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


@exhaustive
@pytest.mark.parametrize(
    ("signal_number", "problem"),
    [(signal.SIGKILL, "died before"), (signal.SIGSTOP, "longer than its deadline of 40 s")],
)
def test_dead_or_hanging_engine_ends_the_run(recipe, start, tmp_path, signal_number, problem):
    run = ["train", recipe, *VLLM, "controller.backend=ray", "controller.cpus_per_worker=0.5"]
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
