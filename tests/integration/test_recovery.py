"""Runs that lose workers go on, and their results equal those of undisturbed runs bit for bit."""

import json
import re
from types import SimpleNamespace

import pytest

from hybridflow.observability import read_jsonl

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ON_RAY = ("controller.backend=ray", "controller.cpus_per_worker=0.5", "recovery.backoff_s=0")
POOLS = ("placement.pools={learn=[2],generate=[2]}", "placement.roles.rollout=generate")
STEPS = 4

RUNS = {
    "grpo": (),
    "ppo": (),
    "lag": ("trainer.lag=2", "actor.old_log_probs_from=rollout"),
}
"""Changes of each undisturbed run."""

FAULTS = {
    "start": ("grpo", "1: kill rollout/0 in start", "2: kill actor_rollout/0 in forward"),
    "backward": ("grpo", "2: kill actor_rollout/1 in backward"),
    "generate": ("grpo", "3: kill rollout/0 in generate"),
    "corrupt": ("grpo", "2: corrupt actor_rollout/0 in sync_send"),
    "stop": ("grpo", "3: stop rollout/1 in generate"),
    "save": ("grpo", "3: kill actor_rollout/1 in save"),
    "two": ("ppo", "2: kill critic/0 in backward", "2: kill rollout/1 in generate"),
    "again": ("ppo", "3: kill actor_rollout/0 in optimizer", "3: kill actor_rollout/1 in start"),
    "lag_generate": ("lag", "2: kill rollout/0 in generate"),
    "lag_backward": ("lag", "3: kill actor_rollout/0 in backward"),
    "standby": ("grpo", "2: kill rollout/0 in generate", "3: kill actor_rollout/1 in optimizer"),
}
"""Faults of each disturbed run, and the run that it must equal. A "start" after step 1 is that of a new process."""

KEYS = {"standby": ("recovery.standby=true",)}
"""Changes of a disturbed run that its undisturbed run has not."""

DAMAGED = ("3: corrupt actor_rollout/0 in save", "4: kill actor_rollout/1 in backward")
"""Faults of a run that saves a checkpoint of step 2: the snapshot of step 3 is damaged when step 4 needs it."""


@pytest.fixture(scope="module")
def runs(tiny, task, tmp_path_factory, run_in_turn):
    directory = tmp_path_factory.mktemp("recovery")
    common = [*ON_RAY, *POOLS, f"trainer.total_steps={STEPS}", "controller.heartbeat_timeout_s=5"]
    of = {"grpo": tiny.commands(task)["grpo"], "ppo": tiny.commands(task)["ppo"]}
    commands = []
    for name, changes in RUNS.items():
        commands.append([*of.get(name, of["grpo"]), *common, *changes, f"trainer.run_dir={directory}/{name}"])
    for name, (like, *faults) in FAULTS.items():
        changes = [*RUNS[like], *KEYS.get(name, ()), f"faults.plan={json.dumps(faults)}"]
        changes.append(f"trainer.run_dir={directory}/{name}")
        commands.append([*of.get(like, of["grpo"]), *common, *changes])
    changes = ["trainer.save_every=2", f"faults.plan={json.dumps(DAMAGED)}", f"trainer.run_dir={directory}/damaged"]
    commands.append([*of["grpo"], *common, *changes])
    log = run_in_turn(*commands, shares_cluster=True)
    return SimpleNamespace(log=log, **{path.name: path for path in directory.iterdir()})


def fired(run):
    return sorted(row["fault"] for row in read_jsonl(run / "faults" / "fired.jsonl"))


def require_same_results(tiny, disturbed, undisturbed, step):
    disturbed, undisturbed = (tiny.results_of(run, step) for run in (disturbed, undisturbed))
    assert disturbed.keys() == undisturbed.keys()
    for results in (disturbed, undisturbed):  # new processes get the weights again
        results["metrics"] = [{n: v for n, v in row.items() if "weight_sync/" not in n} for row in results["metrics"]]
    assert [key for key in disturbed if disturbed[key] != undisturbed[key]] == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_run_that_loses_workers_has_the_results_of_an_undisturbed_one(tiny, runs, name):
    like, *faults = FAULTS[name]
    assert fired(getattr(runs, name)) == sorted(faults)
    recovered = read_jsonl(getattr(runs, name) / "recoveries.jsonl")
    (start,) = json.loads((getattr(runs, name) / "run.json").read_text())["starts"]
    failed_starts = start.get("failed_starts", [])
    assert len(failed_starts) == sum(fault.startswith("1: ") for fault in faults)
    assert len(failed_starts) + sum(len(row["errors"]) for row in recovered) == len(faults)
    assert all(row["action"] == "restart" for row in recovered)
    require_same_results(tiny, getattr(runs, name), getattr(runs, like), STEPS)


