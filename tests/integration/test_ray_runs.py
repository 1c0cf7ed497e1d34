"""Tiny runs on Ray: equality with the local backend, overlap of stages, transferred bytes, signals and killed ranks."""

import contextlib
import os
import re
import signal
import time
from itertools import pairwise
from types import SimpleNamespace

import psutil
import pytest

from hybridflow.config import load_config
from hybridflow.observability import TraceEvent, dataflow_edges, read_jsonl
from hybridflow.trainers import run_on_placeholders

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SEPARATE_POOLS = (
    "placement.pools={main=[1],second=[1],third=[1],fourth=[1]}",
    "placement.roles.critic=second",
    "placement.roles.reference=third",
    "placement.roles.reward=fourth",
)

LAYOUTS = {
    "4": ("controller.num_workers=4",),
    "measured": ("controller.num_workers=2", "controller.parts=measured", "trainer.deterministic=false"),
    "tensor": ("placement.pools={learn=[4],generate=[1]}", "placement.roles.rollout=generate", "parallel.tensor=2"),
    "sequence": ("controller.num_workers=2", "parallel.sequence=2"),
    "generation": (
        *("placement.pools={learn=[1],generate=[2]}", "placement.roles.rollout=generate"),
        *("rollout.weight_sync=broadcast", "rollout.sync_bucket_bytes=20000"),
    ),
}


ALGORITHMS = {
    "kl_cov_gdpo": (
        *("actor.policy_loss=kl-cov", "actor.policy_loss_kwargs.selected_share=0.1", "algorithm.advantage=gdpo"),
        *("reward.function={task}/reward.py:with_format", "reward.weights={score = 1.0, format = 0.5}"),
        *("algorithm.filter_groups=true", "reward.overlong_buffer=4", "algorithm.rollout_weights=token"),
    ),
    "gspo_remax": (
        *("algorithm.advantage=remax", "algorithm.kl_in_loss=false", "algorithm.kl_in_reward=true"),
        *("actor.policy_loss=gspo", "actor.loss_aggregation=seq-mean-token-mean"),
        "algorithm.rollout_reject={token_k3 = [0.0, 1.0]}",
    ),
    "distillation": (
        *("teacher.model_path={task}/teacher", "teacher.loss=reverse_kl", "teacher.top_k=5"),
        "algorithm.advantage=distillation",
    ),
    "clip_cov_otb": ("algorithm.advantage=optimal-token-baseline", "actor.policy_loss=clip-cov"),
}
"""Algorithms that read extra batch columns, which the workers compute."""


def events_of(run):
    """Return the traced events of a run as (step, event) pairs."""
    rows = read_jsonl(run / "trace" / "calls.jsonl")
    events = []
    for row in rows:
        sources = tuple((producer, tuple(columns)) for producer, columns in row.pop("sources"))
        events.append((row.pop("step"), TraceEvent(**row, sources=sources)))
    return events


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("ray_runs")


def runs_below(directory):
    return SimpleNamespace(**{path.name: path for path in directory.iterdir()})


EXACT = ("model.dtype=float64", "trainer.total_steps=2", "actor.mini_batch_size=4", "algorithm.kl_in_loss=true")
ON_RAY = ("controller.backend=ray", "controller.cpus_per_worker=0.5")


@pytest.fixture(scope="module")
def resumed(tiny, task, directory, run_in_turn):
    """Return a PPO run on one worker that was stopped and resumed, each time on a cluster started by the run."""
    ppo = [*tiny.commands(task)["ppo"], f"trainer.run_dir={directory}/ppo", *ON_RAY]
    run_in_turn([*ppo, "--stop-after", "2"], ppo)
    return runs_below(directory)


@pytest.fixture(scope="module")
def layouts(task, directory, run_in_turn):
    """Return float64 GRPO runs on one process and in each of LAYOUTS."""
    exact = ["train", f"{task}/rl.toml", *EXACT, "data.val_files=[]"]
    run_in_turn(
        [*exact, f"trainer.run_dir={directory}/exact_1"],
        *([*exact, *ON_RAY, f"trainer.run_dir={directory}/exact_{name}", *layout] for name, layout in LAYOUTS.items()),
        shares_cluster=True,
    )
    return runs_below(directory)


@pytest.fixture(scope="module")
def algorithms(task, directory, run_in_turn):
    """Return float64 runs of each of ALGORITHMS on one process and on two workers."""
    commands = []
    for name, options in ALGORITHMS.items():
        changes = [*EXACT, "data.val_files=[]", *(change.replace("{task}", str(task)) for change in options)]
        for ranks, where in ((1, []), (2, [*ON_RAY, "controller.num_workers=2"])):
            run_dir = f"trainer.run_dir={directory}/{name}_{ranks}"
            commands.append(["train", f"{task}/rl.toml", *changes, *where, run_dir])
    run_in_turn(*commands, shares_cluster=True)
    return runs_below(directory)


