"""Tiny runs on Ray: equality with the local backend, overlap of stages, transferred bytes, signals and killed ranks."""

import contextlib
import os
import re
import signal
import time
from itertools import pairwise

import psutil
import pytest

from fixtures.tiny_run import FROM_RAY, GRPO, PPO, differing, metrics_differ
from fixtures.trace_coverage import coverage
from hybridflow.config import load_config
from hybridflow.runtime.observe import TraceEvent, dataflow_edges, read_jsonl
from hybridflow.runtime.observe.run_files import RunFiles
from hybridflow.trainers import run_on_placeholders

pytestmark = [pytest.mark.ray, pytest.mark.runs]

SEPARATE_POOLS = (
    "placement.pools={main=[1],second=[1],third=[1],fourth=[1]}",
    "placement.roles={critic='second',reference='third',reward='fourth'}",
)
ON_RAY = ("controller.backend=ray", "controller.cpus_per_worker=0.5")
EXACT = ("model.dtype=float64", "trainer.total_steps=2", "data.val_files=[]", *GRPO)
ONE_STEP = ("actor.epochs=1",)

LAYOUTS = {
    "4": ("controller.num_workers=4",),
    "measured": ("controller.num_workers=2", "controller.parts=measured", "trainer.deterministic=false"),
    "tensor": ("placement.pools={learn=[4],generate=[1]}", "placement.roles.rollout=generate", "parallel.tensor=2"),
    "replicas": ("placement.pools={learn=[4],generate=[1]}", "placement.roles.rollout=generate", "parallel.replicas=2"),
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
        *("algorithm.filter_groups=true", "reward.overlong_buffer=4", "algorithm.rollout_weights=token", *ONE_STEP),
    ),
    "gspo_remax": (
        *("algorithm.advantage=remax", "algorithm.kl_in_loss=false", "algorithm.kl_in_reward=true"),
        *("actor.policy_loss=gspo", "actor.loss_aggregation=seq-mean-token-mean"),
        *("algorithm.rollout_reject={token_k3 = [0.0, 1.0]}", *ONE_STEP),
    ),
    "distillation": (
        *("teacher.model_path={task}/teacher", "teacher.loss=reverse_kl", "teacher.top_k=5"),
        *("algorithm.advantage=distillation", *ONE_STEP),
    ),
    "clip_cov_otb": ("algorithm.advantage=optimal-token-baseline", "actor.policy_loss=clip-cov", *ONE_STEP),
}
"""Algorithms that read extra batch columns, which the workers compute."""
SAME = ("actor/", "critic/", "sampling/", "rollout_correction/", "response_length/", "dpo/", "reward_model/")


def test_one_ray_worker_is_bit_identical_to_the_local_backend(ppo_run, ray_run):
    assert differing(ppo_run, ray_run, 6) <= FROM_RAY


def test_two_workers_have_the_metrics_of_one(grpo_run, ray_two_run):
    assert metrics_differ(grpo_run, ray_two_run, *SAME) == []
    keys = ("step", "prompt", "response", "score")
    samples, others = (read_jsonl(run / "samples.jsonl") for run in (grpo_run, ray_two_run))
    assert [[row[key] for key in keys] for row in samples] == [[row[key] for key in keys] for row in others]


def test_two_workers_balance_their_rows_and_share_few_bytes_with_the_controller(ray_two_run):
    rows = read_jsonl(ray_two_run / "metrics.jsonl")[1:]
    before, after = (sum(row[f"balance/imbalance_{when}"] for row in rows) for when in ("before", "after"))
    assert after < 0.5 * before
    for row in rows:
        assert 0 < row["transfer/bytes_read"] < 0.1 * row["transfer/bytes_flowed"]
        assert 0 < row["transfer/bytes_sent"] < 0.5 * row["transfer/bytes_flowed"]


def test_the_trace_knows_each_moment_of_two_workers(ray_two_run):
    shares = coverage(RunFiles(ray_two_run).events)
    assert {step: len(of_step) for step, of_step in shares.items() if step} == dict.fromkeys(range(1, 7), 2)
    of_processes = [share for of_step in shares.values() for share in of_step.values()]
    assert of_processes == pytest.approx([1.0] * len(of_processes), abs=0.02)