def test_a_recovery_is_in_the_metrics_the_trace_and_a_file(runs):
    (row,) = read_jsonl(runs.backward / "recoveries.jsonl")
    assert (row["step"], row["from_step"], row["faults"]) == (2, 1, ["infrastructure"])
    assert {"actor_rollout", "reward"} <= set(row["restarted"])
    assert "rollout" not in row["restarted"]  # it only forgets the unfinished step
    metrics = {each["step"]: each for each in read_jsonl(runs.backward / "metrics.jsonl")}
    assert metrics[2]["recovery/failures"] == 1
    assert metrics[2]["recovery/repeated_steps"] == 0
    assert "recovery/failures" not in metrics[3]
    events = read_jsonl(runs.backward / "trace" / "calls.jsonl")
    (event,) = (each for each in events if each["kind"] == "recovery")
    assert event["where"] == "restart"
    assert event["worker"].startswith("actor_rollout")


def test_standbys_take_the_places_of_lost_workers(runs):
    taken = [line for line in runs.log.splitlines() if "standbys take the places of" in line]
    assert [line.rpartition(" ")[2] for line in taken] == ["rollout", "actor_rollout+reward+reference"]


def test_a_run_with_a_damaged_snapshot_goes_back_to_a_checkpoint(tiny, runs):
    assert fired(runs.damaged) == sorted(DAMAGED)
    (row,) = read_jsonl(runs.damaged / "recoveries.jsonl")
    assert (row["step"], row["from_step"], row["action"]) == (4, 2, "restart")
    (warning,) = (line for line in runs.log.splitlines() if "is damaged" in line)
    assert re.search(r"step 3 cannot be restored: .*/step_000003/actor/\S+ is damaged: its SHA-256 is", warning)
    assert "start again" not in warning
    metrics = {each["step"]: each for each in read_jsonl(runs.damaged / "metrics.jsonl")}
    assert (metrics[3]["recovery/failures"], metrics[3]["recovery/repeated_steps"]) == (1, 1)
    require_same_results(tiny, runs.damaged, runs.grpo, STEPS)


def test_training_out_of_memory_goes_on_with_smaller_micro_batches(task, tmp_path, run_in_turn):
    command = [
        "train",
        f"{task}/rl.toml",
        *ON_RAY,
        "data.val_files=[]",
        "controller.num_workers=2",
        "trainer.total_steps=2",
    ]
    command += ["model.dtype=float64", "algorithm.kl_in_loss=true"]
    plan = 'faults.plan=["2: memory actor_rollout/1 in backward"]'
    run_in_turn(
        [*command, f"trainer.run_dir={tmp_path}/whole"],
        [*command, f"trainer.run_dir={tmp_path}/small", plan],
        shares_cluster=True,
    )
    (row,) = read_jsonl(tmp_path / "small" / "recoveries.jsonl")
    assert (row["action"], row["faults"]) == ("smaller", ["memory"])
    budgets = json.loads((tmp_path / "small" / "token_budgets.json").read_text())["budgets"]
    assert budgets == {"actor_rollout": 50, "reference": 50}
    small, whole = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("small", "whole"))
    for name in ("actor/loss", "actor/grad_norm", "actor/entropy", "critic/score/mean"):
        assert [row[name] for row in small] == pytest.approx([row[name] for row in whole], rel=1e-9, abs=1e-12)


OFFLINE = {
    "sft": ("sft.toml", "2: kill actor/1 in backward"),
    "dpo": ("pairs.toml", "3: kill actor/0 in optimizer"),
}
"""Recipe and fault of each kind of offline training."""


@pytest.fixture(scope="module")
def offline_runs(task, tmp_path_factory, run_in_turn):
    """Return the directory of runs of OFFLINE: `sft` without a fault, `sft_faulty` with it."""
    directory = tmp_path_factory.mktemp("offline")
    commands = []
    for kind, (recipe, fault) in OFFLINE.items():
        command = [kind, f"{task}/{recipe}", *ON_RAY, "controller.num_workers=2", "trainer.total_steps=3"]
        commands.append([*command, f"trainer.run_dir={directory}/{kind}"])
        commands.append([*command, f"trainer.run_dir={directory}/{kind}_faulty", f"faults.plan={json.dumps([fault])}"])
    run_in_turn(*commands, shares_cluster=True)
    return directory


@pytest.mark.parametrize("kind", OFFLINE)
def test_offline_training_that_loses_a_worker_has_the_same_results(tiny, offline_runs, kind):
    faulty, fault = offline_runs / f"{kind}_faulty", OFFLINE[kind][1]
    assert fired(faulty) == [fault]
    (row,) = read_jsonl(faulty / "recoveries.jsonl")
    step = int(fault.partition(":")[0])
    assert (row["step"], row["from_step"], row["action"]) == (step, step - 1, "restart")
    assert "actor" in row["restarted"]
    require_same_results(tiny, faulty, offline_runs / kind, 3)