@pytest.fixture(scope="module")
def offline_runs(task, directory, run_in_turn):
    """Return float64 DPO and reward-model runs on one process and on two workers."""
    offline = [f"{task}/pairs.toml", "model.dtype=float64", "trainer.total_steps=2", "data.val_files=[]"]
    run_in_turn(
        *(
            [name, *offline, f"trainer.run_dir={directory}/{name}_{ranks}", *where]
            for ranks, where in ((1, []), (2, [*ON_RAY, "controller.num_workers=2"]))
            for name in ("dpo", "reward-model")
        ),
        shares_cluster=True,
    )
    return runs_below(directory)


@pytest.fixture(scope="module")
def pools(tiny, task, directory, run_in_turn):
    """Return PPO runs with critic, reference and rewards on separate pools and on one pool."""
    command = ["train", f"{task}/rl.toml", *tiny.PPO, *ON_RAY, "critic.warmup_steps=0", "trainer.total_steps=2"]
    run_in_turn(
        [*command, f"trainer.run_dir={directory}/separate_pools", *SEPARATE_POOLS],
        [*command, f"trainer.run_dir={directory}/one_pool"],
        shares_cluster=True,
        SECONDS_FOR_EACH_REWARD="0.02",
    )
    return runs_below(directory)


def require_same_results(one, other):
    assert one.keys() == other.keys()
    # Ray draws from Python's random number generator in the driver; our code does not.
    assert {name for name in one if one[name] != other[name]} <= {"controller.safetensors", "sha256 of files"}


def test_one_ray_worker_is_bit_identical_to_the_local_backend_after_resume(tiny, uninterrupted, resumed):
    require_same_results(tiny.results_of(uninterrupted.ppo, 6), tiny.results_of(resumed.ppo, 6))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradient_do_not_depend_on_the_layout(layouts, layout):
    runs = layouts.exact_1, getattr(layouts, f"exact_{layout}")
    one, several = (read_jsonl(run / "metrics.jsonl") for run in runs)
    for before, after in zip(one, several, strict=True):
        for name in ("actor/loss", "actor/policy_loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy"):
            assert after[name] == pytest.approx(before[name], rel=1e-9, abs=1e-14), name
        for name in ("critic/score/mean", "response_length/mean", "actor/lr"):
            assert after[name] == before[name]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_on_two_ranks_equal_one_rank(algorithms, name):
    one, two = (read_jsonl(getattr(algorithms, f"{name}_{ranks}") / "metrics.jsonl") for ranks in (1, 2))
    assert len(one) == 2
    for before, after in zip(one, two, strict=True):
        assert after["actor/grad_norm"] > 0
        same = ("actor/", "critic/", "sampling/", "rollout_correction/", "response_length/")
        for metric in (metric for metric in before if metric.startswith(same)):
            if not metric.endswith(("padding_computed", "shared_prompts")):
                assert after[metric] == pytest.approx(before[metric], rel=1e-9, abs=1e-12), metric


@pytest.mark.parametrize("name", ["dpo", "reward-model"])
def test_preference_training_on_two_ranks_equals_one_rank(offline_runs, name):
    one, two = (read_jsonl(getattr(offline_runs, f"{name}_{ranks}") / "metrics.jsonl") for ranks in (1, 2))
    prefix = name.replace("-", "_")
    for before, after in zip(one, two, strict=True):
        for metric in ("loss", "accuracy", "margin", "grad_norm"):
            assert after[f"{prefix}/{metric}"] == pytest.approx(before[f"{prefix}/{metric}"], rel=1e-9, abs=1e-12)
        assert after[f"{prefix}/grad_norm"] > 0


@pytest.mark.parametrize("layout", ["tensor", "generation"])
def test_weight_sync_to_another_pool_is_probed_at_every_step(layouts, layout):
    rows = read_jsonl(getattr(layouts, f"exact_{layout}") / "metrics.jsonl")
    assert [row["weight_sync/bytes"] > 0 for row in rows[1:]] == [True] * len(rows[1:])
    assert all(0 <= row["weight_sync/probe_diff_mean"] < 1e-9 for row in rows[1:])


def test_balancing_halves_the_load_imbalance_of_ranks(layouts):
    rows = read_jsonl(layouts.exact_4 / "metrics.jsonl")[1:]
    before, after = (sum(row[f"balance/imbalance_{when}"] for row in rows) for when in ("before", "after"))
    assert after < 0.5 * before