@pytest.fixture(scope="module")
def runs(task, tmp_path_factory, run_in_turn):
    """Return a function that runs commands, (name, arguments), once each, and returns their directories."""
    directory = tmp_path_factory.mktemp("ray_runs")

    def run(commands):
        commands = {name: [str(each).replace("{task}", str(task)) for each in command] for name, command in commands}
        new = [name for name in commands if not (directory / name).exists()]
        given = [[*commands[name], f"trainer.run_dir={directory}/{name}"] for name in new]
        run_in_turn(*given, shares_cluster=True)
        return [directory / name for name in commands]

    return run


TRAIN = ("train", "{task}/rl.toml", *EXACT)
IN_CI = ("tensor", "generation")


@pytest.mark.own_run("ray_two: with other layouts")
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in IN_CI)) for name in LAYOUTS]
)
def test_loss_and_gradient_do_not_depend_on_the_layout(runs, layout):
    one, several = runs([("one", TRAIN), (layout, (*TRAIN, *ON_RAY, *LAYOUTS[layout]))])
    names = ("actor/loss", "actor/policy_loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy", "actor/lr")
    assert metrics_differ(one, several, *names, "critic/score", "response_length/mean", absolute=1e-14) == []
    if layout in IN_CI:  # weights are sent to another pool
        rows = read_jsonl(several / "metrics.jsonl")
        assert all(row["weight_sync/bytes"] > 0 for row in rows[1:])
        assert all(0 <= row["weight_sync/probe_diff_mean"] < 1e-9 for row in rows[1:])


@pytest.mark.exhaustive
@pytest.mark.own_run("ray_two: with other algorithms")
@pytest.mark.parametrize("name", [*ALGORITHMS, "dpo", "reward-model"])
def test_algorithms_on_two_ranks_equal_one_rank(runs, name):
    command = [*TRAIN, *ALGORITHMS[name]] if name in ALGORITHMS else [name, "{task}/pairs.toml", *EXACT[:3]]
    two = [*command, *ON_RAY, "controller.num_workers=2"]
    one, two = runs([(f"{name}_1", command), (f"{name}_2", two)])
    assert metrics_differ(one, two, *SAME) == []
    prefix = name.replace("-", "_") if name not in ALGORITHMS else "actor"
    assert all(row[f"{prefix}/grad_norm"] > 0 for row in read_jsonl(two / "metrics.jsonl"))


def events_of(run):
    """Return the traced events of a run as (step, event) pairs."""
    events = []
    for row in read_jsonl(run / "trace" / "calls.jsonl"):
        sources = tuple((producer, tuple(columns)) for producer, columns in row.pop("sources"))
        events.append((row.pop("step"), TraceEvent(**row, sources=sources)))
    return events


@pytest.mark.own_run("ray: in one pool and in four")
def test_stages_overlap_on_separate_pools_and_have_the_planned_dataflow(runs):
    command = ["train", "{task}/rl.toml", *PPO, *ON_RAY, "critic.warmup_steps=0", "trainer.total_steps=2"]
    command.append("reward.function={task}/reward.py:slow_score")
    commands = [("separate_pools", [*command, *SEPARATE_POOLS]), ("one_pool", command)]
    separate, one = runs(commands)
    for step in (1, 2):
        calls = {e.method: e for s, e in events_of(separate) if s == step and e.kind == "call"}
        for method in ("compute_ref_log_probs", "compute_values", "compute_log_probs"):
            assert calls[method].start < calls["score"].end - 0.2, method  # the rewards take half a second
    times = sorted((e.start, e.end) for _, e in events_of(one) if e.kind == "call")
    assert all(end <= next_start for (_, end), (next_start, _) in pairwise(times))
    for run in (separate, one):
        planned = set(dataflow_edges(run_on_placeholders(load_config(run / "config.toml"))))
        training = [event for step, event in events_of(run) if step == 1 and "validation" not in event.where]
        assert planned == set(dataflow_edges(training))


