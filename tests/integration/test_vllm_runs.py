"""Whole tiny runs that generate with vLLM: where the policy learns, on ranks that share an engine, in another pool."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridflow.observability import read_jsonl

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

VLLM = ("rollout.backend=vllm", "rollout.enforce_eager=true", "rollout.kv_cache_bytes=67108864")
ON_RAY = ("controller.backend=ray", "controller.cpus_per_worker=0.5", "data.val_files=[]", "trainer.total_steps=2")
OWN_POOL = ("placement.pools={learn=[1],generate=[2]}", "placement.roles.rollout=generate")
LAYOUTS = {
    "shared": ("controller.num_workers=2", "parallel.tensor=2", "rollout.tensor=2"),
    "own": ("controller.num_workers=2",),
    "object_store": (*OWN_POOL, "rollout.weight_sync=object_store", "rollout.tensor=2"),
    "broadcast": (*OWN_POOL, "rollout.weight_sync=broadcast", "rollout.sync_bucket_bytes=20000"),
    "disk": (*OWN_POOL, "rollout.weight_sync=disk", "rollout.sync_bucket_bytes=20000"),
}
PROGRAM = """
import json, sys
from hybridflow.cli.main import main
sys.exit(max(main(arguments) for arguments in json.loads(sys.argv[1])))
"""


def run_in_turn(*commands):
    arguments = json.dumps([[str(part) for part in command] for command in commands])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def vllm_task(tiny, tmp_path_factory):
    """The tiny task, with heads of the size that vLLM computes on a CPU."""
    task = tiny.write_task(tmp_path_factory.mktemp("vllm_task"))
    tiny.TASK["write_model"](task / "model", seed=0, width=64, layers=2, heads=2)
    return task


@pytest.fixture(scope="module")
def runs(tiny, vllm_task, tmp_path_factory):
    """GRPO in one sitting and in two; the same in LAYOUTS on Ray."""
    directory = tmp_path_factory.mktemp("vllm_runs")
    recipe = f"{vllm_task}/rl.toml"
    grpo = ["train", recipe, *VLLM, *tiny.GRPO, "trainer.total_steps=4"]
    run_in_turn(
        [*grpo, f"trainer.run_dir={directory}/whole"],
        [*grpo, f"trainer.run_dir={directory}/parts", "--stop-after", "2"],
        [*grpo, f"trainer.run_dir={directory}/parts"],
        [*("train", recipe), *VLLM, "data.val_files=[]", "trainer.total_steps=2", f"trainer.run_dir={directory}/one"],
        [*("train", recipe), *VLLM, "lora.rank=4", "trainer.total_steps=2", f"trainer.run_dir={directory}/lora"],
    )
    for name, layout in LAYOUTS.items():
        run_in_turn(["train", recipe, *VLLM, *ON_RAY, *layout, f"trainer.run_dir={directory}/{name}"])
    return SimpleNamespace(**{path.name: path for path in directory.iterdir()})


def test_a_run_that_was_stopped_and_continued_is_the_uninterrupted_one_to_the_bit(tiny, runs):
    whole, parts = tiny.results_of(runs.whole, 4), tiny.results_of(runs.parts, 4)
    assert whole.keys() == parts.keys()
    assert [name for name in whole if whole[name] != parts[name]] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_do_not_depend_on_who_generates_nor_on_the_transport_of_weights(runs, layout):
    run = getattr(runs, layout)
    assert read_jsonl(run / "samples.jsonl") == read_jsonl(runs.one / "samples.jsonl")
    for one, other in zip(*(read_jsonl(path / "metrics.jsonl") for path in (runs.one, run)), strict=True):
        for name in ("actor/loss", "actor/grad_norm", "actor/entropy"):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7), name
        assert other["critic/score/mean"] == one["critic/score/mean"]
    assert not (run / "weight_sync").exists()


@pytest.mark.parametrize("name", ["whole", "one", "lora", *LAYOUTS])
def test_every_step_tells_how_far_the_engine_is_from_the_trainer(runs, name):
    rows = read_jsonl(getattr(runs, name) / "metrics.jsonl")
    for row in (row for row in rows if row["step"]):
        assert 0 <= row["rollout/log_prob_mismatch"] <= row["rollout/log_prob_mismatch_max"] < 1e-4
        assert row["rollout/log_prob_mismatch_share"] == 0.0
        assert abs(row["rollout/log_prob_kl"]) < 1e-6
    synced = [row for row in rows if "weight_sync/bytes" in row]
    assert synced
    assert all(row["weight_sync/probe_diff_mean"] < 1e-5 for row in synced)


def test_memory_comes_for_weights_first_and_goes_when_all_is_generated(vllm_task, monkeypatch):
    import torch

    from hybridflow.config import load_config
    from hybridflow.protocol import DataProto
    from hybridflow.rollout.vllm import VLLMRollout
    from hybridflow.workers import ActorRolloutWorker

    calls = []
    for name in ("wake", "start_loading", "finish_loading", "log_probs", "submit", "sleep"):
        own = getattr(VLLMRollout, name)

        def recorded(self, *args, name=name, own=own, **kwargs):
            told = f"wake {args[0]}" if name == "wake" else name
            if calls[-1:] != [told]:
                calls.append(told)
            return own(self, *args, **kwargs)

        monkeypatch.setattr(VLLMRollout, name, recorded)
    worker = ActorRolloutWorker(load_config(f"{vllm_task}/rl.toml", [*VLLM]))
    prompts = DataProto.from_dict(
        {"prompts": torch.tensor([[5, 6]]), "prompt_mask": torch.ones(1, 2), "group_ids": torch.zeros(1).long()},
        meta_info={"noise_key": [0, 0, 0]},
    )
    assert calls == ["sleep"]  # training has the memory
    synced = ["wake weights", "start_loading", "finish_loading", "wake kv_cache", "log_probs"]
    worker.sync_weights()
    assert calls[1:] == synced
    worker.generate_sequences(prompts)
    assert calls[6:] == ["submit", "sleep"]
    worker.generate_validation_sequences(prompts)  # nobody asked for a sync; on a CPU the weights are still there
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
    """The worker process below a driver that has vLLM in it."""
    parents, candidates = {}, []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            parents[int(directory.name)] = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
            if "/vllm/_C" in (directory / "maps").read_text():
                candidates.append(int(directory.name))

    def is_below(pid):
        return pid == driver or (pid in parents and is_below(parents[pid]))

    (pid,) = (pid for pid in candidates if is_below(pid))
    return pid


@pytest.mark.parametrize(
    ("sign", "told"), [(signal.SIGKILL, "died while"), (signal.SIGSTOP, "longer than its deadline of 20 s")]
)
def test_an_engine_that_dies_or_hangs_in_its_pool_ends_the_run_in_time(vllm_task, start, tmp_path, sign, told):
    run = ["train", f"{vllm_task}/rl.toml", *VLLM, "controller.backend=ray", "controller.cpus_per_worker=0.5"]
    run += ["data.val_files=[]", "trainer.epochs=200", "placement.pools={learn=[1],generate=[1]}"]
    run += ["placement.roles.rollout=generate", "controller.call_timeout_s=20", f"trainer.run_dir={tmp_path}/run"]
    process = start(*run)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (metrics.exists() and len(metrics.read_bytes().splitlines()) >= 2):
        time.sleep(0.05)
    pid = process_with_vllm(process.pid)
    os.kill(pid, sign)
    stopped_at = time.monotonic()
    try:
        _, errors = process.communicate(timeout=90)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert time.monotonic() - stopped_at < 60
    assert process.returncode == 75
    assert re.search(told, errors), errors[-3000:]
    assert "rollout" in errors