def test_stages_overlap_on_separate_pools_and_run_in_turn_on_one_pool(pools):
    for step in (1, 2):
        calls = {e.method: e for s, e in events_of(pools.separate_pools) if s == step and e.kind == "call"}
        score = calls["score"]
        for method in ("compute_ref_log_probs", "compute_values", "compute_log_probs"):
            assert calls[method].start < score.end - 0.2, method  # the rewards take half a second
    spans = sorted((e.start, e.end) for _, e in events_of(pools.one_pool) if e.kind == "call")
    assert all(end <= next_start for (_, end), (next_start, _) in pairwise(spans))


@pytest.mark.parametrize("name", ["one_pool", "separate_pools"])
def test_dataflow_graph_from_placeholders_equals_a_real_step(pools, name):
    run = getattr(pools, name)
    planned = set(dataflow_edges(run_on_placeholders(load_config(run / "config.toml"))))
    training = [event for step, event in events_of(run) if step == 1 and "validation" not in event.where]
    assert planned == set(dataflow_edges(training))


def test_controller_transfers_a_small_share_of_the_data(layouts):
    for row in read_jsonl(layouts.exact_4 / "metrics.jsonl")[1:]:
        assert 0 < row["transfer/bytes_read"] < 0.1 * row["transfer/bytes_flowed"]
        assert 0 < row["transfer/bytes_sent"] < 0.5 * row["transfer/bytes_flowed"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_the_process_group_finishes_the_step_and_saves(task, fork_server, tmp_path, number):
    command = ["-m", "hybridflow", "train", f"{task}/rl.toml", "controller.backend=ray"]
    command += ["data.val_files=[]", "trainer.epochs=100", f"trainer.run_dir={tmp_path}/run"]
    (temporary := tmp_path / "temporary").mkdir()
    environment = {**os.environ, "SECONDS_FOR_EACH_REWARD": "0.02", "TMPDIR": str(temporary)}
    process = fork_server.start(command, environment=environment, merge_streams=True, new_session=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    try:
        while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.1)
        os.killpg(process.pid, number)  # as terminals and schedulers do
        output, _ = process.communicate()
    finally:
        process.discard()
    assert process.returncode == 0, output
    assert "stopped after step" in output
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert checkpoint.name == f"step_{len(read_jsonl(metrics)):06d}"
    assert list(temporary.glob("hybridflow-*")) == []


def pids_of(driver, title):
    """Return the descendants of a driver whose command line contains this title."""
    pids = []
    for process in psutil.Process(driver).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # the process has exited
            pids += [process.pid] if title in " ".join(process.cmdline()) else []
    return pids


def wait_for_rows(file, count, timeout_s=200):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not (file.exists() and len(file.read_bytes().splitlines()) >= count):
        time.sleep(0.02)


def test_run_with_a_killed_rank_exits_75_and_resumes_identically(tiny, task, start, run_in_turn, tmp_path):
    command = ["train", f"{task}/rl.toml", *tiny.GRPO, "data.val_files=[]", "controller.backend=ray"]
    command += ["controller.num_workers=2", "trainer.save_every=1", "trainer.save_in_background=true"]
    command += ["trainer.keep_checkpoints=99", "trainer.epochs=4", "recovery.max_restarts=0"]
    whole, killed = ([*command, f"trainer.run_dir={tmp_path}/{name}"] for name in ("whole", "killed"))
    process = start(*killed)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    wait_for_rows(metrics, 1)
    rank = pids_of(process.pid, "ray::WorkerProcess")[-1]
    wait_for_rows(metrics, 2)
    os.kill(rank, signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == 75
    assert "died before" in errors
    newest = max(int(path.name[5:]) for path in (tmp_path / "killed" / "checkpoints").glob("step_*"))
    assert f"the newest checkpoint is that of step {newest}; run the same command to continue from there" in errors
    assert errors.endswith(f"\nThe same command continues from the last checkpoint, that of step {newest}.\n")
    assert 1 <= newest < 12
    run_in_turn(killed, whole, shares_cluster=True)
    require_same_results(*(tiny.results_of(tmp_path / name, 12) for name in ("killed", "whole")))


def test_run_whose_control_service_dies_exits_75_and_names_its_checkpoint(tiny, task, start, tmp_path):
    run_dir = tmp_path / "run"
    process = start(
        *("train", f"{task}/rl.toml", *tiny.GRPO, "data.val_files=[]", "controller.backend=ray"),
        *("trainer.save_every=1", "trainer.epochs=400", f"trainer.run_dir={run_dir}"),
    )
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not list(run_dir.glob("checkpoints/step_*")):
        time.sleep(0.02)
    (control_service,) = pids_of(process.pid, "/gcs_server ")
    os.kill(control_service, signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == 75, errors
    newest = max(int(path.name[5:]) for path in run_dir.glob("checkpoints/step_*"))
    assert re.search(r"^error: the control service of the Ray cluster \(GCS, 127\.0\.0\.1:\d+\) has died", errors, re.M)
    assert errors.endswith(f"\nThe same command continues from the last checkpoint, that of step {newest}.\n")