@pytest.mark.exhaustive
@pytest.mark.own_run("ray: it gets a signal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_the_process_group_finishes_the_step_and_saves(task, fork_server, tmp_path, number):
    command = ["-m", "hybridflow", "train", f"{task}/rl.toml", "controller.backend=ray"]
    command += ["data.val_files=[]", "trainer.epochs=100", f"trainer.run_dir={tmp_path}/run"]
    (temporary := tmp_path / "temporary").mkdir()
    environment = {**os.environ, "SECONDS_FOR_EACH_REWARD": "0.02", "TMPDIR": str(temporary)}
    process = fork_server.start(command, environment=environment, merge_streams=True, new_session=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        wait_for_rows(metrics, 1, process)
        os.killpg(process.pid, number)  # as terminals and schedulers do
        output, _ = process.communicate()
    finally:
        process.discard()
    assert process.returncode == 0, output
    assert "stopped after step" in output
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert checkpoint.name == f"step_{len(read_jsonl(metrics)):06d}"
    assert list(temporary.glob("hybridflow-*")) == []


@pytest.mark.own_run("ray: it gets a signal while it starts")
@pytest.mark.parametrize(("number", "service"), [(signal.SIGINT, "gcs_server"), (signal.SIGTERM, "raylet")])
def test_a_signal_while_ray_starts_is_an_interrupt(task, fork_server, tmp_path, number, service):
    (temporary := tmp_path / "temporary").mkdir()
    command = [
        "-m",
        "hybridflow",
        "train",
        f"{task}/rl.toml",
        "controller.backend=ray",
        f"trainer.run_dir={tmp_path}/run",
    ]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = fork_server.start(command, environment=environment, merge_streams=True, new_session=True)
    try:
        while not pids_of(process.pid, service):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(number)
        output, _ = process.communicate()
    finally:
        process.discard()
    assert process.returncode == 130, output
    assert output.endswith("interrupted\n")
    assert list(temporary.glob("hybridflow-*")) == []


def pids_of(driver, title):
    """Return the descendants of a driver whose command line contains this title."""
    pids = []
    for process in psutil.Process(driver).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # the process has exited
            pids += [process.pid] if title in " ".join(process.cmdline()) else []
    return pids


def wait_for_rows(file, count, process):
    while not (file.exists() and len(file.read_bytes().splitlines()) >= count):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.own_run("ray_two: a rank is killed, and the run ends")
def test_run_with_a_killed_rank_exits_75_and_resumes_identically(task, ray_two_run, start, run_in_turn, tmp_path):
    command = ["train", f"{task}/rl.toml", *GRPO, "model.dtype=float64", *ON_RAY, "controller.num_workers=2"]
    command += ["trainer.save_every=1", "trainer.save_in_background=true", "trainer.keep_checkpoints=99"]
    command += ["recovery.max_restarts=0", f"trainer.run_dir={tmp_path}/run"]
    process = start(*command, SECONDS_FOR_EACH_REWARD="0.1")
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for_rows(metrics, 2, process)
    rank = pids_of(process.pid, "ray::WorkerProcess")[-1]
    wait_for_rows(metrics, 3, process)
    os.kill(rank, signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == 75, errors
    assert "died before" in errors
    newest = max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert f"the newest checkpoint is that of step {newest}; run the same command to continue from there" in errors
    assert errors.endswith(f"\nThe same command continues from the last checkpoint, that of step {newest}.\n")
    assert 1 <= newest < 6
    run_in_turn(command, shares_cluster=True)
    assert differing(tmp_path / "run", ray_two_run, 6) <= FROM_RAY


@pytest.mark.exhaustive
@pytest.mark.own_run("ray: its cluster dies")
def test_run_whose_control_service_dies_exits_75_and_names_its_checkpoint(task, start, tmp_path):
    run_dir = tmp_path / "run"
    process = start(
        *("train", f"{task}/rl.toml", *GRPO, "data.val_files=[]", "controller.backend=ray"),
        *("trainer.save_every=1", "trainer.epochs=400", f"trainer.run_dir={run_dir}"),
    )
    wait_for_rows(run_dir / "metrics.jsonl", 2, process)
    (control_service,) = pids_of(process.pid, "/gcs_server ")
    os.kill(control_service, signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == 75, errors
    newest = max(int(path.name[5:]) for path in run_dir.glob("checkpoints/step_*"))
    assert re.search(r"^error: the control service of the Ray cluster \(GCS, 127\.0\.0\.1:\d+\) has died", errors, re.M)
    assert errors.endswith(f"\nThe same command continues from the last checkpoint, that of step {newest}.\n")
